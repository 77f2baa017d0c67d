//! Packing of a step: rows of several sequences, one after another, padded to a bucket.
//!
//! Prefill chunks and decode rows are all just rows. Padding rows read and write page 0 and state slot 0
//! only. In a
//! step where every sequence has one row each padding row is a sequence of its own, so that the
//! step keeps that property; otherwise one padding sequence owns them all.

use serde::{Deserialize, Serialize};

use crate::sampling::RowDraw;

use super::bucket;
use super::error::EngineError;
use super::sequence::Sequence;

/// Consecutive tokens of one sequence to run in a step. Pages for them are reserved already.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// The sequence.
    pub sequence: &'a Sequence,
    /// Position of the first token; equals the sequence's length.
    pub start: usize,
    /// The tokens.
    pub tokens: &'a [u32],
    /// What becomes of the logits of the last row.
    pub wants: Wants,
    /// Which token of the step before this row has, if the host does not know it yet; `tokens` holds one
    /// place for it.
    pub follows: Option<u32>,
}

/// What becomes of the logits after a span.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Wants {
    /// Nothing: there is more to run first.
    Nothing,
    /// They come to the host.
    Logits,
    /// The device chooses a token.
    Token(RowDraw),
}

/// The host-side arrays of a step, in the layout of `StepArgs` and `PagedAttentionArgs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedStep {
    /// `[T]`.
    pub tokens: Vec<u32>,
    /// `[T]`.
    pub positions: Vec<i32>,
    /// `[T]`.
    pub slots: Vec<i32>,
    /// `[T]`.
    pub row_sequences: Vec<i32>,
    /// `[S, P]`, row-major.
    pub page_table: Vec<i32>,
    /// `S + 1` boundaries.
    pub row_starts: Vec<u32>,
    /// `[R]`.
    pub logit_rows: Vec<i32>,
    /// Rows whose tokens are those of the step before, and which of them: both in order of rows.
    pub follows: Vec<(u32, u32)>,
    /// P.
    pub pages_per_sequence: usize,
    /// `[S]`: slots of states to start from, -1 for zeros.
    pub state_sources: Vec<i32>,
    /// `[S]`: slots that take the states after the step.
    pub state_targets: Vec<i32>,
    /// Where sequences have the output of an encoder.
    pub cross: Option<PackedCross>,
}

/// Where the rows of a step find the encoder's output of their sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedCross {
    /// `[T]`: its last position; 0 for padding.
    pub positions: Vec<i32>,
    /// `[S, Pc]`, row-major.
    pub page_table: Vec<i32>,
    /// Pc.
    pub pages_per_sequence: usize,
}

impl PackedStep {
    /// T.
    pub fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    /// S.
    pub fn n_sequences(&self) -> usize {
        self.row_starts.len().saturating_sub(1)
    }
}

/// Slots of a sequence that has no states: zeros, to where nobody reads.
const NOBODY: (i32, i32) = (-1, 0);

