//! Runs packed steps of a loaded model. Lives on the engine thread.

use crate::plugin::{DType, Model, StepInputs};

use super::desc::ModelDesc;
use super::error::EngineError;
use super::pack::{PackedStep, Span, pack};
use super::pages::PageAllocator;
use super::pool::{KvPool, StepKv};
use super::sequence::Sequence;

/// Positions in a page: the unit of sharing and of growth.
pub const PAGE_SIZE: usize = 32;

/// Most rows of a prefill step.
pub const PREFILL_CHUNK: usize = 512;

/// A loaded model with its caches.
pub struct Runner {
    // Order of fields is order of drop: tensors and model before the backend they keep open.
    pool: KvPool,
    model: Model,
    desc: ModelDesc,
    pages: PageAllocator,
    context_tokens: usize,
}

impl Runner {
    /// Prepares caches for sequences of up to `context_tokens`.
    pub fn new(model: Model, desc: ModelDesc, context_tokens: usize, kv_dtype: DType) -> Self {
        let pool = KvPool::new(model.backend(), &desc, PAGE_SIZE, kv_dtype);
        let pages = PageAllocator::new(context_tokens.div_ceil(PAGE_SIZE) + 1);
        Self { pool, model, desc, pages, context_tokens }
    }

    /// The model's description.
    pub fn desc(&self) -> &ModelDesc {
        &self.desc
    }

    /// Longest sequence, in tokens.
    pub fn context_tokens(&self) -> usize {
        self.context_tokens
    }

    /// Bytes of keys and values on the device.
    pub fn kv_bytes(&self) -> usize {
        self.pool.bytes()
    }

    /// Frees what `sequence` holds beyond `len` tokens.
    pub fn truncate(&mut self, sequence: &mut Sequence, len: usize) {
        sequence.truncate(len, PAGE_SIZE, &mut self.pages);
    }

    /// Runs `tokens` as the continuation of `sequence` and, when asked, gives the last row's
    /// logits. On an error the sequence is emptied: what a failed step wrote is not to be trusted.
    pub fn extend(&mut self, sequence: &mut Sequence, tokens: &[u32], wants_logits: bool) -> Result<Option<Vec<f32>>, EngineError> {
        let vocab_size = self.desc.vocab_size;
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(EngineError::TokenOutOfRange { token, vocab_size });
        }
        sequence.reserve(tokens.len(), PAGE_SIZE, &mut self.pages)?;
        let span = Span { sequence, start: sequence.len(), tokens, wants_logits };
        let packed = pack(&[span], PAGE_SIZE)?;
        match self.run(&packed) {
            Ok(logits) => {
                sequence.append(tokens);
                Ok(logits)
            }
            Err(error) => {
                self.truncate(sequence, 0);
                self.pool.reset();
                Err(error)
            }
        }
    }

    /// Runs one packed step; logits `[R, vocabulary]` row-major, or none when no row wants them.
    fn run(&mut self, step: &PackedStep) -> Result<Option<Vec<f32>>, EngineError> {
        self.pool.grow_to(self.pages.capacity(), self.pages.capacity() + self.pages.available())?;
        let backend = self.model.backend().clone();
        let (rows, sequences) = (step.n_rows() as i64, step.n_sequences() as i64);
        let ints = |data: &[i32], shape: &[i64]| backend.from_host_copy(data, shape);
        let tokens = backend.from_host_copy(&step.tokens, &[rows])?;
        let positions = ints(&step.positions, &[rows])?;
        let slots = ints(&step.slots, &[rows])?;
        let row_sequences = ints(&step.row_sequences, &[rows])?;
        let page_table = ints(&step.page_table, &[sequences, step.pages_per_sequence as i64])?;
        let logit_rows = ints(&step.logit_rows, &[step.logit_rows.len() as i64])?;
        let kv = StepKv {
            pool: &self.pool,
            slots: &slots,
            row_sequences: &row_sequences,
            positions: &positions,
            page_table: &page_table,
            row_starts: &step.row_starts,
        };
        let inputs = StepInputs {
            tokens: tokens.handle(),
            positions: positions.handle(),
            logit_rows: logit_rows.handle(),
            n_rows: rows as u32,
            n_sequences: sequences as u32,
        };
        let logits = self.model.forward(&inputs, &kv)?;
        let mut wanted = self.pool.handles();
        if step.logit_rows.is_empty() {
            backend.eval(&wanted)?;
            return Ok(None);
        }
        let logits = backend.cast(&logits, DType::F32)?;
        wanted.push(logits.handle());
        backend.eval(&wanted)?;
        let values = backend.read_f32(&logits)?;
        let expected = step.logit_rows.len() * self.desc.vocab_size;
        if values.len() != expected {
            return Err(EngineError::Internal {
                message: format!("the family gave {} logits, {expected} were expected", values.len()),
            });
        }
        Ok(Some(values))
    }
}
