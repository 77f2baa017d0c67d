//! Options of the commands that measure us beside others.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// What was typed, for the head of a table: folders of files are this machine's and left out.
pub fn typed(words: impl Iterator<Item = String>) -> String {
    let shown = words.map(|word| {
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (format!("{flag}="), value),
            _ => (String::new(), word.as_str()),
        };
        let file = std::path::Path::new(value).file_name();
        let value = file.filter(|_| value.contains('/')).map_or_else(
            || value.to_owned(),
            |file| file.to_string_lossy().into_owned(),
        );
        match value.contains(' ') {
            true => format!("{flag}\"{value}\""),
            false => format!("{flag}{value}"),
        }
    });
    let words: Vec<String> = ["cargo".to_owned(), "xtask".to_owned()]
        .into_iter()
        .chain(shown)
        .collect();
    words.join(" ")
}

/// A model that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// SmolLM2-135M Q4_1, the model of the demo
    Smollm2,
    /// Random weights in the shape of Qwen2.5-0.5B, in the types that llama.cpp's quantize chooses for Q4_K_M
    Qwen,
}

/// What both commands need.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// Compute threads of everybody
    #[arg(short, long, default_value_t = 2)]
    pub threads: u32,
    /// Runs of everybody, one after another in turn; median and spread are of these
    #[arg(short, long, default_value_t = 3)]
    pub rounds: u32,
    /// Write the results as JSON here
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the table to docs/benchmarks too
    #[arg(long)]
    pub write: bool,
    /// Use target/release as it is
    #[arg(long)]
    pub no_build: bool,
    /// Options for our program's every run, after `--`
    #[arg(last = true, value_name = "OPTION")]
    pub ours: Vec<String>,
}

/// Options of `bench-peers`.
#[derive(Debug, Args)]
pub struct PeersArgs {
    /// Models to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Model::Smollm2, Model::Qwen])]
    pub models: Vec<Model>,
    /// Measure this GGUF file too, such as Gemma-3-270M in Q4_K_M; may be repeated
    #[arg(long, value_name = "FILE")]
    pub gguf: Vec<PathBuf>,
    /// Length of the measured prompt
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub prompt: u32,
    /// Length of the measured answer
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub answer: u32,
    /// Answers at a time, measured with short answers; 0 leaves them out
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [4, 8, 16])]
    pub batches: Vec<u32>,
    /// Contexts before a short answer, such as 2048,8192; 0 leaves them out
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [0])]
    pub depths: Vec<u32>,
    /// Length of answers in batches and behind contexts
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub short_answer: u32,
    /// Leave out mlx-lm, which is slow
    #[arg(long)]
    pub no_mlx_lm: bool,
    /// Prompt and answer for mlx-lm
    #[arg(long, value_name = "P,N", value_delimiter = ',', num_args = 1, default_values_t = [64, 12])]
    pub mlx_lm_tokens: Vec<u32>,
    /// Run ours once more with these options too, such as "--precision fast"; may be repeated
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub also: Vec<String>,
    #[command(flatten)]
    pub common: Common,
}

/// Options of `bench-server`.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// GGUF file to serve; the model of the demo if not given
    #[arg(long, value_name = "FILE")]
    pub gguf: Option<PathBuf>,
    /// Clients at a time
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1, 4, 16])]
    pub clients: Vec<u32>,
    /// Requests of each client in a run
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub requests_per_client: u32,
    /// Length of every prompt
    #[arg(long, value_name = "N", default_value_t = 190)]
    pub prompt: u32,
    /// Length of every answer
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub answer: u32,
    /// Length of the history of the chat whose second turn is measured; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub history: u32,
    #[command(flatten)]
    pub common: Common,
}

/// Options of `soak`.
#[derive(Debug, Args)]
pub struct SoakArgs {
    /// How long traffic goes on
    #[arg(long, value_name = "N", default_value_t = 120.0)]
    pub minutes: f64,
    /// Time between two looks at the server
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub every: f64,
    /// Clients at a time
    #[arg(long, default_value_t = 6)]
    pub clients: u32,
    /// Longest prompt, in tokens
    #[arg(long, value_name = "N", default_value_t = 1500)]
    pub long_prompt: u32,
    /// GGUF file to serve; the model of the demo if not given
    #[arg(long, value_name = "FILE")]
    pub gguf: Option<PathBuf>,
    /// Compute threads
    #[arg(short, long, default_value_t = 2)]
    pub threads: u32,
    /// Where soak.csv and soak.md go; target/soak if not given
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Use target/release as it is
    #[arg(long)]
    pub no_build: bool,
    /// Options for the server, after `--`
    #[arg(last = true, value_name = "OPTION")]
    pub ours: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::typed;

    #[test]
    fn a_head_says_what_was_typed_without_folders() {
        let words = [
            "bench-peers",
            "--gguf",
            "/a/b.gguf",
            "--json=/c/d.json",
            "--also",
            "--precision fast",
        ];
        assert_eq!(
            typed(words.into_iter().map(str::to_owned)),
            "cargo xtask bench-peers --gguf b.gguf --json=d.json --also \"--precision fast\""
        );
    }
}