/// Packs spans into a step.
pub fn pack(spans: &[Span<'_>], page_size: usize) -> Result<PackedStep, EngineError> {
    let real_rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
    if real_rows == 0 || spans.iter().any(|span| span.tokens.is_empty()) {
        return Err(EngineError::Internal {
            message: "a step needs at least one row of every sequence".to_owned(),
        });
    }
    let n_rows = bucket::rows(real_rows);
    let padding = n_rows - real_rows;
    let one_row_each = spans.iter().all(|span| span.tokens.len() == 1);
    let padding_sequences = if one_row_each {
        padding
    } else {
        usize::from(padding > 0)
    };
    let n_sequences = bucket::sequences(spans.len() + padding_sequences);
    let longest = spans
        .iter()
        .map(|span| (span.start + span.tokens.len()).div_ceil(page_size))
        .max();
    let width = bucket::pages(longest.unwrap_or(1));

    let mut step = PackedStep {
        tokens: Vec::with_capacity(n_rows),
        positions: Vec::with_capacity(n_rows),
        slots: Vec::with_capacity(n_rows),
        row_sequences: Vec::with_capacity(n_rows),
        page_table: Vec::with_capacity(n_sequences * width),
        row_starts: Vec::with_capacity(n_sequences + 1),
        logit_rows: Vec::with_capacity(spans.len()),
        follows: Vec::new(),
        pages_per_sequence: width,
        state_sources: Vec::with_capacity(n_sequences),
        state_targets: Vec::with_capacity(n_sequences),
        cross: None,
    };
    for (index, span) in spans.iter().enumerate() {
        step.row_starts.push(step.tokens.len() as u32);
        if let Some(token) = span.follows {
            step.follows.push((step.tokens.len() as u32, token));
        }
        for (offset, token) in span.tokens.iter().enumerate() {
            let position = span.start + offset;
            step.tokens.push(*token);
            step.positions.push(position as i32);
            step.slots
                .push(span.sequence.slot(position, page_size)? as i32);
            step.row_sequences.push(index as i32);
        }
        let pages = span.sequence.pages().iter().map(|page| page.0 as i32);
        step.page_table
            .extend(pages.chain(core::iter::repeat(0)).take(width));
        let (source, target) = span.sequence.state_slots().unwrap_or(NOBODY);
        step.state_sources.push(source);
        step.state_targets.push(target);
        if span.wants != Wants::Nothing {
            step.logit_rows.push(step.tokens.len() as i32 - 1);
        }
    }
    for index in spans.len()..n_sequences {
        step.row_starts.push(step.tokens.len() as u32);
        let left = n_rows - step.tokens.len();
        let rows = if one_row_each { left.min(1) } else { left };
        for _ in 0..rows {
            step.tokens.push(0);
            step.positions.push(0);
            step.slots.push(0);
            step.row_sequences.push(index as i32);
        }
    }
    step.page_table.resize(n_sequences * width, 0);
    step.state_sources.resize(n_sequences, NOBODY.0);
    step.state_targets.resize(n_sequences, NOBODY.1);
    step.row_starts.push(step.tokens.len() as u32);
    step.cross = pack_cross(spans, n_rows, n_sequences);
    Ok(step)
}

fn pack_cross(spans: &[Span<'_>], n_rows: usize, n_sequences: usize) -> Option<PackedCross> {
    let pages = spans.iter().map(|span| span.sequence.cross().pages().len());
    let longest = pages.max().filter(|pages| *pages > 0)?;
    let width = bucket::pages(longest);
    let mut cross = PackedCross {
        positions: Vec::with_capacity(n_rows),
        page_table: Vec::with_capacity(n_sequences * width),
        pages_per_sequence: width,
    };
    for span in spans {
        let rows = span.sequence.cross();
        let last = rows.positions().saturating_sub(1) as i32;
        cross
            .positions
            .extend(core::iter::repeat_n(last, span.tokens.len()));
        let pages = rows.pages().iter().map(|page| page.0 as i32);
        cross
            .page_table
            .extend(pages.chain(core::iter::repeat(0)).take(width));
    }
    cross.positions.resize(n_rows, 0);
    cross.page_table.resize(n_sequences * width, 0);
    Some(cross)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pages::PageAllocator;
    use proptest::prelude::*;

    const PAGE: usize = 4;

    fn sequence(len: usize, more: usize, pages: &mut PageAllocator) -> Sequence {
        let mut sequence = Sequence::default();
        sequence.reserve(len + more, PAGE, pages).unwrap();
        sequence.append(&vec![1; len]);
        sequence
    }

    #[test]
    fn a_single_decode_row_has_no_padding() {
        let mut pages = PageAllocator::new(10);
        let seq = sequence(5, 1, &mut pages);
        let span = Span {
            sequence: &seq,
            start: 5,
            tokens: &[9],
            wants: Wants::Logits,
            follows: None,
        };
        let step = pack(&[span], PAGE).unwrap();
        assert_eq!(
            (step.n_rows(), step.n_sequences(), step.pages_per_sequence),
            (1, 1, 2)
        );
        assert_eq!(
            (step.positions, step.logit_rows, step.row_starts),
            (vec![5], vec![0], vec![0, 1])
        );
    }

    proptest! {
        #[test]
        fn rows_stay_in_their_own_pages(spans in proptest::collection::vec((0usize..30, 1usize..40), 1..6)) {
            let mut pages = PageAllocator::new(10_000);
            let tokens: Vec<u32> = (0..40).collect();
            let seqs: Vec<Sequence> = spans.iter().map(|&(len, more)| sequence(len, more, &mut pages)).collect();
            let list: Vec<Span<'_>> = spans.iter().zip(&seqs).map(|(&(len, more), seq)| Span {
                sequence: seq, start: len, tokens: &tokens[..more], wants: Wants::Logits, follows: None,
            }).collect();
            let step = pack(&list, PAGE).unwrap();
            let (rows, n_seq, width) = (step.n_rows(), step.n_sequences(), step.pages_per_sequence);
            prop_assert_eq!(step.page_table.len(), n_seq * width);
            for len in [step.positions.len(), step.slots.len(), step.row_sequences.len()] {
                prop_assert_eq!(len, rows);
            }
            prop_assert_eq!(*step.row_starts.last().unwrap() as usize, rows);
            prop_assert!(step.row_starts.is_sorted());
            for row in 0..rows {
                let s = step.row_sequences[row] as usize;
                prop_assert!((step.row_starts[s] as usize..step.row_starts[s + 1] as usize).contains(&row));
                let position = step.positions[row] as usize;
                let page = step.page_table[s * width + position / PAGE];
                prop_assert_eq!(step.slots[row], page * PAGE as i32 + (position % PAGE) as i32);
                prop_assert_eq!(page == 0, s >= list.len());
            }
            prop_assert_eq!(step.logit_rows.len(), list.len());
        }

        #[test]
        fn decode_steps_keep_one_row_a_sequence(n in 1usize..20) {
            let mut pages = PageAllocator::new(1000);
            let seqs: Vec<Sequence> = (0..n).map(|i| sequence(i, 1, &mut pages)).collect();
            let list: Vec<Span<'_>> = seqs.iter().map(|s| Span { sequence: s, start: s.len(), tokens: &[3], wants: Wants::Logits, follows: None }).collect();
            let step = pack(&list, PAGE).unwrap();
            let rows = step.row_starts.windows(2).map(|w| w[1] - w[0]);
            prop_assert!(rows.into_iter().all(|r| r <= 1));
        }
    }

    #[test]
    fn an_empty_step_is_an_error() {
        assert!(pack(&[], PAGE).is_err());
    }
}
