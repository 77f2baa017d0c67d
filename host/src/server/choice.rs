//! One answer as text: detokeniser, stop strings, and which log probabilities belong to which text.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::engine::{CancelToken, FinishReason, GenerateStats};
use crate::sampling::Logprobs;
use crate::text::{Detokenizer, StopMatcher, Tokenizer};

/// A token with its log probability and its alternatives.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// Its bytes, which may be part of a character.
    pub bytes: Vec<u8>,
    /// Its log probability.
    pub logprob: f32,
    /// The likeliest tokens.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// Text that is certain, with the tokens that it ends with.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Ids whose text is now given out in full.
    pub tokens: Vec<u32>,
    /// Their log probabilities, where they were asked for.
    pub logprobs: Vec<TokenLogprob>,
}

/// How an answer ended, and its figures.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Of them, from the cache.
    pub cached_tokens: usize,
    /// Tokens generated, up to the one that ended it.
    pub generated_tokens: usize,
    /// From the request to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Whether its text has a line break.
    pub has_new_line: bool,
}

/// The end of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// Why.
    pub reason: FinishReason,
    /// The stop string that ended it.
    pub stop: Option<String>,
    /// Tokens that gave no text of their own.
    pub rest: Piece,
    /// Figures.
    pub figures: Figures,
}

impl Piece {
    fn followed_by(mut self, next: Self) -> Self {
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
        self.logprobs.extend(next.logprobs);
        self
    }
}

struct Held {
    id: u32,
    logprob: Option<TokenLogprob>,
    /// Where its text ends, in bytes from the start of the answer.
    end: usize,
}

/// An answer in work.
pub struct Choice {
    /// Ends it between two steps.
    pub cancel: CancelToken,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    tokenizer: Tokenizer,
    held: VecDeque<Held>,
    /// Bytes of text that came out of the detokeniser.
    decoded_bytes: usize,
    /// Bytes of text that were given out.
    given_bytes: usize,
    first: Option<Instant>,
    figures: Figures,
    arrived: Instant,
    predict_limit: Option<Duration>,
    is_over: bool,
}

impl Choice {
    /// An answer that has not begun.
    pub fn new(
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        prompt_tokens: usize,
        arrived: Instant,
    ) -> Self {
        Self {
            cancel: CancelToken::default(),
            detokenizer,
            stops,
            tokenizer,
            held: VecDeque::new(),
            decoded_bytes: 0,
            given_bytes: 0,
            first: None,
            figures: Figures {
                prompt_tokens,
                ..Figures::default()
            },
            arrived,
            predict_limit: None,
            is_over: false,
        }
    }

