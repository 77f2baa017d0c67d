//! States that move on with every row: short convolution and gated delta rule.

use mlxcel_abi::{AbiError, DType, Result};

use super::number::{need_float, need_int};
use super::paged::{check_row_starts, checked};
use super::shape;
use super::unary::unary;
use super::value::{Data, Mode, Value};

/// Tensors of `StateRows`.
pub(super) struct Rows<'a> {
    pub sources: &'a Value,
    pub targets: &'a Value,
    pub row_sequences: &'a Value,
    pub row_starts: &'a Value,
    /// The host's copy of the boundaries.
    pub host: &'a [u32],
}

/// What one sequence does: where its state comes from and goes to, and its rows.
struct Part {
    source: Option<usize>,
    target: usize,
    rows: core::ops::Range<usize>,
}

impl Rows<'_> {
    fn check(&self, n_rows: usize) -> Result<()> {
        let n = self.host.len() - 1;
        for (what, value, length) in [
            ("sources", self.sources, n),
            ("targets", self.targets, n),
            ("row_starts", self.row_starts, n + 1),
            ("row_sequences", self.row_sequences, n_rows),
        ] {
            need_int(what, value.dtype)?;
            shape::need(what, &value.shape, &[length])?;
        }
        check_row_starts(n_rows, self.host)
    }

    /// The sequences, after a check that every copy of the boundaries says the same.
    fn parts(&self, slots: usize) -> Result<Vec<Part>> {
        let (sources, targets) = (self.sources.ints()?, self.targets.ints()?);
        let (starts, owners) = (self.row_starts.ints()?, self.row_sequences.ints()?);
        let mut parts = Vec::new();
        for (i, pair) in self.host.windows(2).enumerate() {
            let rows = pair[0] as usize..pair[1] as usize;
            let same = starts[i] == i128::from(pair[0])
                && starts[i + 1] == i128::from(pair[1])
                && owners[rows.clone()].iter().all(|&owner| owner == i as i128);
            if !same {
                return Err(AbiError::invalid(format!(
                    "rows of sequence {i}: the boundaries and their copies differ"
                )));
            }
            let source = match sources[i] {
                -1 => None,
                slot => Some(checked("source", slot, slots)?),
            };
            parts.push(Part {
                source,
                target: checked("target", targets[i], slots)?,
                rows,
            });
        }
        Ok(parts)
    }
}

/// States before the step, one by one, and the pool they are written to.
struct States {
    before: Vec<f64>,
    after: Vec<f64>,
    width: usize,
}

impl States {
    fn new(pool: &Value) -> Self {
        let before = pool.reals().into_owned();
        Self {
            after: before.clone(),
            before,
            width: pool.shape[1..].iter().product(),
        }
    }

    fn take(&self, part: &Part) -> Vec<f64> {
        match part.source {
            None => vec![0.0; self.width],
            Some(slot) => self.before[slot * self.width..][..self.width].to_vec(),
        }
    }

    fn put(&mut self, part: &Part, state: &[f64]) {
        self.after[part.target * self.width..][..self.width].copy_from_slice(state);
    }
}

/// Tensors of `ShortConvPoolArgs`.
pub(super) struct Conv<'a> {
    pub x: &'a Value,
    pub weight: &'a Value,
    pub bias: Option<&'a Value>,
    pub pool: &'a Value,
    pub activation: u32,
}

/// Result `[T, C]` and the new pool.
pub(super) fn short_conv(mode: Mode, t: &Conv<'_>, rows: &Rows<'_>) -> Result<[Value; 2]> {
    need_float("x", t.x.dtype)?;
    need_float("weight", t.weight.dtype)?;
    shape::need_ndim("x", &t.x.shape, 2)?;
    shape::need_ndim("weight", &t.weight.shape, 2)?;
    shape::need_ndim("pool", &t.pool.shape, 3)?;
    let ([n_rows, width], taps) = ([t.x.shape[0], t.x.shape[1]], t.weight.shape[1]);
    shape::need("weight", &t.weight.shape, &[width, taps])?;
    if taps < 2 {
        return Err(AbiError::invalid(format!(
            "a kernel of {taps} rows has no state, expected at least 2"
        )));
    }
    need_pool(t.pool, &[taps - 1, width])?;
    if let Some(bias) = t.bias {
        need_float("bias", bias.dtype)?;
        shape::need("bias", &bias.shape, &[width])?;
    }
    rows.check(n_rows)?;
    let mut states = States::new(t.pool);
    let sums = mode.value(DType::F64, vec![n_rows, width], || {
        let (x, weight) = (t.x.reals(), t.weight.reals());
        let bias = t.bias.map(Value::reals);
        let mut out = vec![0.0; n_rows * width];
        for part in rows.parts(t.pool.shape[0])? {
            // Everything the sequence has seen, oldest first.
            let mut seen = states.take(&part);
            seen.extend_from_slice(&x[part.rows.start * width..part.rows.end * width]);
            for row in part.rows.clone() {
                let first = (row - part.rows.start) * width;
                for c in 0..width {
                    let sum: f64 = (0..taps)
                        .map(|tap| weight[c * taps + tap] * seen[first + tap * width + c])
                        .sum();
                    out[row * width + c] = sum + bias.as_ref().map_or(0.0, |bias| bias[c]);
                }
            }
            states.put(&part, &seen[part.rows.len() * width..]);
        }
        Ok(Data::Real(out))
    })?;
    let y = match t.activation {
        0 => sums,
        code => unary(mode, code, &sums)?,
    };
    Ok([y.cast(mode, t.x.dtype)?, new_pool(mode, t.pool, states)?])
}

