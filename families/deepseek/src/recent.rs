//! Rows of a sequence up to a place in the step: those of the step itself, and before its first one those
//! that the sequence's state kept. What is asked for follows from shapes alone.

use mlxcel_sdk::prelude::*;

/// Which rows of a step belong to which sequence.
pub(crate) struct StepRows {
    /// First row of every sequence, `[S]` i32.
    first: Tensor,
    /// One past the last row of every sequence, `[S]` i32.
    end: Tensor,
    /// Sequence of every row, `[T]` i32.
    pub sequences: Tensor,
    /// Position of every row in its sequence, `[T]` i32.
    pub positions: Tensor,
    pub n_rows: i64,
    pub n_sequences: i64,
}

fn range(backend: &Backend, from: i64, to: i64) -> Result<Tensor> {
    Tensor::arange(backend, from as f64, to as f64, 1.0, DType::I32)
}

impl StepRows {
    pub(crate) fn of(step: &Step<'_>) -> Result<Self> {
        let (map, n) = (step.row_map()?, step.n_sequences as i64);
        Ok(Self {
            first: map.row_starts.narrow(0, 0, n)?,
            end: map.row_starts.narrow(0, 1, n)?,
            sequences: map.row_sequences,
            positions: step.positions.cast(DType::I32)?,
            n_rows: step.n_rows as i64,
            n_sequences: n,
        })
    }

    /// The last `reach` rows up to each of `ends`, itself included: `[R, reach, C]` from what the step's
    /// rows are, `[T, C]`, and what the state kept, `[S, K, C]` with K at least `reach - 1`. `ends`
    /// `[R]` are rows of the step, `sequences` `[R]` theirs.
    pub(crate) fn before(
        &self,
        kept: &Tensor,
        x: &Tensor,
        (ends, sequences): (&Tensor, &Tensor),
        reach: i64,
    ) -> Result<Tensor> {
        let (n, before, width) = (kept.dim(0)?, kept.dim(1)?, kept.dim(2)?);
        let backend = x.backend();
        let both = Tensor::concat(backend, &[&kept.reshape(&[n * before, width])?, x], 0)?;
        let column = |t: &Tensor| t.reshape(&[-1, 1]);
        let places = column(ends)?.add(&range(backend, 1 - reach, 1)?)?; // [R, reach]
        let starts = column(&self.first.take(sequences, 0)?)?;
        let in_step = places.add_scalar((n * before) as f64)?;
        let in_state = column(sequences)?
            .mul_scalar(before as f64)?
            .add(&places.sub(&starts)?)?
            .add_scalar(before as f64)?;
        both.take(&places.ge(&starts)?.select(&in_step, &in_state)?, 0)
    }

    /// The state after the step: as many of the last rows of every sequence as it kept before.
    pub(crate) fn kept_after(&self, kept: &Tensor, x: &Tensor) -> Result<Tensor> {
        let last = self.end.add_scalar(-1.0)?;
        let all = range(x.backend(), 0, self.n_sequences)?;
        self.before(kept, x, (&last, &all), kept.dim(1)?)
    }

    /// Last position of every sequence, `[S]` i32.
    pub(crate) fn last_positions(&self) -> Result<Tensor> {
        self.positions.take(&self.end.add_scalar(-1.0)?, 0)
    }
}

/// The rows that end a group of `rate` positions: how many there may be follows from the shapes, so
/// that some of `rows` may end none.
pub(crate) struct Ends {
    /// Rows of the step, `[G]` i32: first those that end a group.
    pub rows: Tensor,
    /// Their sequences, `[G]` i32.
    pub sequences: Tensor,
    /// Their positions, `[G]` i32.
    pub positions: Tensor,
    /// For every row of the step its place in `rows`, `[T]` i32, if it ends a group.
    place: Tensor,
    /// Whether it does, `[T]` bool.
    is_end: Tensor,
}

impl Ends {
    pub(crate) fn of(step: &StepRows, rate: i64) -> Result<Self> {
        let (backend, n_rows) = (step.positions.backend(), step.n_rows);
        // Every `rate` rows of a sequence end one group, and what is left over may end one more.
        let most = n_rows.min(n_rows / rate + step.n_sequences);
        let groups = step.positions.floor_div_scalar(rate as f64)?;
        let in_group = step.positions.sub(&groups.mul_scalar(rate as f64)?)?;
        let is_end = in_group.ge_scalar((rate - 1) as f64)?;
        let rows = range(backend, 0, n_rows)?;
        let later = rows.add_scalar(n_rows as f64)?;
        let order = is_end.select(&rows, &later)?.argsort(0)?; // [T]
        let place = order.argsort(0)?.cast(DType::I32)?;
        let rows = order.narrow(0, 0, most)?.cast(DType::I32)?;
        Ok(Self {
            sequences: step.sequences.take(&rows, 0)?,
            positions: step.positions.take(&rows, 0)?,
            place: place.minimum_scalar((most - 1) as f64)?,
            rows,
            is_end,
        })
    }

    /// `[G, C]` at the rows that end a group, zeros at the others: `[T, C]`.
    pub(crate) fn spread(&self, groups: &Tensor) -> Result<Tensor> {
        let (rows, width) = (self.is_end.dim(0)?, groups.dim(1)?);
        let zeros = Tensor::zeros(groups.backend(), groups.dtype()?, &[rows, width])?;
        let is_end = self
            .is_end
            .reshape(&[rows, 1])?
            .broadcast_to(&[rows, width])?;
        is_end.select(&groups.take(&self.place, 0)?, &zeros)
    }
}
