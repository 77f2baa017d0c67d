//! The run as Markdown: what was sent, what came back, and memory over time as a curve of characters.

use super::{Options, Sample, Tally, Verdict};

/// A name, and what it stands for.
type Row = (&'static str, fn(&Sample) -> u64);

const COLUMNS: usize = 72;
const ROWS: usize = 12;

/// A curve of values over time: the largest of each column, from the smallest to the largest value.
fn curve(values: &[f64]) -> Vec<String> {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let width = COLUMNS.min(values.len());
    let columns: Vec<f64> = (0..width)
        .map(|column| {
            let from = column * values.len() / width;
            let to = ((column + 1) * values.len() / width).max(from + 1);
            let part = values.get(from..to).unwrap_or_default();
            part.iter().copied().fold(low, f64::max)
        })
        .collect();
    let span = (high - low).max(1e-9);
    (0..ROWS)
        .rev()
        .map(|row| {
            let level = low + span * row as f64 / (ROWS - 1) as f64;
            let line: String = columns
                .iter()
                .map(|value| {
                    let height = ((value - low) / span * (ROWS - 1) as f64).round() as usize;
                    if height == row {
                        '*'
                    } else if height > row {
                        '.'
                    } else {
                        ' '
                    }
                })
                .collect();
            format!("{level:10.1} |{}", line.trim_end())
        })
        .collect()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The whole page.
pub fn markdown(samples: &[Sample], verdict: &Verdict, tally: &Tally, options: &Options) -> String {
    let minutes = options.time.as_secs_f64() / 60.0;
    let mut text = format!(
        "{minutes:.1} minutes, {} clients, {} requests, {} of them refused because the queue was full.\n\n| kind | requests |\n|---|---:|\n",
        options.clients,
        tally.total(),
        tally.refused
    );
    for (kind, count) in &tally.sent {
        text.push_str(&format!("| {kind:?} | {count} |\n"));
    }
    text.push_str("\n| | before | during, largest | after |\n|---|---:|---:|---:|\n");
    let (first, last) = (samples.first().copied(), samples.last().copied());
    let rows: [Row; 9] = [
        ("resident memory, MiB", |s| s.rss_bytes >> 20),
        ("open files and sockets", |s| s.handles),
        ("threads", |s| s.threads),
        ("connections", |s| s.connections),
        ("requests in steps", |s| s.running),
        ("requests waiting", |s| s.waiting),
        ("pages in use", |s| s.pages),
        ("tensors", |s| s.tensors),
        ("pool, MiB", |s| s.pool_bytes >> 20),
    ];
    for (name, of) in rows {
        let largest = samples.iter().map(of).max().unwrap_or_default();
        let (before, after) = (first.as_ref().map_or(0, of), last.as_ref().map_or(0, of));
        text.push_str(&format!("| {name} | {before} | {largest} | {after} |\n"));
    }
    text.push_str(&format!(
        "\nMedian resident memory of the second quarter {:.1} MiB, of the last {:.1} MiB.\n\nResident memory in MiB over the run:\n\n```text\n",
        mib(verdict.early_rss_bytes),
        mib(verdict.late_rss_bytes)
    ));
    let values: Vec<f64> = samples.iter().map(|sample| mib(sample.rss_bytes)).collect();
    for line in curve(&values) {
        text.push_str(&line);
        text.push('\n');
    }
    let width = COLUMNS.min(values.len());
    text.push_str(&format!(
        "           +{}\n            0{:>pad$.1} min\n```\n\n",
        "-".repeat(width),
        samples.last().map_or(0.0, |s| s.at_s / 60.0),
        pad = width.saturating_sub(1)
    ));
    if verdict.problems.is_empty() {
        text.push_str("Everything came back, memory did not grow.\n");
    }
    for problem in &verdict.problems {
        text.push_str(&format!("- PROBLEM: {problem}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_rises_with_its_values() {
        let lines = curve(&[0.0, 1.0, 2.0, 11.0]);
        assert_eq!(lines.len(), ROWS);
        assert_eq!(lines.first().map(String::as_str), Some("      11.0 |   *"));
        assert_eq!(lines.last().map(String::as_str), Some("       0.0 |*..."));
    }

    #[test]
    fn a_curve_of_one_value_and_of_none() {
        assert_eq!(
            curve(&[3.0]).last().map(String::as_str),
            Some("       3.0 |*")
        );
        assert_eq!(curve(&[]).len(), ROWS);
    }
}
