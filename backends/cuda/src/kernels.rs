//! The kernels' text, and what was compiled of it.

use std::collections::HashMap;
use std::ffi::CString;

use mlxcel_abi::{AbiError, DType, Result};

use crate::compiler;
use crate::driver::{Driver, Function};

const COMMON: &str = include_str!("kernels/common.cuh");

/// One text, which gives several kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Text {
    /// Products.
    Product {
        /// Bits of a weight's value: 4, 8 or 16.
        bits: u32,
        /// Values that share a scale.
        group_size: u32,
    },
    /// Operations row by row.
    Rows,
    /// Attention over the pool.
    Attention {
        /// Features of a head.
        width: u32,
        /// Query heads that a block of `decode_rows` has.
        group: u32,
    },
}

impl Text {
    fn source(self) -> &'static str {
        match self {
            Self::Product { .. } => include_str!("kernels/product.cu"),
            Self::Rows => include_str!("kernels/rows.cu"),
            Self::Attention { .. } => include_str!("kernels/attention.cu"),
        }
    }

    fn defines(self, is_f16: bool) -> Vec<String> {
        let mut defines = vec![format!("F16={}", u32::from(is_f16))];
        match self {
            Self::Product { bits, group_size } => {
                defines.push(format!("WEIGHT_BITS={bits}"));
                defines.push(format!("GROUP_SIZE={group_size}"));
            }
            Self::Rows => {}
            Self::Attention { width, group } => {
                defines.push(format!("HEAD_WIDTH={width}"));
                defines.push(format!("GROUP_HEADS={group}"));
            }
        }
        defines
    }
}

/// Compiled kernels of one device.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    architecture: i32,
    modules: HashMap<(Text, bool), usize>,
    functions: HashMap<(Text, bool, &'static str), usize>,
}

impl Kernels {
    /// None compiled yet.
    pub(crate) fn new(architecture: i32) -> Self {
        Self {
            architecture,
            ..Self::default()
        }
    }

    /// A kernel for elements of `dtype`, compiled now unless it is there; `shared_bytes` is the most that it will be given.
    pub(crate) fn get(
        &mut self,
        driver: &Driver,
        text: Text,
        dtype: DType,
        name: &'static str,
        shared_bytes: u32,
    ) -> Result<Function> {
        let is_f16 = dtype == DType::F16;
        if let Some(found) = self.functions.get(&(text, is_f16, name)) {
            return Ok(*found as Function);
        }
        let module = match self.modules.get(&(text, is_f16)) {
            Some(module) => *module,
            None => {
                let source = format!("{COMMON}{}", text.source());
                let image = compiler::compile(&source, self.architecture, &text.defines(is_f16))?;
                let module = driver.load(&image)? as usize;
                self.modules.insert((text, is_f16), module);
                module
            }
        };
        let c_name = CString::new(name).map_err(|_| AbiError::internal("a kernel's name"))?;
        let function = driver.function(module as *mut _, &c_name, shared_bytes)?;
        self.functions
            .insert((text, is_f16, name), function as usize);
        Ok(function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generations that are compiled for in the test: the first with the instructions used, and that of the H100.
    const ARCHITECTURES: [i32; 2] = [80, 90];

    fn texts() -> Vec<Text> {
        let mut texts = vec![
            Text::Rows,
            Text::Product {
                bits: 16,
                group_size: 64,
            },
        ];
        for group_size in [32, 64, 128] {
            texts.extend([4, 8].map(|bits| Text::Product { bits, group_size }));
        }
        texts.extend(
            [(64, 3), (128, 4), (256, 2)].map(|(width, group)| Text::Attention { width, group }),
        );
        texts
    }

    /// Needs NVIDIA's compiler (the package nvidia-cuda-nvrtc, its folder on the library path), no device.
    #[test]
    fn every_text_compiles_where_the_compiler_is() {
        if !compiler::is_there() {
            return;
        }
        for text in texts() {
            for architecture in ARCHITECTURES {
                for is_f16 in [false, true] {
                    let source = format!("{COMMON}{}", text.source());
                    let image = compiler::compile(&source, architecture, &text.defines(is_f16));
                    assert!(!image.unwrap().is_empty(), "{text:?}");
                }
            }
        }
    }
}