    /// With a limit of the time after the first token. As in llama-server it ends an answer that has a line break.
    #[must_use]
    pub fn with_predict_limit(mut self, limit: Option<Duration>) -> Self {
        self.predict_limit = limit;
        self
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Figures so far.
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Notes progress on the prompt. Tokens of it that are done, cached ones included.
    pub fn prefill(&mut self, done: usize, total: usize) -> usize {
        self.figures.cached_tokens = self.figures.prompt_tokens.saturating_sub(total);
        self.figures.cached_tokens + done
    }

    /// Takes a token. Gives text that became certain, and the end when a stop string was completed.
    pub fn token(
        &mut self,
        id: u32,
        logprobs: Option<Box<Logprobs>>,
        at: Instant,
    ) -> (Option<Piece>, Option<End>) {
        let first = *self.first.get_or_insert(at);
        self.figures.prefill = first - self.arrived;
        self.figures.decode = at - first;
        self.figures.generated_tokens += 1;
        let text = self.detokenizer.push(id);
        self.decoded_bytes += text.len();
        let logprob = logprobs.map(|logprobs| self.logprob(id, &logprobs));
        self.held.push_back(Held {
            id,
            logprob,
            end: self.decoded_bytes,
        });
        let output = self.stops.push(&text);
        let piece = self.give(output.text);
        let is_late = self.figures.has_new_line
            && self
                .predict_limit
                .is_some_and(|limit| self.figures.decode > limit);
        if is_late && output.stopped.is_none() {
            self.cancel.cancel();
            let stats = GenerateStats {
                cached_tokens: self.figures.cached_tokens,
                generated_tokens: self.figures.generated_tokens,
                ..GenerateStats::default()
            };
            // What the stop strings held back is text like the rest.
            let (held, end) = self.done(FinishReason::MaxTokens, stats);
            let piece = match (piece, held) {
                (Some(piece), Some(held)) => Some(piece.followed_by(held)),
                (piece, held) => piece.or(held),
            };
            return (piece, Some(end));
        }
        let end = output.stopped.map(|stop| {
            self.cancel.cancel();
            self.is_over = true;
            // Tokens that began in text that was given out belong to it; the others are the stop string's.
            let rest = self.take_held(|held, given| held.end <= given);
            End {
                reason: FinishReason::StopText,
                stop: Some(stop.text),
                rest,
                figures: self.figures.clone(),
            }
        });
        (piece, end)
    }

    /// The engine has ended it. Gives what was held back, and the end.
    pub fn done(&mut self, reason: FinishReason, stats: GenerateStats) -> (Option<Piece>, End) {
        self.is_over = true;
        self.figures.cached_tokens = stats.cached_tokens;
        self.figures.generated_tokens = stats.generated_tokens;
        let last = self.detokenizer.finish();
        self.decoded_bytes += last.len();
        let mut output = self.stops.push(&last);
        let stop = output.stopped.take();
        if stop.is_none() {
            output.text.push_str(&self.stops.finish().text);
        }
        let piece = self.give(output.text);
        let rest = self.take_held(|_, _| stop.is_none());
        let reason = if stop.is_some() {
            FinishReason::StopText
        } else {
            reason
        };
        (
            piece,
            End {
                reason,
                stop: stop.map(|stop| stop.text),
                rest,
                figures: self.figures.clone(),
            },
        )
    }

    fn give(&mut self, text: String) -> Option<Piece> {
        if text.is_empty() {
            return None;
        }
        self.figures.has_new_line |= text.contains('\n');
        self.given_bytes += text.len();
        let tokens = self.take_held(|held, given| held.end <= given);
        Some(Piece { text, ..tokens })
    }

    fn take_held(&mut self, is_out: impl Fn(&Held, usize) -> bool) -> Piece {
        let mut piece = Piece::default();
        while let Some(held) = self
            .held
            .pop_front_if(|held| is_out(held, self.given_bytes))
        {
            piece.tokens.push(held.id);
            piece.logprobs.extend(held.logprob);
        }
        piece
    }

    fn logprob(&self, id: u32, logprobs: &Logprobs) -> TokenLogprob {
        let bytes = |id: u32| self.tokenizer.token_bytes(id);
        TokenLogprob {
            id,
            bytes: bytes(id),
            logprob: logprobs.token,
            top: logprobs
                .top
                .iter()
                .map(|(id, logprob)| (*id, bytes(*id), *logprob))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{DetokenizerOptions, StopText, byte_level};

    fn choice(stops: &[&str]) -> Choice {
        let tokenizer = byte_level();
        let detokenizer = tokenizer.detokenizer(DetokenizerOptions::default());
        let stops = StopMatcher::new(
            stops.iter().map(|stop| (*stop).to_owned()),
            StopText::Exclude,
        )
        .unwrap();
        Choice::new(tokenizer, detokenizer, stops, 3, Instant::now())
    }

    fn ids(text: &str) -> Vec<u32> {
        text.bytes()
            .map(|byte| byte_level().id_of(&letter(byte)).unwrap())
            .collect()
    }

    /// How a byte-level vocabulary writes a byte; enough for these tests.
    fn letter(byte: u8) -> String {
        match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
            b' ' => "Ġ".to_owned(),
            b'\n' => "Ċ".to_owned(),
            _ => char::from_u32(0x100 + 0x21 + u32::from(byte) - 0x7f)
                .unwrap()
                .to_string(),
        }
    }

    fn feed(choice: &mut Choice, text: &str) -> (Vec<Piece>, Option<End>) {
        let mut pieces = Vec::new();
        for id in ids(text) {
            let logprobs = Box::new(Logprobs {
                token: -0.5,
                top: vec![(id, -0.5)],
            });
            let (piece, end) = choice.token(id, Some(logprobs), Instant::now());
            pieces.extend(piece);
            if end.is_some() {
                return (pieces, end);
            }
        }
        (pieces, None)
    }

    #[test]
    fn a_character_of_several_tokens_is_one_piece_with_all_of_them() {
        let mut choice = choice(&[]);
        let (pieces, _) = feed(&mut choice, "a€b");
        let texts: Vec<&str> = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!(texts, ["a", "€", "b"]);
        assert_eq!(pieces[1].tokens.len(), 3);
        assert_eq!(pieces[1].logprobs.len(), 3);
        assert_eq!(pieces[1].logprobs[0].bytes, [0xe2]);
    }

    #[test]
    fn a_stop_string_takes_its_tokens_with_it() {
        let mut choice = choice(&["END"]);
        let (pieces, end) = feed(&mut choice, "aENENDx");
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!(text, "aEN");
        let end = end.unwrap();
        assert_eq!(
            (end.reason, end.stop.as_deref()),
            (FinishReason::StopText, Some("END"))
        );
        assert_eq!(
            pieces.iter().map(|piece| piece.tokens.len()).sum::<usize>() + end.rest.tokens.len(),
            3
        );
        assert!(choice.cancel.is_cancelled() && choice.is_over());
        assert_eq!(end.figures.generated_tokens, 6);
    }

    #[test]
    fn the_beginning_of_a_stop_string_is_given_out_at_the_end() {
        let mut choice = choice(&["END"]);
        let (pieces, end) = feed(&mut choice, "aEN");
        assert_eq!((pieces.len(), end), (1, None));
        let (piece, end) = choice.done(
            FinishReason::Eos,
            GenerateStats {
                generated_tokens: 4,
                ..GenerateStats::default()
            },
        );
        assert_eq!(piece.unwrap().text, "EN");
        assert_eq!(
            (end.reason, end.figures.generated_tokens, end.rest),
            (FinishReason::Eos, 4, Piece::default())
        );
    }

    #[test]
    fn the_time_of_an_answer_ends_it_at_a_line_break_only() {
        let mut choice = choice(&["cE"]).with_predict_limit(Some(Duration::ZERO));
        let (pieces, end) = feed(&mut choice, "ab");
        assert_eq!((pieces.len(), end), (2, None));
        let (pieces, end) = feed(&mut choice, "\ncd");
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        let end = end.unwrap();
        assert_eq!((text.as_str(), end.reason), ("\n", FinishReason::MaxTokens));
        assert!(choice.cancel.is_cancelled() && choice.is_over());
    }
}
