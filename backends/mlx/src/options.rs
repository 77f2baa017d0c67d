//! Options of `open`, a JSON object. Every key is honoured or refused by name.

use mlxcel_abi::{AbiError, Result};
use serde_json::Value;

use crate::backend::{Description, KernelPrecision, KernelSettings};

/// The options of one opened backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options {
    /// For live tensors; `u64::MAX` leaves MLX's own.
    pub(crate) memory_limit_bytes: u64,
    /// For freed buffers kept for reuse; `u64::MAX` leaves MLX's own.
    pub(crate) cache_limit_bytes: u64,
    /// Compute threads; 0 leaves the choice to the backend.
    pub(crate) threads: usize,
    /// `precision`.
    pub(crate) precision: KernelPrecision,
    /// Whether a row's result may depend on nothing but the row.
    pub(crate) deterministic: bool,
}

impl Options {
    /// Reads `text`; empty text has no options.
    pub(crate) fn parse(text: &str, description: &Description) -> Result<Self> {
        let mut options = Self {
            memory_limit_bytes: u64::MAX,
            cache_limit_bytes: u64::MAX,
            threads: 0,
            precision: KernelPrecision::Auto,
            deterministic: false,
        };
        if text.trim().is_empty() {
            return Ok(options);
        }
        let value: Value = serde_json::from_str(text)
            .map_err(|error| AbiError::invalid(format!("options are not JSON: {error}")))?;
        let Value::Object(entries) = value else {
            return Err(AbiError::invalid(format!(
                "options are a JSON object, found {value}"
            )));
        };
        for (key, value) in &entries {
            match key.as_str() {
                "threads" => options.threads = threads(whole(key, value)?, description)?,
                "memory_limit_bytes" => options.memory_limit_bytes = whole(key, value)?,
                "cache_limit_bytes" => options.cache_limit_bytes = whole(key, value)?,
                "precision" => options.precision = precision(value, description)?,
                "deterministic" => options.deterministic = deterministic(value, description)?,
                other => {
                    return Err(AbiError::invalid(format!(
                        "option {other} is not known to backend {}, it has threads, precision, deterministic, memory_limit_bytes and cache_limit_bytes",
                        description.name
                    )));
                }
            }
        }
        Ok(options)
    }

    /// What concerns a device's own kernels.
    pub(crate) fn kernel_settings(&self) -> KernelSettings {
        KernelSettings {
            threads: self.threads,
            precision: self.precision,
            deterministic: self.deterministic,
        }
    }
}

/// How far activations may be rounded.
fn precision(value: &Value, description: &Description) -> Result<KernelPrecision> {
    let precision = match value.as_str() {
        Some("exact") => return Ok(KernelPrecision::Exact),
        Some("high") => KernelPrecision::High,
        Some("fast") => KernelPrecision::Fast,
        _ => {
            return Err(AbiError::invalid(format!(
                "option precision is exact, high or fast, found {value}"
            )));
        }
    };
    if description.rounds_activations {
        return Ok(precision);
    }
    Err(AbiError::unimplemented(format!(
        "option precision: backend {} computes exactly only, found {value}; leave it out or give exact",
        description.name
    )))
}

/// Kernels whose sums follow the number of rows keep no such promise.
fn deterministic(value: &Value, description: &Description) -> Result<bool> {
    match value.as_bool() {
        Some(true) if !description.keeps_rows_apart => Err(AbiError::unimplemented(format!(
            "option deterministic: backend {} computes rows in other ways by how many there are; leave it out",
            description.name
        ))),
        Some(asked) => Ok(asked),
        None => Err(AbiError::invalid(format!(
            "option deterministic is true or false, found {value}"
        ))),
    }
}

/// More threads than the backend uses would be ignored, hence they are refused.
fn threads(threads: u64, description: &Description) -> Result<usize> {
    let most = u64::from(description.most_threads);
    if threads <= most {
        return Ok(threads as usize);
    }
    Err(AbiError::unimplemented(format!(
        "option threads: backend {} computes on at most {most} threads, found {threads}; leave it out or give 0",
        description.name
    )))
}

fn whole(key: &str, value: &Value) -> Result<u64> {
    value.as_u64().ok_or_else(|| {
        AbiError::invalid(format!(
            "option {key} is a whole number from 0, found {value}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceKind, Probe};

    const CPU: Description = Description {
        name: "cpu",
        device: DeviceKind::Cpu,
        most_threads: 1,
        rounds_activations: false,
        keeps_rows_apart: false,
        probe: none,
        kernels: None,
    };

    fn none() -> Result<Probe> {
        Err(AbiError::internal("not probed here"))
    }

    fn error(text: &str) -> String {
        Options::parse(text, &CPU).unwrap_err().message
    }

    #[test]
    fn known_options_are_read() {
        let options = Options::parse(
            r#"{"threads":1,"memory_limit_bytes":5,"cache_limit_bytes":0}"#,
            &CPU,
        );
        assert_eq!(
            options,
            Ok(Options {
                memory_limit_bytes: 5,
                cache_limit_bytes: 0,
                threads: 1,
                precision: KernelPrecision::Auto,
                deterministic: false,
            })
        );
        assert_eq!(
            Options::parse(" ", &CPU).unwrap().memory_limit_bytes,
            u64::MAX
        );
    }

    #[test]
    fn precision_is_read_where_kernels_know_it() {
        let rounding = Description {
            rounds_activations: true,
            ..CPU
        };
        for (text, expected) in [
            ("exact", KernelPrecision::Exact),
            ("high", KernelPrecision::High),
            ("fast", KernelPrecision::Fast),
        ] {
            let options = Options::parse(&format!(r#"{{"precision":"{text}"}}"#), &rounding);
            assert_eq!(options.unwrap().kernel_settings().precision, expected);
        }
        let exact = Options::parse(r#"{"precision":"exact"}"#, &CPU).unwrap();
        assert_eq!(exact.precision, KernelPrecision::Exact);
    }

    #[test]
    fn rows_are_kept_apart_where_kernels_can() {
        let apart = Description {
            keeps_rows_apart: true,
            ..CPU
        };
        for asked in [false, true] {
            let text = format!(r#"{{"deterministic":{asked}}}"#);
            let options = Options::parse(&text, &apart).unwrap();
            assert_eq!(options.kernel_settings().deterministic, asked);
        }
        assert!(
            !Options::parse(r#"{"deterministic":false}"#, &CPU)
                .unwrap()
                .deterministic
        );
        assert!(error(r#"{"deterministic":true}"#).contains("by how many there are"));
        assert!(error(r#"{"deterministic":1}"#).contains("true or false"));
    }

    #[test]
    fn everything_else_is_refused_by_name() {
        assert!(error(r#"{"thread":1}"#).contains("option thread is not known to backend cpu"));
        assert!(error(r#"{"threads":-1}"#).contains("option threads"));
        assert!(error(r#"{"threads":4}"#).contains("found 4"));
        assert!(error(r#"{"memory_limit_bytes":"1g"}"#).contains("memory_limit_bytes"));
        assert!(error(r#"{"precision":"fast"}"#).contains("computes exactly only"));
        assert!(error(r#"{"precision":"high"}"#).contains("computes exactly only"));
        assert!(error(r#"{"precision":"int4"}"#).contains("exact, high or fast"));
        assert!(error("[]").contains("a JSON object"));
        assert!(error("{").contains("not JSON"));
    }
}
