//! Flags that say in which type keys and values are kept.

use clap::Args;

use crate::engine::{KvType, KvTypes};
use crate::plugin::DType;

/// Types that are asked for.
#[derive(Debug, Clone, Args)]
pub struct KvTypeArgs {
    /// Type of cached keys: f32, f16, bf16, q8_0 or q4_0, and that of the values; unless given the backend's choice beside f32 activations, else the type of the activations
    #[arg(long, value_name = "TYPE", value_parser = known, help_heading = "Model")]
    cache_type_k: Option<KvType>,
    /// Type of cached values: as for keys
    #[arg(long, value_name = "TYPE", value_parser = known, help_heading = "Model")]
    cache_type_v: Option<KvType>,
}

/// The type of a name, as llama.cpp spells them.
pub fn known(name: &str) -> Result<KvType, String> {
    match name {
        "f32" => Ok(KvType::Float(DType::F32)),
        "f16" | "fp16" => Ok(KvType::Float(DType::F16)),
        "bf16" => Ok(KvType::Float(DType::BF16)),
        "q8_0" => Ok(KvType::Q8_0),
        "q4_0" => Ok(KvType::Q4_0),
        _ => Err("expected f32, f16, bf16, q8_0 or q4_0".to_owned()),
    }
}

impl KvTypeArgs {
    /// The engine's share.
    pub fn types(&self) -> KvTypes {
        KvTypes {
            keys: self.cache_type_k,
            values: self.cache_type_v,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        types: KvTypeArgs,
    }

    fn types(args: &[&str]) -> Result<KvTypes, String> {
        let flags = Flags::try_parse_from([&["x"], args].concat());
        let first = |error: clap::Error| error.to_string().lines().next().unwrap().to_owned();
        flags.map(|flags| flags.types.types()).map_err(first)
    }

    #[test]
    fn known_types_are_taken_and_others_refused_by_name() {
        assert_eq!(types(&[]), Ok(KvTypes::default()));
        assert_eq!(
            types(&["--cache-type-k", "f16", "--cache-type-v", "fp16"]),
            Ok(KvTypes::both(DType::F16))
        );
        assert_eq!(
            types(&["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]),
            Ok(KvTypes::both(KvType::Q8_0))
        );
        let refused = [
            ["--cache-type-k", "q5_1"],
            ["--cache-type-v", "q4"],
            ["--cache-type-k", "f17"],
        ]
        .map(|args| types(&args).unwrap_err());
        insta::assert_snapshot!(refused.join("\n"), @r"
        error: invalid value 'q5_1' for '--cache-type-k <TYPE>': expected f32, f16, bf16, q8_0 or q4_0
        error: invalid value 'q4' for '--cache-type-v <TYPE>': expected f32, f16, bf16, q8_0 or q4_0
        error: invalid value 'f17' for '--cache-type-k <TYPE>': expected f32, f16, bf16, q8_0 or q4_0
        ");
    }
}
