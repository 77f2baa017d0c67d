//! What is measured, and the table of medians, spreads and ratios.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

/// What is measured of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServerFigure {
    /// Tokens of all clients.
    Throughput,
    /// Time to the first token, a percentile over all requests.
    FirstToken { percent: u8 },
    /// Time from token to token, a percentile.
    NextToken { percent: u8 },
}

impl ServerFigure {
    fn name(self) -> String {
        match self {
            Self::Throughput => "tokens/s together".to_owned(),
            Self::FirstToken { percent } => format!("first token p{percent}, ms"),
            Self::NextToken { percent } => format!("token to token p{percent}, ms"),
        }
    }
}

/// One row of the table. The order here is the order there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measure {
    /// From opening the file to readiness.
    Load,
    /// From the start of the process to the first token of a prompt of so many tokens.
    FirstToken { prompt: u32 },
    /// A prompt of so many tokens.
    Prefill { tokens: u32 },
    /// An answer behind a context.
    Decode { tokens: u32, depth: u32 },
    /// Answers at a time, together.
    Batch { tokens: u32, streams: u32 },
    /// Largest resident size.
    Memory,
    /// A server with so many clients.
    Server { clients: u32, what: ServerFigure },
    /// First token of a chat's first or second turn.
    Turn { number: u8, history: u32 },
    /// How much sooner the second is.
    TurnGain { history: u32 },
    /// Largest resident size of a server.
    ServerMemory,
}

impl Measure {
    pub fn name(self) -> String {
        match self {
            Self::Load => "load, s".to_owned(),
            Self::FirstToken { prompt } => {
                format!("first token of {prompt} from process start, s")
            }
            Self::Prefill { tokens } => format!("pp{tokens}, tokens/s"),
            Self::Decode { tokens, depth: 0 } => format!("tg{tokens}, tokens/s"),
            Self::Decode { tokens, depth } => format!("tg{tokens}@d{depth}, tokens/s"),
            Self::Batch { tokens, streams } => format!("tg{tokens} x{streams}, tokens/s together"),
            Self::Memory | Self::ServerMemory => "largest resident size, MiB".to_owned(),
            Self::Server { clients: 1, what } => format!("1 client: {}", what.name()),
            Self::Server { clients, what } => format!("{clients} clients: {}", what.name()),
            Self::Turn { number, history } => {
                format!("chat, turn {number}, history of {history} tokens: first token, ms")
            }
            Self::TurnGain { history } => {
                format!("chat, history of {history} tokens: turn one / turn two")
            }
        }
    }

    fn more_is_better(self) -> bool {
        matches!(
            self,
            Self::Prefill { .. }
                | Self::Decode { .. }
                | Self::Batch { .. }
                | Self::Server {
                    what: ServerFigure::Throughput,
                    ..
                }
                | Self::TurnGain { .. }
        )
    }
}

/// Median, least and largest of some runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub largest: f64,
}

impl Spread {
    pub fn of(runs: &[f64]) -> Option<Self> {
        let mut sorted = runs.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (least, largest) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            *sorted.get(middle)?
        } else {
            (sorted.get(middle - 1)? + sorted.get(middle)?) / 2.0
        };
        Some(Self {
            median,
            least,
            largest,
        })
    }

    fn text(self) -> String {
        let digits = match self.median {
            m if m < 10.0 => 3,
            m if m < 100.0 => 1,
            _ => 0,
        };
        if self.least == self.largest {
            return format!("{:.digits$}", self.median);
        }
        format!(
            "{:.digits$} ({:.digits$} to {:.digits$})",
            self.median, self.least, self.largest
        )
    }
}

/// Runs of several programs over the same measures. The first program is ours.
#[derive(Debug, Clone, Default)]
pub struct Table {
    programs: Vec<String>,
    runs: BTreeMap<(usize, Measure), Vec<f64>>,
}

impl Table {
    pub fn new(programs: &[&str]) -> Self {
        Self {
            programs: programs.iter().map(|name| (*name).to_owned()).collect(),
            runs: BTreeMap::new(),
        }
    }

