//! One step on the device: its submission, and what is read of it.

use mlxcel_abi::kinds::binary;

use crate::engine::error::EngineError;
use crate::engine::pack::{PackedCross, PackedStep, Span, Wants, pack};
use crate::engine::pool::{CrossArrays, StepArrays, StepKv};
use crate::engine::ranks::{Capacity, Draw, StepOrder};
use crate::plugin::{DType, DeviceTensor, StepInputs, Tensor};
use crate::sampling::RowDraw;

use super::chosen::Chosen;
use super::{PAGE_SIZE, Runner};

/// A step that the device has, and what is to be read of it.
pub struct Submitted {
    /// `[R, V]`; none where nobody wanted any.
    logits: Option<DeviceTensor>,
    /// Rows of `logits` that the device chose tokens for.
    drawn: Vec<usize>,
    chosen: Option<Chosen>,
    /// Logits of the other rows, `[H, V]`.
    wanted: Option<DeviceTensor>,
    rows: usize,
}

/// What a span that wanted something got.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Logits of its last row.
    Logits(Vec<f32>),
    /// A token.
    Token(u32),
}

impl Submitted {
    /// Which of the chosen tokens is that of the `row`-th span that wanted something.
    pub fn token_of(&self, row: usize) -> Option<u32> {
        self.chosen.as_ref()?;
        let index = self.drawn.iter().position(|drawn| *drawn == row)?;
        u32::try_from(index).ok()
    }

    /// Whether the device chose all tokens, at least one, so that a step can follow before they are read.
    pub fn can_be_followed(&self) -> bool {
        self.chosen.is_some() && self.drawn.len() == self.rows
    }
}

impl Runner {
    /// Whether the device chooses tokens by this draw.
    pub fn takes_draw(&self, draw: &RowDraw) -> bool {
        self.chooser.takes(draw)
    }

    /// Lets go what is only kept for the next step.
    pub fn rest(&mut self) {
        self.chooser.rest();
    }

