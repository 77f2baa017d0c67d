//! The kernels' text, and what was compiled of it.

use std::collections::HashMap;
use std::ffi::CString;

use mlxcel_abi::{AbiError, DType, Result};

use crate::collectives::Layout;
use crate::compiler;
use crate::driver::{Driver, Function};

const COMMON: &str = include_str!("kernels/common.cuh");
const ENGINE: &str = include_str!("kernels/engine.cuh");
const GROUP: &str = include_str!("kernels/group.cuh");
const CLUSTER: &str = include_str!("kernels/cluster.cuh");
const FEW: &str = include_str!("kernels/few.cuh");
const RAW: &str = include_str!("kernels/raw.cuh");
const LINES: &str = include_str!("kernels/lines.cuh");
const PAGED: &str = include_str!("kernels/paged.cuh");
const SCORES: &str = include_str!("kernels/scores.cuh");

/// First generation with a copy engine that brings tiles.
pub(crate) const ENGINE_ARCHITECTURE: i32 = 90;
/// The one generation with products of a group of warps.
pub(crate) const GROUP_ARCHITECTURE: i32 = 90;
/// Warps of a block of `stream_rows`.
pub(crate) const STREAM_WARPS: usize = 8;
/// Groups of warps of a block of `tiled`, each with 64 rows of the weight, and bytes of its pieces under way.
pub(crate) const TILE_TEAMS: usize = 2;
pub(crate) const TILE_BYTES: usize = 200 << 10;
/// Query rows of a block of `prefill_tiles`, keys that it has at a time, and tiles of them under way.
pub(crate) const PREFILL_ROWS: usize = 128;
pub(crate) const PREFILL_KEYS: usize = 128;
pub(crate) const PREFILL_STAGES: usize = 2;

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
    /// Products of very few rows, through the copy engine.
    Streamed {
        /// As above.
        bits: u32,
        /// As above.
        group_size: u32,
        /// Pieces of the weight that a warp has under way.
        stages: u32,
    },
    /// Products of several rows, through the copy engine and by groups of warps.
    Tiled {
        /// As above.
        bits: u32,
        /// As above.
        group_size: u32,
        /// Rows come in groups, each for one matrix of a stack.
        is_grouped: bool,
    },
    /// Products of several rows with small weights of 4 bits, by clusters of blocks that share the sum.
    Clustered {
        /// As above.
        group_size: u32,
    },
    /// Products of few rows with chosen matrices of a stack.
    Experts {
        /// As above.
        bits: u32,
        /// As above.
        group_size: u32,
    },
    /// Norm, router and choice of experts of few rows in one.
    Router {
        /// As above.
        bits: u32,
        /// As above.
        group_size: u32,
    },
    /// Which experts rows go to, and the sum of what they give.
    Choice {
        /// Logits are f32 instead of a half type.
        is_full: bool,
    },
    /// Operations row by row.
    Rows,
    /// A token for every row of logits.
    Sample {
        /// Logits are f32 instead of a half type.
        is_full: bool,
    },
    /// Attention over the pool.
    Attention {
        /// Features of a head.
        width: u32,
        /// Query heads that a block of `decode_rows` has.
        group: u32,
    },
    /// Rotation, append and attention of rows that are alone in their sequences, by clusters of blocks.
    Decode {
        /// Features of a head.
        width: u32,
        /// Query heads that a block has.
        group: u32,
        /// Units of keys that a warp has under way.
        stages: u32,
    },
    /// Sums over ranks.
    Ranks {
        /// Of their windows.
        layout: Layout,
    },
    /// Attention of many query rows, through the copy engine and by groups of warps.
    Prefill {
        /// Features of a head.
        width: u32,
    },
}

impl Text {
    fn source(self) -> String {
        let parts: &[&str] = match self {
            Self::Product { .. } => &[FEW, include_str!("kernels/product.cu")],
            Self::Experts { .. } => &[
                FEW,
                ENGINE,
                RAW,
                LINES,
                include_str!("kernels/experts.cu"),
                include_str!("kernels/grouped.cu"),
                include_str!("kernels/pairs.cu"),
                include_str!("kernels/experts_streamed.cu"),
            ],
            Self::Clustered { .. } => &[FEW, CLUSTER, RAW, include_str!("kernels/clustered.cu")],
            Self::Router { .. } => &[
                FEW,
                CLUSTER,
                include_str!("kernels/choice.cu"),
                include_str!("kernels/router.cu"),
            ],
            Self::Choice { .. } => &[include_str!("kernels/choice.cu")],
            Self::Streamed { .. } => &[ENGINE, include_str!("kernels/streamed.cu")],
            Self::Tiled { .. } => &[ENGINE, GROUP, include_str!("kernels/tiled.cu")],
            Self::Rows => &[include_str!("kernels/rows.cu")],
            Self::Ranks { .. } => &[include_str!("kernels/ranks.cu")],
            Self::Sample { .. } => &[CLUSTER, include_str!("kernels/sample.cu")],
            Self::Attention { .. } => &[
                PAGED,
                include_str!("kernels/attention.cu"),
                include_str!("kernels/prefill_rows.cu"),
            ],
            Self::Decode { .. } => &[CLUSTER, SCORES, include_str!("kernels/decode.cu")],
            Self::Prefill { .. } => &[PAGED, ENGINE, GROUP, include_str!("kernels/prefill.cu")],
        };
        [COMMON].into_iter().chain(parts.iter().copied()).collect()
    }