    pub fn add(&mut self, program: usize, measure: Measure, value: f64) {
        self.runs.entry((program, measure)).or_default().push(value);
    }

    pub fn add_all(&mut self, program: usize, figures: &[(Measure, f64)]) {
        for (measure, value) in figures {
            self.add(program, *measure, *value);
        }
    }

    fn measures(&self) -> BTreeSet<Measure> {
        self.runs.keys().map(|(_, measure)| *measure).collect()
    }

    fn spread(&self, program: usize, measure: Measure) -> Option<Spread> {
        Spread::of(self.runs.get(&(program, measure))?)
    }

    /// How many times better we are than a program; above 1 is better, whatever the measure.
    pub fn ratio(&self, program: usize, measure: Measure) -> Option<f64> {
        let (ours, other) = (self.spread(0, measure)?, self.spread(program, measure)?);
        let (better, worse) = if measure.more_is_better() {
            (ours.median, other.median)
        } else {
            (other.median, ours.median)
        };
        (worse > 0.0).then(|| better / worse)
    }

    /// For people.
    pub fn markdown(&self) -> String {
        let Some((first, others)) = self.programs.split_first() else {
            return String::new();
        };
        let mut head = format!("| | {first} |");
        let mut line = "|---|---:|".to_owned();
        for name in others {
            head.push_str(&format!(" {name} | better by |"));
            line.push_str("---:|---:|");
        }
        let mut text = format!("{head}\n{line}\n");
        for measure in self.measures() {
            let cell = |program| {
                self.spread(program, measure)
                    .map_or_else(|| "-".to_owned(), Spread::text)
            };
            text.push_str(&format!("| {} | {} |", measure.name(), cell(0)));
            for program in 1..self.programs.len() {
                let ratio = self
                    .ratio(program, measure)
                    .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
                text.push_str(&format!(" {} | {ratio} |", cell(program)));
            }
            text.push('\n');
        }
        text
    }

    /// For programs: every run.
    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .measures()
            .into_iter()
            .map(|measure| {
                let mut row = serde_json::Map::new();
                row.insert("measure".to_owned(), json!(measure.name()));
                for (program, name) in self.programs.iter().enumerate() {
                    let runs = self.runs.get(&(program, measure));
                    let mut cell = json!({
                        "median": self.spread(program, measure).map(|spread| spread.median),
                        "runs": runs,
                    });
                    if program > 0 {
                        cell["better_by"] = json!(self.ratio(program, measure));
                    }
                    row.insert(name.clone(), cell);
                }
                Value::Object(row)
            })
            .collect();
        Value::Array(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        let median = |runs: &[f64]| Spread::of(runs).map(|spread| spread.median);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn a_ratio_above_one_is_better_for_rates_and_for_times() {
        let mut table = Table::new(&["us", "them"]);
        let (rate, time) = (Measure::Prefill { tokens: 512 }, Measure::Load);
        table.add_all(0, &[(rate, 200.0), (time, 0.5)]);
        table.add_all(1, &[(rate, 100.0), (time, 1.0)]);
        assert_eq!(table.ratio(1, rate), Some(2.0));
        assert_eq!(table.ratio(1, time), Some(2.0));
        assert_eq!(table.ratio(1, Measure::Memory), None);
    }

    #[test]
    fn the_table_shows_spreads_and_gaps() {
        let mut table = Table::new(&["us", "them", "others"]);
        let rate = Measure::Decode {
            tokens: 128,
            depth: 0,
        };
        for value in [90.0, 80.0, 85.0] {
            table.add(0, rate, value);
        }
        table.add(1, rate, 42.5);
        assert_eq!(
            table.markdown(),
            "| | us | them | better by | others | better by |\n|---|---:|---:|---:|---:|---:|\n\
             | tg128, tokens/s | 85.0 (80.0 to 90.0) | 42.5 | 2.00 | - | - |\n"
        );
        assert_eq!(table.json()[0]["them"]["better_by"], 2.0);
    }
}