    /// Hands a step over several sequences, whose pages are reserved, to the device. `previous` is the
    /// step that spans follow. With `waits` it is computed when this returns.
    pub fn submit(
        &mut self,
        spans: &[Span<'_>],
        previous: Option<&Submitted>,
        waits: bool,
    ) -> Result<Submitted, EngineError> {
        let submitted = self.submit_here(spans, previous, waits);
        self.end_step(submitted)
    }

    /// A step has ended here; where it was one of several ranks, its failure is that of all.
    fn end_step<T>(&mut self, outcome: Result<T, EngineError>) -> Result<T, EngineError> {
        match &mut self.ranks {
            None => outcome,
            Some(ranks) => ranks.end_step(outcome),
        }
    }

    fn submit_here(
        &mut self,
        spans: &[Span<'_>],
        previous: Option<&Submitted>,
        waits: bool,
    ) -> Result<Submitted, EngineError> {
        let packed = pack(spans, PAGE_SIZE)?;
        let tokens = self.tokens(&packed, previous)?;
        let wants: Vec<Wants> = spans.iter().map(|span| span.wants).collect();
        // Only what may be followed before it is read has to be chosen by all.
        let draws = if waits {
            Vec::new()
        } else {
            Draw::of_all(&wants)
        };
        let logits = self.forward(&packed, &tokens, draws)?;
        self.choose(&packed, &wants, logits, waits)
    }

    /// Has the device choose the tokens after a step, and hands all of it to the device.
    pub(super) fn choose(
        &mut self,
        packed: &PackedStep,
        wants: &[Wants],
        logits: DeviceTensor,
        waits: bool,
    ) -> Result<Submitted, EngineError> {
        let mut submitted = Submitted {
            logits: None,
            drawn: Vec::new(),
            chosen: None,
            wanted: None,
            rows: packed.logit_rows.len(),
        };
        let mut handles = self.pool.handles();
        handles.extend(self.states.handles());
        if submitted.rows > 0 {
            self.check_logits(&logits, submitted.rows)?;
            self.draw(wants, &logits, &mut submitted)?;
            submitted.logits = Some(logits);
        }
        let chosen = submitted.chosen.as_ref();
        handles.extend(chosen.map(|chosen| chosen.tokens.handle()));
        handles.extend(chosen.and_then(|chosen| chosen.highest.as_ref().map(Tensor::from)));
        handles.extend(submitted.wanted.as_ref().map(Tensor::from));
        let backend = self.model.backend();
        if waits {
            backend.eval(&handles)?;
        } else {
            backend.async_eval(&handles)?;
        }
        Ok(submitted)
    }

    /// Waits for a step and gives what the spans that wanted something got, in order.
    pub fn finish(&mut self, step: Submitted) -> Result<Vec<Outcome>, EngineError> {
        let outcomes = self.read_outcomes(step);
        match &mut self.ranks {
            // The others go on with tokens of their own.
            Some(ranks) if self.choices.is_any_unread() => {
                let outcomes = ranks.end_wait(outcomes)?;
                self.choices.read(&outcomes);
                Ok(outcomes)
            }
            _ => outcomes,
        }
    }

    fn read_outcomes(&mut self, step: Submitted) -> Result<Vec<Outcome>, EngineError> {
        let mut outcomes: Vec<Option<Outcome>> = vec![None; step.rows];
        if let Some(chosen) = &step.chosen {
            let tokens = chosen.read(self.model.backend())?;
            for (row, token) in step.drawn.iter().zip(tokens) {
                let outcome = match token {
                    Some(token) => {
                        self.check_tokens(&[token])?;
                        Outcome::Token(token)
                    }
                    // The host's own sampler says what is wrong with the row.
                    None => Outcome::Logits(self.row(&step, *row)?),
                };
                if let Some(place) = outcomes.get_mut(*row) {
                    *place = Some(outcome);
                }
            }
        }
        if let Some(wanted) = &step.wanted {
            let logits = self.read_logits(wanted)?;
            let mut rows = logits.chunks_exact(self.desc.vocab_size);
            for place in outcomes.iter_mut().filter(|place| place.is_none()) {
                *place = rows.next().map(|row| Outcome::Logits(row.to_vec()));
            }
        }
        let all: Option<Vec<Outcome>> = outcomes.into_iter().collect();
        all.ok_or_else(|| EngineError::Internal {
            message: "a step that wanted logits gave none".to_owned(),
        })
    }

    /// Runs one packed step; logits `[R, vocabulary]` row-major.
    pub(super) fn run(&mut self, step: &PackedStep) -> Result<Vec<f32>, EngineError> {
        let logits = self.run_here(step);
        match self.end_step(logits)? {
            Some(logits) => self.read_logits(&logits),
            None => Ok(Vec::new()),
        }
    }

    fn run_here(&mut self, step: &PackedStep) -> Result<Option<DeviceTensor>, EngineError> {
        let tokens = self.tokens(step, None)?;
        let logits = self.forward(step, &tokens, Vec::new())?;
        self.computed(step, logits)
    }

    /// Waits for a step, and gives its logits where it has any.
    pub(super) fn computed(
        &self,
        step: &PackedStep,
        logits: DeviceTensor,
    ) -> Result<Option<DeviceTensor>, EngineError> {
        let mut handles = self.pool.handles();
        handles.extend(self.states.handles());
        let rows = step.logit_rows.len();
        if rows == 0 {
            self.model.backend().eval(&handles)?;
            return Ok(None);
        }
        self.check_logits(&logits, rows)?;
        handles.push(logits.handle());
        self.model.backend().eval(&handles)?;
        Ok(Some(logits))
    }

    /// The step's token ids: those that the host knows, and those that the step before will give.
    pub(super) fn tokens(
        &self,
        step: &PackedStep,
        previous: Option<&Submitted>,
    ) -> Result<DeviceTensor, EngineError> {
        let backend = self.model.backend();
        let rows = step.n_rows();
        let words = step.tokens.iter().flat_map(|token| token.to_ne_bytes());
        let bytes: Vec<u8> = words.collect();
        let known = || backend.from_host(&bytes, DType::U32, &[rows as i64]);
        if step.follows.is_empty() {
            return Ok(known()?);
        }
        let chosen = previous.and_then(|previous| previous.chosen.as_ref());
        let (Some(chosen), Some(previous)) = (chosen, previous) else {
            return Err(EngineError::Internal {
                message: "a step follows one that chose no tokens".to_owned(),
            });
        };
        // A row without a token must not lead to a place outside of a table.
        let last = self.desc.vocab_size.saturating_sub(1) as f64;
        let given = backend.binary_scalar(binary::MIN, &chosen.tokens, last)?;
        let n_given = previous.drawn.len();
        let is_same = n_given == rows
            && step.follows.len() == rows
            && step.follows.iter().all(|(row, token)| row == token);
        if is_same {
            return Ok(given);
        }
        let mut sources: Vec<i32> = (0..rows).map(|row| (n_given + row) as i32).collect();
        for (row, token) in &step.follows {
            if let Some(source) = sources.get_mut(*row as usize) {
                *source = *token as i32;
            }
        }
        let all = backend.concat(&[given.handle(), known()?.handle()], 0)?;
        let words = sources.iter().flat_map(|source| source.to_ne_bytes());
        let bytes: Vec<u8> = words.collect();
        let sources = backend.from_host(&bytes, DType::I32, &[rows as i64])?;
        Ok(backend.take(&all, &sources, 0)?)
    }

    /// Has the family record a step, here and on the other ranks. Logits `[R, vocabulary]`.
    fn forward(
        &mut self,
        step: &PackedStep,
        tokens: &DeviceTensor,
        draws: Vec<Draw>,
    ) -> Result<DeviceTensor, EngineError> {
        let pages = self.pages.capacity();
        let capacity = Capacity {
            pages,
            most_pages: pages + self.pages.available(),
        };
        if let Some(ranks) = &mut self.ranks {
            let is_chosen = !draws.is_empty();
            ranks.order(StepOrder {
                step: step.clone(),
                capacity,
                draws,
                told: self.choices.tell(),
            })?;
            if is_chosen {
                self.choices.ordered();
            }
        }
        self.forward_within(step, tokens, capacity)
    }

    /// Has the family record a step over a pool of that size.
    pub(super) fn forward_within(
        &mut self,
        step: &PackedStep,
        tokens: &DeviceTensor,
        capacity: Capacity,
    ) -> Result<DeviceTensor, EngineError> {
        self.pool.grow_to(capacity.pages, capacity.most_pages)?;
        let (slots, most_slots) = self.slots.capacity();
        self.states.grow_to(slots, most_slots)?;
        let backend = self.model.backend();
        let (rows, sequences) = (step.n_rows() as i64, step.n_sequences() as i64);
        let ints = |data: &[i32], shape: &[i64]| {
            let words = data.iter().flat_map(|word| word.to_ne_bytes());
            let bytes: Vec<u8> = words.collect();
            backend.from_host(&bytes, DType::I32, shape)
        };
        let positions = ints(&step.positions, &[rows])?;
        let slots = ints(&step.slots, &[rows])?;
        let row_sequences = ints(&step.row_sequences, &[rows])?;
        let page_table = ints(
            &step.page_table,
            &[sequences, step.pages_per_sequence as i64],
        )?;
        let logit_rows = ints(&step.logit_rows, &[step.logit_rows.len() as i64])?;
        let width = |cross: &PackedCross| cross.pages_per_sequence as i64;
        let cross = match &step.cross {
            None => None,
            Some(cross) => Some((
                ints(&cross.positions, &[rows])?,
                ints(&cross.page_table, &[sequences, width(cross)])?,
            )),
        };
        let arrays = StepArrays {
            slots: &slots,
            row_sequences: &row_sequences,
            positions: &positions,
            page_table: &page_table,
            row_starts: &step.row_starts,
            pages_per_sequence: step.pages_per_sequence,
            state_sources: &step.state_sources,
            state_targets: &step.state_targets,
            cross: cross.as_ref().map(|(positions, page_table)| CrossArrays {
                positions,
                page_table,
            }),
        };
        let kv = StepKv::new(&self.pool, &self.states, &self.cross, arrays)?;
        let inputs = StepInputs {
            tokens: tokens.handle(),
            positions: positions.handle(),
            logit_rows: logit_rows.handle(),
            n_rows: rows as u32,
            n_sequences: sequences as u32,
        };
        Ok(self.model.forward(&inputs, &kv)?)
    }

    /// Has the device choose the tokens that it can, and sorts out what comes to the host.
    fn draw(
        &mut self,
        wants: &[Wants],
        logits: &DeviceTensor,
        submitted: &mut Submitted,
    ) -> Result<(), EngineError> {
        let wants = wants.iter().filter(|wants| **wants != Wants::Nothing);
        let (mut drawn, mut draws, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (row, wants) in wants.enumerate() {
            match wants {
                Wants::Token(draw) => {
                    drawn.push(row);
                    draws.push(*draw);
                }
                _ => others.push(row),
            }
        }
        let backend = self.model.backend().clone();
        let rows_of = |rows: &[usize]| {
            let words = rows.iter().flat_map(|row| (*row as i32).to_ne_bytes());
            let bytes: Vec<u8> = words.collect();
            let indices = backend.from_host(&bytes, DType::I32, &[rows.len() as i64])?;
            backend.take(logits, &indices, 0)
        };
        if !drawn.is_empty() {
            let chosen = if others.is_empty() {
                self.chooser.choose(logits, &draws)?
            } else {
                self.chooser.choose(&rows_of(&drawn)?, &draws)?
            };
            match chosen {
                Some(chosen) => submitted.chosen = Some(chosen),
                None => {
                    others.append(&mut drawn);
                    others.sort_unstable();
                }
            }
        }
        submitted.wanted = match (drawn.is_empty(), others.is_empty()) {
            (_, true) => None,
            (true, false) => Some(logits.try_clone()?),
            (false, false) => Some(rows_of(&others)?),
        };
        submitted.drawn = drawn;
        Ok(())
    }

    fn check_logits(&self, logits: &DeviceTensor, rows: usize) -> Result<(), EngineError> {
        let info = logits.info()?;
        if info.shape() == [rows as i64, self.desc.vocab_size as i64] {
            return Ok(());
        }
        Err(EngineError::Internal {
            message: format!(
                "the family gave logits of shape {:?}, [{rows}, {}] was expected",
                info.shape(),
                self.desc.vocab_size
            ),
        })
    }

    /// Logits of one row, which the host was not meant to see.
    fn row(&self, step: &Submitted, row: usize) -> Result<Vec<f32>, EngineError> {
        let logits = step.logits.as_ref().ok_or_else(|| EngineError::Internal {
            message: "a step without logits chose a token".to_owned(),
        })?;
        let backend = self.model.backend();
        let bytes = (row as i32).to_ne_bytes();
        let index = backend.from_host(&bytes, DType::I32, &[1])?;
        self.read_logits(&backend.take(logits, &index, 0)?)
    }

    /// Logits as f32. What is narrower is widened here, so that less comes over.
    fn read_logits(&self, logits: &DeviceTensor) -> Result<Vec<f32>, EngineError> {
        let backend = self.model.backend();
        let dtype = logits.info()?.dtype;
        if !matches!(dtype, DType::F16 | DType::BF16) {
            return Ok(backend.read_f32(logits)?);
        }
        let bytes = backend.read(logits)?;
        let (halves, _) = bytes.as_chunks::<2>();
        let widen = |half: &[u8; 2]| match dtype {
            DType::F16 => half::f16::from_ne_bytes(*half).to_f32(),
            _ => half::bf16::from_ne_bytes(*half).to_f32(),
        };
        Ok(halves.iter().map(widen).collect())
    }
}
