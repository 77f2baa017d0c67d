//! Logits after every token of a text, for measures of quality.

use super::{PAGE_SIZE, Runner};
use crate::engine::encoder;
use crate::engine::error::EngineError;
use crate::engine::pack::{Span, Wants, pack};
use crate::engine::sequence::Sequence;

impl Runner {
    /// Runs `tokens` as a sequence of its own, `step_rows` in a step, and hands over the logits after each of
    /// them from `first` on. One row a step is what an answer does, many are what a prompt does.
    pub fn score_rows(
        &mut self,
        tokens: &[u32],
        first: usize,
        step_rows: usize,
        take: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        self.check_tokens(tokens)?;
        encoder::check(&self.desc, None)?;
        if tokens.len() > self.context_tokens {
            return Err(EngineError::PromptTooLong {
                prompt_tokens: tokens.len(),
                context_tokens: self.context_tokens,
            });
        }
        let mut sequence = Sequence::default();
        let outcome = tokens
            .chunks(step_rows.max(1))
            .try_for_each(|rows| self.score_step(&mut sequence, rows, first, take));
        self.forget(&mut sequence);
        outcome
    }

    fn score_step(
        &mut self,
        sequence: &mut Sequence,
        rows: &[u32],
        first: usize,
        take: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        self.reserve(sequence, rows.len())?;
        let start = sequence.len();
        let span = Span {
            sequence,
            start,
            tokens: rows,
            wants: Wants::Nothing,
            follows: None,
        };
        let mut packed = pack(&[span], PAGE_SIZE)?;
        let wanted = first.saturating_sub(start).min(rows.len())..rows.len();
        packed.logit_rows = wanted.clone().map(|row| row as i32).collect();
        let logits = self.run(&packed)?;
        sequence.append(rows);
        for (row, logits) in wanted.zip(logits.chunks_exact(self.desc.vocab_size)) {
            take(start + row, logits);
        }
        Ok(())
    }
}