fn need_pool(pool: &Value, state: &[usize]) -> Result<()> {
    let wanted: Vec<usize> = core::iter::once(pool.shape[0])
        .chain(state.iter().copied())
        .collect();
    shape::need("pool", &pool.shape, &wanted)?;
    if pool.dtype != DType::F32 {
        return Err(AbiError::invalid(format!(
            "a pool of states is f32, found {}",
            pool.dtype.name()
        )));
    }
    Ok(())
}

fn new_pool(mode: Mode, pool: &Value, states: States) -> Result<Value> {
    mode.value(pool.dtype, pool.shape.clone(), || {
        Ok(Data::Real(states.after))
    })
}

/// Tensors of `GatedDeltaPoolArgs`.
pub(super) struct Delta<'a> {
    pub q: &'a Value,
    pub k: &'a Value,
    pub v: &'a Value,
    pub g: &'a Value,
    pub beta: &'a Value,
    pub pool: &'a Value,
}

/// Result `[T, Hv, Dv]` and the new pool.
pub(super) fn gated_delta(mode: Mode, t: &Delta<'_>, rows: &Rows<'_>) -> Result<[Value; 2]> {
    for (what, value, ndim) in [
        ("q", t.q, 3),
        ("k", t.k, 3),
        ("v", t.v, 3),
        ("beta", t.beta, 2),
        ("pool", t.pool, 4),
    ] {
        need_float(what, value.dtype)?;
        shape::need_ndim(what, &value.shape, ndim)?;
    }
    let [n_rows, key_heads, key_width] = [t.k.shape[0], t.k.shape[1], t.k.shape[2]];
    let [heads, width] = [t.v.shape[1], t.v.shape[2]];
    shape::need("q", &t.q.shape, &t.k.shape)?;
    shape::need("v", &t.v.shape, &[n_rows, heads, width])?;
    shape::need("beta", &t.beta.shape, &[n_rows, heads])?;
    need_float("g", t.g.dtype)?;
    let per_key = t.g.shape.len() == 3;
    let g_shape: &[usize] = if per_key {
        &[n_rows, heads, key_width]
    } else {
        &[n_rows, heads]
    };
    shape::need("g", &t.g.shape, g_shape)?;
    if key_heads == 0 || !heads.is_multiple_of(key_heads) {
        return Err(AbiError::invalid(format!(
            "{heads} value heads are no multiple of {key_heads} key heads"
        )));
    }
    need_pool(t.pool, &[heads, key_width, width])?;
    rows.check(n_rows)?;
    let mut states = States::new(t.pool);
    let y = mode.value(t.v.dtype, vec![n_rows, heads, width], || {
        let (q, k, v) = (t.q.reals(), t.k.reals(), t.v.reals());
        let (g, beta) = (t.g.reals(), t.beta.reals());
        let mut out = vec![0.0; n_rows * heads * width];
        for part in rows.parts(t.pool.shape[0])? {
            let mut state = states.take(&part);
            for row in part.rows.clone() {
                for head in 0..heads {
                    let at = row * heads + head;
                    let key_at = (row * key_heads + head / (heads / key_heads)) * key_width;
                    let s = &mut state[head * key_width * width..][..key_width * width];
                    for (i, line) in s.chunks_exact_mut(width).enumerate() {
                        let log = if per_key {
                            g[at * key_width + i]
                        } else {
                            g[at]
                        };
                        line.iter_mut().for_each(|x| *x *= log.exp());
                    }
                    for j in 0..width {
                        let recalled: f64 = (0..key_width)
                            .map(|i| k[key_at + i] * s[i * width + j])
                            .sum();
                        let delta = beta[at] * (v[at * width + j] - recalled);
                        for i in 0..key_width {
                            s[i * width + j] += k[key_at + i] * delta;
                        }
                        out[at * width + j] = (0..key_width)
                            .map(|i| q[key_at + i] * s[i * width + j])
                            .sum();
                    }
                }
                // A state is f32 between rows, as in the pool: it must not matter whether a call ends there.
                state.iter_mut().for_each(|x| *x = f64::from(*x as f32));
            }
            states.put(&part, &state);
        }
        Ok(Data::Real(out))
    })?;
    Ok([y, new_pool(mode, t.pool, states)?])
}
