//! llama.cpp's own tools, told to do what we do.

use serde::Deserialize;

use super::install::Llama;
use super::table::Measure;
use super::timed::Stopwatch;
use crate::error::Error;

/// llama.cpp with the settings of one command.
#[derive(Debug)]
pub struct Peer<'a> {
    pub llama: &'a Llama,
    pub clock: &'a Stopwatch,
    pub threads: u32,
}

#[derive(Debug, Deserialize)]
struct BenchRow {
    n_prompt: u32,
    n_gen: u32,
    n_depth: u32,
    avg_ts: f64,
}

#[derive(Debug, Deserialize)]
struct BatchRow {
    tg: u32,
    pl: u32,
    speed_tg: f64,
}

impl Peer<'_> {
    /// Prompts and answers behind contexts, by llama-bench; and the largest size of its process.
    pub fn bench(
        &self,
        model: &str,
        prompt: u32,
        answer: u32,
        depths: &[u32],
    ) -> Result<(Vec<(Measure, f64)>, u64), Error> {
        let depths: Vec<String> = depths.iter().map(u32::to_string).collect();
        let args = [
            "-m",
            model,
            "-p",
            &prompt.to_string(),
            "-n",
            &answer.to_string(),
            "-d",
            &depths.join(","),
            "-r",
            "1",
            "-t",
            &self.threads.to_string(),
            "-o",
            "json",
        ]
        .map(str::to_owned);
        let timed = self.clock.run(&self.llama.tool("llama-bench"), &args)?;
        let rows: Vec<BenchRow> = serde_json::from_str(&timed.stdout)
            .map_err(|error| Error::measurement("llama-bench", error))?;
        let figures = rows
            .into_iter()
            .map(|row| {
                let measure = if row.n_gen == 0 {
                    Measure::Prefill {
                        tokens: row.n_prompt,
                    }
                } else {
                    Measure::Decode {
                        tokens: row.n_gen,
                        depth: row.n_depth,
                    }
                };
                (measure, row.avg_ts)
            })
            .collect();
        Ok((figures, timed.max_rss_bytes))
    }

    /// Answers at a time in one batch of as many sequences, by llama-batched-bench.
    pub fn batches(
        &self,
        model: &str,
        answer: u32,
        streams: &[u32],
    ) -> Result<Vec<(Measure, f64)>, Error> {
        let most = streams.iter().copied().max().unwrap_or(1);
        let list: Vec<String> = streams.iter().map(u32::to_string).collect();
        // Sequences share the context evenly, in steps of 256 positions.
        let context = most * (answer + 1).next_multiple_of(256);
        let args = [
            "-m",
            model,
            "-c",
            &context.to_string(),
            "-npp",
            "1",
            "-ntg",
            &answer.to_string(),
            "-npl",
            &list.join(","),
            "-t",
            &self.threads.to_string(),
            "--output-format",
            "jsonl",
        ]
        .map(str::to_owned);
        let timed = self
            .clock
            .run(&self.llama.tool("llama-batched-bench"), &args)?;
        batch_rows(&timed.stdout)
    }

    /// Seconds from the start of the process to the first token of a prompt, and those of loading as its log has them.
    pub fn first_token(&self, model: &str, prompt: &str) -> Result<(f64, Option<f64>), Error> {
        let args = [
            "-m",
            model,
            "-p",
            prompt,
            "-n",
            "2",
            "-t",
            &self.threads.to_string(),
            "--no-warmup",
            "--no-display-prompt",
            "-no-cnv",
        ]
        .map(str::to_owned);
        let timed = self
            .clock
            .run(&self.llama.tool("llama-completion"), &args)?;
        let first = timed
            .first_byte_s
            .ok_or_else(|| Error::measurement("llama-completion", "it wrote no token"))?;
        let load = logged_at(&timed.stderr, "load the model")
            .zip(logged_at(&timed.stderr, "threadpool init"))
            .map(|(began, ended)| (ended - began).max(0.0));
        Ok((first, load))
    }

    /// The beginning of a text that has `count` tokens.
    pub fn text_of_tokens(&self, model: &str, text: &str, count: usize) -> Result<String, Error> {
        let boundaries: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let (mut low, mut high) = (0, boundaries.len());
        while low + 1 < high {
            let middle = (low + high) / 2;
            let part = boundaries.get(middle).and_then(|at| text.get(..*at));
            if self.count(model, part.unwrap_or(text))? <= count {
                low = middle;
            } else {
                high = middle;
            }
        }
        let part = boundaries
            .get(low)
            .and_then(|at| text.get(..*at))
            .unwrap_or(text);
        match self.count(model, part)? {
            found if found == count => Ok(part.to_owned()),
            found => Err(Error::measurement(
                "llama-tokenize",
                format!("no beginning of the text has {count} tokens, the nearest has {found}"),
            )),
        }
    }

    fn count(&self, model: &str, text: &str) -> Result<usize, Error> {
        let args = ["-m", model, "-p", text, "--ids", "--log-disable"].map(str::to_owned);
        let timed = self.clock.run(&self.llama.tool("llama-tokenize"), &args)?;
        let line = timed
            .stdout
            .lines()
            .rev()
            .find(|line| line.starts_with('['));
        line.and_then(|line| serde_json::from_str::<Vec<u32>>(line).ok())
            .map(|ids| ids.len())
            .ok_or_else(|| Error::measurement("llama-tokenize", "it wrote no list of ids"))
    }
}

fn batch_rows(text: &str) -> Result<Vec<(Measure, f64)>, Error> {
    let rows: Vec<(Measure, f64)> = text
        .lines()
        .filter_map(|line| serde_json::from_str::<BatchRow>(line.trim()).ok())
        .map(|row| {
            let measure = Measure::Batch {
                tokens: row.tg,
                streams: row.pl,
            };
            (measure, row.speed_tg)
        })
        .collect();
    if rows.is_empty() {
        return Err(Error::measurement(
            "llama-batched-bench",
            "it wrote no result",
        ));
    }
    Ok(rows)
}

/// Seconds in front of the first log line with `words`: `0.02.116.445 I cmn init: llama threadpool init`, which are minutes,
/// seconds, milliseconds and microseconds.
fn logged_at(text: &str, words: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains(words))?;
    let parts: Option<Vec<f64>> = line
        .split_whitespace()
        .next()?
        .split('.')
        .map(|part| part.parse().ok())
        .collect();
    match parts?.as_slice() {
        [minutes, seconds, ms, us] => Some(minutes * 60.0 + seconds + ms / 1e3 + us / 1e6),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_log_lines_are_read() {
        let text = "x\n0.00.011.836 I main: load the model\n1.02.116.445 I cmn init: llama threadpool init, n\n";
        let at = |words| logged_at(text, words).unwrap_or(f64::NAN);
        assert!((at("load the model") - 0.011_836).abs() < 1e-9);
        assert!((at("threadpool init") - 62.116_445).abs() < 1e-9);
        assert_eq!(logged_at("load the model", "load the model"), None);
        assert_eq!(logged_at(text, "nothing"), None);
    }

    #[test]
    fn results_of_batches_are_found_among_other_lines() {
        let text = "log\n{\"tg\": 32, \"pl\": 4, \"speed_tg\": 7.5, \"n_kv\": 1}\n\n";
        let expected = Measure::Batch {
            tokens: 32,
            streams: 4,
        };
        assert_eq!(batch_rows(text).expect("rows"), [(expected, 7.5)]);
        assert!(batch_rows("nothing").is_err());
    }
}
