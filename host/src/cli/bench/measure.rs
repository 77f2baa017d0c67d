//! One case of a benchmark: requests of random tokens through the engine.

use std::cell::Cell;
use std::time::Instant;

use crate::engine::{CancelToken, EngineError, EngineHandle, Event, GenerateRequest};
use crate::sampling::SamplingParams;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    /// A prompt, up to its last token's logits.
    Prefill {
        /// Tokens of the prompt.
        tokens: usize,
    },
    /// Answers, from the first token to the last.
    Decode {
        /// Tokens of each answer.
        tokens: usize,
        /// Answers at a time.
        batch: usize,
        /// Tokens in the context before.
        depth: usize,
    },
}

impl Case {
    /// Tokens of context that one of its requests takes: an answer's first token is not counted and is there besides.
    pub fn context_tokens(self) -> usize {
        match self {
            Self::Prefill { tokens } => tokens,
            Self::Decode { tokens, depth, .. } => {
                depth.max(1).saturating_add(tokens).saturating_add(1)
            }
        }
    }

    /// Name, as llama-bench has it.
    pub fn name(self) -> String {
        match self {
            Self::Prefill { tokens } => format!("pp{tokens}"),
            Self::Decode {
                tokens,
                batch: 1,
                depth: 0,
            } => format!("tg{tokens}"),
            Self::Decode {
                tokens,
                batch: 1,
                depth,
            } => format!("tg{tokens}@d{depth}"),
            Self::Decode {
                tokens,
                batch,
                depth: 0,
            } => format!("tg{tokens} x{batch}"),
            Self::Decode {
                tokens,
                batch,
                depth,
            } => format!("tg{tokens} x{batch}@d{depth}"),
        }
    }
}

/// Runs cases on an engine.
pub struct Bench<'a> {
    engine: &'a EngineHandle,
    vocab_size: usize,
    repetitions: u32,
    runs: Cell<u64>,
}

impl<'a> Bench<'a> {
    /// A benchmark with so many counted runs of each case.
    pub fn new(engine: &'a EngineHandle, vocab_size: usize, repetitions: u32) -> Self {
        Self {
            engine,
            vocab_size,
            repetitions,
            runs: Cell::new(0),
        }
    }

    /// Tokens per second of every counted run.
    pub fn measure(&self, case: Case) -> Result<Vec<f64>, EngineError> {
        self.once(case)?;
        (0..self.repetitions).map(|_| self.once(case)).collect()
    }

    fn once(&self, case: Case) -> Result<f64, EngineError> {
        match case {
            Case::Prefill { tokens } => {
                let stats = self.generate(tokens, 1)?.1;
                Ok(tokens as f64 / stats.as_secs_f64())
            }
            Case::Decode {
                tokens,
                batch,
                depth,
            } => self.decode(tokens, batch, depth.max(1)),
        }
    }

    /// A request that nothing in the cache helps.
    fn request(&self, prompt_tokens: usize, new_tokens: usize) -> GenerateRequest {
        self.runs.set(self.runs.get() + 1);
        // A step of Knuth's multiplicative generator per token; the low bits are not used.
        let mut state = self.runs.get().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut token = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % self.vocab_size.max(1) as u64) as u32
        };
        GenerateRequest {
            prompt: (0..prompt_tokens).map(|_| token()).collect(),
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::cli()
            },
            max_new_tokens: Some(new_tokens),
            namespace: format!("bench {}", self.runs.get()),
            ..GenerateRequest::default()
        }
    }

    /// Runs one request; gives its tokens and the time of its prompt.
    fn generate(
        &self,
        prompt_tokens: usize,
        new_tokens: usize,
    ) -> Result<(usize, std::time::Duration), EngineError> {
        let request = self.request(prompt_tokens, new_tokens);
        for event in self.engine.generate(request, CancelToken::default())? {
            match event {
                Event::Done { stats, .. } => return Ok((stats.generated_tokens, stats.prefill)),
                Event::Failed(error) => return Err(error),
                Event::Token { .. } | Event::Prefill { .. } => {}
            }
        }
        Err(EngineError::Stopped {
            reason: "the measurement ended without a word".to_owned(),
        })
    }

    /// Answers that run together: from the moment when all have their first token to the end of the
    /// last, so that no prompt is in it. The first tokens are not counted.
    fn decode(&self, tokens: usize, batch: usize, depth: usize) -> Result<f64, EngineError> {
        let streams: Vec<_> = (0..batch)
            .map(|_| {
                self.engine
                    .generate(self.request(depth, tokens + 1), CancelToken::default())
            })
            .collect::<Result<_, _>>()?;
        // Readers of their own, so that each event is seen when it comes.
        let seen = std::thread::scope(|scope| {
            let readers: Vec<_> = streams
                .into_iter()
                .map(|stream| {
                    scope.spawn(move || {
                        let mut times = Vec::new();
                        for event in stream {
                            match event {
                                Event::Token { .. } => times.push(Instant::now()),
                                Event::Failed(error) => return Err(error),
                                Event::Done { .. } | Event::Prefill { .. } => {}
                            }
                        }
                        Ok(times)
                    })
                })
                .collect();
            let gone = |_| EngineError::Internal {
                message: "a reader of the measurement panicked".to_owned(),
            };
            readers
                .into_iter()
                .map(|reader| reader.join().map_err(gone)?)
                .collect::<Result<Vec<_>, _>>()
        })?;
        if let Some(short) = seen.iter().map(Vec::len).find(|seen| *seen <= tokens) {
            return Err(EngineError::Internal {
                message: format!(
                    "an answer of the measurement ended after {short} tokens, {} were asked for",
                    tokens + 1
                ),
            });
        }
        let began = seen.iter().filter_map(|times| times.first()).max().copied();
        let ended = seen.iter().filter_map(|times| times.last()).max().copied();
        let (Some(began), Some(ended)) = (began, ended) else {
            return Err(EngineError::Internal {
                message: "the measurement saw no token".to_owned(),
            });
        };
        let counted: usize = seen
            .iter()
            .map(|times| times.iter().filter(|time| **time > began).count())
            .sum();
        Ok(counted as f64 / (ended - began).as_secs_f64())
    }
}