    /// What the compiler calls the generation.
    fn target(self, architecture: i32) -> String {
        // Products of a group of warps are of one generation alone.
        let own = if matches!(self, Self::Tiled { .. } | Self::Prefill { .. }) {
            "a"
        } else {
            ""
        };
        format!("sm_{architecture}{own}")
    }

    fn defines(self, is_f16: bool) -> Vec<String> {
        let mut defines = vec![format!("F16={}", u32::from(is_f16))];
        match self {
            Self::Product { bits, group_size } | Self::Experts { bits, group_size } => {
                defines.push(format!("WEIGHT_BITS={bits}"));
                defines.push(format!("GROUP_SIZE={group_size}"));
            }
            Self::Clustered { group_size } => {
                defines.push("WEIGHT_BITS=4".to_owned());
                defines.push(format!("GROUP_SIZE={group_size}"));
            }
            Self::Router { bits, group_size } => {
                defines.push(format!("WEIGHT_BITS={bits}"));
                defines.push(format!("GROUP_SIZE={group_size}"));
                defines.push("LOGITS_F32=0".to_owned());
            }
            Self::Streamed {
                bits,
                group_size,
                stages,
            } => {
                defines.push(format!("WEIGHT_BITS={bits}"));
                defines.push(format!("GROUP_SIZE={group_size}"));
                defines.push(format!("STREAM_WARPS={STREAM_WARPS}"));
                defines.push(format!("STREAM_STAGES={stages}"));
            }
            Self::Tiled {
                bits,
                group_size,
                is_grouped,
            } => {
                defines.push(format!("TILE_GROUPED={}", u32::from(is_grouped)));
                defines.push(format!("WEIGHT_BITS={bits}"));
                defines.push(format!("GROUP_SIZE={group_size}"));
                defines.push(format!("TILE_TEAMS={TILE_TEAMS}"));
                defines.push(format!("TILE_BYTES={TILE_BYTES}"));
            }
            Self::Rows => {}
            Self::Ranks { layout } => defines.extend(layout.defines()),
            Self::Sample { is_full } | Self::Choice { is_full } => {
                defines.push(format!("LOGITS_F32={}", u32::from(is_full)));
            }
            Self::Prefill { width } => {
                defines.push(format!("HEAD_WIDTH={width}"));
                defines.push(format!("PREFILL_TEAMS={}", PREFILL_ROWS / 64));
                defines.push(format!("PREFILL_KEYS={PREFILL_KEYS}"));
                defines.push(format!("PREFILL_STAGES={PREFILL_STAGES}"));
            }
            Self::Decode {
                width,
                group,
                stages,
            } => {
                defines.push(format!("HEAD_WIDTH={width}"));
                defines.push(format!("GROUP_HEADS={group}"));
                defines.push(format!("DECODE_STAGES={stages}"));
            }
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
                let target = text.target(self.architecture);
                let image = compiler::compile(&text.source(), &target, &text.defines(is_f16))?;
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
            [(4, 64), (8, 32), (16, 64)]
                .map(|(bits, group_size)| Text::Experts { bits, group_size }),
        );
        texts.extend([2, 3, 8].map(|ranks| Text::Ranks {
            layout: Layout { ranks },
        }));
        for is_full in [false, true] {
            texts.push(Text::Sample { is_full });
            texts.push(Text::Choice { is_full });
        }
        texts.extend(
            [(64, 3), (128, 4), (256, 2)].map(|(width, group)| Text::Attention { width, group }),
        );
        texts
    }

    /// Those for generations with a copy engine and clusters.
    fn newer_texts() -> Vec<Text> {
        let mut texts: Vec<Text> = [64, 128].map(|width| Text::Prefill { width }).into();
        texts.extend(
            [(64, 3), (128, 1), (128, 4)].map(|(width, group)| Text::Decode {
                width,
                group,
                stages: 1 + u32::from(width == 128),
            }),
        );
        texts.extend(
            [(4, 64), (8, 32), (16, 64)]
                .map(|(bits, group_size)| Text::Router { bits, group_size }),
        );
        texts.extend([64, 128].map(|group_size| Text::Clustered { group_size }));
        for (bits, group_size) in [(4, 64), (4, 128), (8, 64), (16, 64)] {
            texts.push(Text::Streamed {
                bits,
                group_size,
                stages: 2,
            });
            texts.extend([false, true].map(|is_grouped| Text::Tiled {
                bits,
                group_size,
                is_grouped,
            }));
        }
        texts.push(Text::Tiled {
            bits: 4,
            group_size: 32,
            is_grouped: false,
        });
        texts
    }

    /// Needs NVIDIA's compiler (the package nvidia-cuda-nvrtc, its folder on the library path), no device.
    #[test]
    fn every_text_compiles_where_the_compiler_is() {
        if !compiler::is_there() {
            return;
        }
        let newer = newer_texts()
            .into_iter()
            .map(|text| (text, &ARCHITECTURES[1..]));
        let all = texts().into_iter().map(|text| (text, &ARCHITECTURES[..]));
        for (text, architectures) in all.chain(newer) {
            for &architecture in architectures {
                for is_f16 in [false, true] {
                    let target = text.target(architecture);
                    let image = compiler::compile(&text.source(), &target, &text.defines(is_f16));
                    assert!(!image.unwrap().is_empty(), "{text:?}");
                }
            }
        }
    }
}
