//! In which type keys and values are kept.

use clap::Args;

use crate::plugin::DType;

use super::super::error::CliError;

/// Types that are asked for.
#[derive(Debug, Args)]
pub struct KvTypeArgs {
    /// Type of cached keys: that of the activations, see --dtype; others are refused
    #[arg(long, value_name = "TYPE", value_parser = known, help_heading = "Limits")]
    cache_type_k: Option<KvType>,
    /// Type of cached values: as for keys
    #[arg(long, value_name = "TYPE", value_parser = known, help_heading = "Limits")]
    cache_type_v: Option<KvType>,
}

/// A type by one of its names.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KvType {
    name: String,
    /// None for quantised ones.
    dtype: Option<DType>,
}

/// Types that other servers know, so that a typing mistake is not taken for one of them.
const QUANTISED: [&str; 9] = [
    "q8", "q8_0", "q4", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8",
];

fn known(name: &str) -> Result<KvType, String> {
    let dtype = match name {
        "f32" => Some(DType::F32),
        "f16" | "fp16" => Some(DType::F16),
        "bf16" => Some(DType::BF16),
        name if QUANTISED.contains(&name) => None,
        _ => return Err("expected f32, f16, bf16, q8_0 or q4_0".to_owned()),
    };
    Ok(KvType {
        name: name.to_owned(),
        dtype,
    })
}

impl KvTypeArgs {
    /// Refuses every type but the one that there is.
    pub fn check(&self, there_is: DType) -> Result<(), CliError> {
        for (flag, asked) in [
            ("--cache-type-k", &self.cache_type_k),
            ("--cache-type-v", &self.cache_type_v),
        ] {
            if let Some(asked) = asked.as_ref().filter(|asked| asked.dtype != Some(there_is)) {
                let (asked, there_is) = (&asked.name, there_is.name());
                return Err(CliError::usage(format!(
                    "{flag} is {asked}, keys and values are kept in {there_is} here, the type of the activations: leave it out, or set --dtype"
                )));
            }
        }
        Ok(())
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

    fn check(args: &[&str]) -> Result<(), String> {
        let flags = Flags::try_parse_from([&["x"], args].concat()).map_err(|e| e.to_string())?;
        flags.types.check(DType::F16).map_err(|e| e.to_string())
    }

    #[test]
    fn only_the_type_that_there_is() {
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(
            check(&["--cache-type-k", "f16", "--cache-type-v", "fp16"]),
            Ok(())
        );
        for (args, part) in [
            (["--cache-type-k", "q8_0"], "--cache-type-k is q8_0"),
            (["--cache-type-v", "f32"], "--cache-type-v is f32"),
            (["--cache-type-k", "f17"], "expected f32"),
        ] {
            let text = check(&args).unwrap_err();
            assert!(text.contains(part), "{text}");
        }
    }
}
