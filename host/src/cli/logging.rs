//! Log lines on stderr: off unless `--verbose` or `MLXCEL_LOG` asks for them.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::error::CliError;

/// Variable with a filter such as `debug` or `mlxcel_registry=trace`.
const VARIABLE: &str = "MLXCEL_LOG";

/// Starts logging. `MLXCEL_LOG` wins over `--verbose`; without either only errors are written.
pub fn start(is_verbose: bool) -> Result<(), CliError> {
    let default = if is_verbose {
        LevelFilter::DEBUG
    } else {
        LevelFilter::ERROR
    };
    let builder = EnvFilter::builder().with_default_directive(default.into());
    let filter = match std::env::var(VARIABLE) {
        Ok(text) if !text.is_empty() => builder
            .parse(&text)
            .map_err(|error| CliError::usage(format!("{VARIABLE} is {text:?}: {error}")))?,
        _ => builder.parse_lossy(""),
    };
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    // Fails only when a log exists already, which is as good.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && !no_color)
        .try_init();
    Ok(())
}
