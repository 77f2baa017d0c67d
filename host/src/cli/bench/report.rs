//! Results of a benchmark as table, JSON or CSV.

use std::fmt::Display;
use std::path::Path;

use serde_json::{Value, json};

use crate::engine::{EngineFacts, Precision};

use super::super::generation::ModelArgs;
use super::super::table::bytes_text;
use super::measure::Case;

/// All cases of one run.
pub struct Report {
    model: String,
    backend: String,
    device: String,
    dtype: &'static str,
    kv_dtype: &'static str,
    threads: Setting<usize>,
    precision: Setting<&'static str>,
    step_rows: usize,
    is_deterministic: bool,
    context_tokens: usize,
    ranks: usize,
    repetitions: u32,
    load_seconds: f64,
    weights_bytes: u64,
    rows: Vec<Row>,
}

/// What the model was loaded with.
struct Setting<T> {
    /// What was asked for, else what the backend says that it takes by itself, if it does.
    in_force: Option<T>,
    is_asked: bool,
}

impl<T: Display + Copy> Setting<T> {
    fn asked(&self) -> Option<T> {
        self.in_force.filter(|_| self.is_asked)
    }

    /// For people: the value, and `word` where nobody asked.
    fn text(&self, word: &str) -> String {
        match self.in_force {
            Some(value) if self.is_asked => value.to_string(),
            Some(value) => format!("{value} ({word})"),
            None => word.to_owned(),
        }
    }
}

struct Row {
    case: Case,
    mean: f64,
    /// None of a single run.
    deviation: Option<f64>,
    runs: Vec<f64>,
}

/// As RFC 4180 has it.
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

/// Mean and sample standard deviation, which one run does not have.
fn spread(runs: &[f64]) -> (f64, Option<f64>) {
    let n = runs.len().max(1) as f64;
    let mean = runs.iter().sum::<f64>() / n;
    let squares: f64 = runs.iter().map(|x| (x - mean).powi(2)).sum();
    (mean, (runs.len() > 1).then(|| (squares / (n - 1.0)).sqrt()))
}

impl Report {
    /// A report without results.
    pub fn new(model: &Path, facts: &EngineFacts, repetitions: u32, args: &ModelArgs) -> Self {
        Self {
            model: model
                .file_name()
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            backend: format!("{} {}", facts.backend.0, facts.backend.1),
            device: facts.device.clone(),
            dtype: facts.dtype.name(),
            kv_dtype: facts.kv_type.name(),
            threads: Setting {
                in_force: facts.threads,
                is_asked: args.threads > 0,
            },
            precision: Setting {
                in_force: facts.precision.map(Precision::name),
                is_asked: args.load_options().precision.is_some(),
            },
            step_rows: facts.steps.rows,
            is_deterministic: args.deterministic,
            context_tokens: facts.context_tokens,
            ranks: facts.ranks,
            repetitions,
            load_seconds: facts.load.as_secs_f64(),
            weights_bytes: facts.weights_bytes,
            rows: Vec::new(),
        }
    }

    /// Adds the runs of a case, in tokens per second.
    pub fn add(&mut self, case: Case, runs: Vec<f64>) {
        let (mean, deviation) = spread(&runs);
        self.rows.push(Row {
            case,
            mean,
            deviation,
            runs,
        });
    }

    /// For people, and for Markdown.
    pub fn table(&self) -> String {
        let peak = peak_resident_bytes().map_or_else(String::new, |bytes| {
            format!(", at most {} resident", bytes_text(bytes))
        });
        let ranks = match self.ranks {
            1 => String::new(),
            n => format!(", {n} ranks"),
        };
        let deterministic = if self.is_deterministic {
            ", deterministic"
        } else {
            ""
        };
        let mut text = format!(
            "model {}, backend {}, {}, {}, keys and values {}, precision {}{deterministic}{ranks}, threads {}, loaded in {:.2} s{peak}\n\n| test | tokens/s | +- |\n|---|---:|---:|\n",
            self.model,
            self.backend,
            self.device,
            self.dtype,
            self.kv_dtype,
            self.precision.text("auto"),
            self.threads.text("default"),
            self.load_seconds
        );
        for row in &self.rows {
            text.push_str(&format!(
                "| {} | {:.2} | {} |\n",
                row.case.name(),
                row.mean,
                row.deviation
                    .map_or_else(|| "-".to_owned(), |deviation| format!("{deviation:.2}"))
            ));
        }
        text
    }

    /// One line a case.
    pub fn csv(&self) -> String {
        let mut text =
            "model,backend,precision,test,tokens_per_second,deviation,repetitions\n".to_owned();
        for row in &self.rows {
            text.push_str(&format!(
                "{},{},{},{},{:.4},{},{}\n",
                quoted(&self.model),
                quoted(&self.backend),
                self.precision.in_force.unwrap_or("auto"),
                row.case.name(),
                row.mean,
                row.deviation
                    .map_or_else(String::new, |deviation| format!("{deviation:.4}")),
                self.repetitions
            ));
        }
        text
    }

    /// Everything.
    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({"test": row.case.name(), "tokens_per_second": row.mean, "deviation": row.deviation, "runs": row.runs})
            })
            .collect();
        json!({
            "mlxcel_version": env!("CARGO_PKG_VERSION"),
            "model": self.model,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "threads": self.threads.in_force,
            "threads_asked": self.threads.asked().unwrap_or(0),
            "precision": self.precision.in_force,
            "precision_asked": self.precision.asked().unwrap_or("auto"),
            "step_rows": self.step_rows,
            "deterministic": self.is_deterministic,
            "context_tokens": self.context_tokens,
            "ranks": self.ranks,
            "repetitions": self.repetitions,
            "load_seconds": self.load_seconds,
            "weights_bytes": self.weights_bytes,
            "peak_resident_bytes": peak_resident_bytes(),
            "results": rows,
        })
    }
}

/// Largest resident size of this process, pages of mapped files included; none where the system does not tell.
fn peak_resident_bytes() -> Option<u64> {
    peak_of_status(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn peak_of_status(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_mean_and_sample_deviation() {
        assert_eq!(spread(&[2.0, 4.0, 6.0]), (4.0, Some(2.0)));
        assert_eq!(spread(&[5.0]), (5.0, None));
        assert_eq!(quoted("a,\"b\".gguf"), "\"a,\"\"b\"\".gguf\"");
    }

    #[test]
    fn a_setting_says_whose_choice_it_is() {
        let setting = |in_force, is_asked| Setting { in_force, is_asked };
        let told = [(Some(4), true), (Some(4), false), (None, false)].map(|(value, is_asked)| {
            let setting = setting(value, is_asked);
            (setting.text("default"), setting.asked())
        });
        let expected = [("4", Some(4)), ("4 (default)", None), ("default", None)];
        assert_eq!(told, expected.map(|(text, asked)| (text.to_owned(), asked)));
    }

    #[test]
    fn the_largest_resident_size_is_read() {
        assert_eq!(
            peak_of_status("Name:\tx\nVmHWM:\t  12 kB\n"),
            Some(12 * 1024)
        );
        assert_eq!(peak_of_status("Name:\tx\n"), None);
    }

    #[test]
    fn cases_are_named_as_in_llama_bench() {
        let names = [
            Case::Prefill { tokens: 512 },
            Case::Decode {
                tokens: 128,
                batch: 1,
                depth: 0,
            },
            Case::Decode {
                tokens: 64,
                batch: 8,
                depth: 1024,
            },
        ]
        .map(Case::name);
        assert_eq!(names, ["pp512", "tg128", "tg64 x8@d1024"]);
    }
}
