//! Tokens that the device chooses itself, so that logits need not come to the host.

use crate::plugin::{Backend, CallError, DType, DeviceTensor, NO_TOKEN, SampleArgs};
use crate::sampling::RowDraw;

use mlxcel_abi::kinds::{arg_reduce, reduce};

/// How the backend chooses tokens.
pub(super) struct Chooser {
    backend: Backend,
    /// Whether it has the operation, as far as is known.
    has_slot: bool,
    is_asynchronous: bool,
    /// The numbers of the step before, which most often are those of the next.
    columns: Option<Columns>,
}

/// Numbers of the rows on the device.
struct Columns {
    draws: Vec<RowDraw>,
    top_k: DeviceTensor,
    top_p: DeviceTensor,
    min_p: DeviceTensor,
    temperature: DeviceTensor,
    uniform: DeviceTensor,
}

/// Tokens on the device.
pub(super) struct Chosen {
    /// `[D]` u32.
    pub tokens: DeviceTensor,
    /// `[D, 1]`: what must be a number for the token to be one. None where the tokens say so themselves.
    pub highest: Option<DeviceTensor>,
}

impl Chooser {
    pub(super) fn new(backend: &Backend) -> Self {
        Self {
            backend: backend.clone(),
            has_slot: backend.has_op("sample"),
            is_asynchronous: false,
            columns: None,
        }
    }

    pub(super) fn set_asynchronous(&mut self, is_asynchronous: bool) {
        self.is_asynchronous = is_asynchronous;
    }

    /// Whether the device takes a draw, as far as is known.
    pub(super) fn takes(&self, draw: &RowDraw) -> bool {
        // Without the operation the highest logit is two others, which is worth it where waiting costs more.
        self.has_slot || (self.is_asynchronous && draw.is_greedy())
    }

    /// Lets what is kept for the next step go.
    pub(super) fn rest(&mut self) {
        self.columns = None;
    }

    /// A token for every row of `logits`. None when the backend turns out not to take these draws.
    pub(super) fn choose(
        &mut self,
        logits: &DeviceTensor,
        draws: &[RowDraw],
    ) -> Result<Option<Chosen>, CallError> {
        if self.has_slot {
            match self.sample(logits, draws) {
                Err(error) if error.is_unimplemented() => {
                    self.has_slot = false;
                    self.columns = None;
                }
                tokens => {
                    return Ok(Some(Chosen {
                        tokens: tokens?,
                        highest: None,
                    }));
                }
            }
        }
        if !draws.iter().all(|draw| self.takes(draw)) {
            return Ok(None);
        }
        Ok(Some(Chosen {
            tokens: self.backend.arg_reduce(arg_reduce::ARGMAX, logits, -1)?,
            highest: Some(self.backend.reduce(reduce::MAX, logits, &[-1])?),
        }))
    }

    fn sample(
        &mut self,
        logits: &DeviceTensor,
        draws: &[RowDraw],
    ) -> Result<DeviceTensor, CallError> {
        let columns = match self.columns.take() {
            Some(columns) => columns.updated(&self.backend, draws)?,
            None => Columns::new(&self.backend, draws)?,
        };
        let args = SampleArgs {
            logits: logits.handle(),
            top_k: columns.top_k.handle(),
            top_p: columns.top_p.handle(),
            min_p: columns.min_p.handle(),
            temperature: columns.temperature.handle(),
            uniform: columns.uniform.handle(),
            ..SampleArgs::default()
        };
        let tokens = self.backend.sample(args)?;
        self.columns = Some(columns);
        Ok(tokens)
    }
}

impl Columns {
    fn new(backend: &Backend, draws: &[RowDraw]) -> Result<Self, CallError> {
        let column = |dtype, word: &dyn Fn(&RowDraw) -> [u8; 4]| {
            let bytes: Vec<u8> = draws.iter().flat_map(word).collect();
            backend.from_host(&bytes, dtype, &[draws.len() as i64])
        };
        Ok(Self {
            draws: draws.to_vec(),
            top_k: column(DType::I32, &|draw| (draw.top_k as i32).to_ne_bytes())?,
            top_p: column(DType::F32, &|draw| draw.top_p.to_ne_bytes())?,
            min_p: column(DType::F32, &|draw| draw.min_p.to_ne_bytes())?,
            temperature: column(DType::F32, &|draw| draw.temperature.to_ne_bytes())?,
            uniform: uniform(backend, draws)?,
        })
    }

    /// The columns of the next step: from one to the next only the random numbers differ, as long as the
    /// requests are the same.
    fn updated(self, backend: &Backend, draws: &[RowDraw]) -> Result<Self, CallError> {
        if self.draws == draws {
            return Ok(self);
        }
        let without = |draw: &RowDraw| RowDraw {
            uniform: 0.0,
            ..*draw
        };
        let known = self.draws.iter().map(without);
        if !known.eq(draws.iter().map(without)) {
            return Self::new(backend, draws);
        }
        Ok(Self {
            draws: draws.to_vec(),
            uniform: uniform(backend, draws)?,
            ..self
        })
    }
}

fn uniform(backend: &Backend, draws: &[RowDraw]) -> Result<DeviceTensor, CallError> {
    let words = draws.iter().flat_map(|draw| draw.uniform.to_ne_bytes());
    let bytes: Vec<u8> = words.collect();
    backend.from_host(&bytes, DType::F32, &[draws.len() as i64])
}

impl Chosen {
    /// The tokens, none for a row without one. Waits for the device.
    pub(super) fn read(&self, backend: &Backend) -> Result<Vec<Option<u32>>, CallError> {
        let tokens = backend.read_u32(&self.tokens)?;
        let Some(highest) = &self.highest else {
            let known = |token| (token != NO_TOKEN).then_some(token);
            return Ok(tokens.into_iter().map(known).collect());
        };
        let highest = backend.read_f32(highest)?;
        let pairs = tokens.into_iter().zip(highest);
        Ok(pairs
            .map(|(token, highest)| highest.is_finite().then_some(token))
            .collect())
    }
}
