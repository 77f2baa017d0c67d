//! Gated blocks of a mixture of experts, in two hand-overs to the threads.
//!
//! Pairs of a row and an expert are put in order of experts, so that a weight is read once for all of its rows. Experts
//! with few rows go together: gate, up and activation of all of them are one hand-over, and so are the last products
//! with their weighted sum. An expert with more rows, or with plain weights, has products of its own. Sums are in the
//! order in which a row names its experts, whichever rows are beside it.

use core::ffi::c_void;
use core::ops::Range;

use mlxcel_abi::fused_args::MixtureArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::{qmatmul, row};

use super::experts::indices;
use super::fused::give;
use super::layers::rows_of;
use super::made::Made;
use super::rows::{SERIAL_BELOW, Shared, gate_of};
use super::stacks::Stack;
use super::{State, floats, joint};

pub(super) fn install(table: &mut BackendOps) {
    table.mixture = mixture;
}

unsafe extern "C" fn mixture(
    ctx: *mut c_void,
    args: *const MixtureArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract: live arguments, room for one result.
    unsafe {
        give(ctx, out, err, |native, state| {
            mixed(native, state, &MixtureArgs::read(args)?)
        })
    }
}

/// One call.
struct Mixture<'a> {
    x: &'a [f32],
    rows: usize,
    /// Of the result.
    dtype: DType,
    /// Experts of a row.
    chosen: usize,
    /// By pairs.
    weights: &'a [f32],
    residual: Option<&'a [f32]>,
    gate: Stack<'a>,
    up: Stack<'a>,
    down: Stack<'a>,
    kind: row::Gate,
}

/// An expert with its places among the pairs in order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    expert: usize,
    places: Range<usize>,
}

/// Pairs in order of experts.
#[derive(Debug)]
struct Order {
    /// The pair at every place.
    pairs: Vec<usize>,
    /// The place of every pair.
    places: Vec<usize>,
    groups: Vec<Group>,
}

impl Order {
    fn new(experts: &[usize]) -> Self {
        let mut pairs: Vec<usize> = (0..experts.len()).collect();
        pairs.sort_by_key(|pair| experts[*pair]);
        let (mut places, mut groups) = (vec![0; pairs.len()], Vec::<Group>::new());
        for (place, pair) in pairs.iter().enumerate() {
            places[*pair] = place;
            let expert = experts[*pair];
            match groups.last_mut().filter(|group| group.expert == expert) {
                Some(group) => group.places.end = place + 1,
                None => groups.push(Group {
                    expert,
                    places: place..place + 1,
                }),
            }
        }
        Self {
            pairs,
            places,
            groups,
        }
    }

    /// The rows of every group in a result with `width` columns.
    fn parts<'a>(&self, mut out: &'a mut [f32], width: usize) -> Vec<&'a mut [f32]> {
        let mut parts = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let (part, rest) = out.split_at_mut(group.places.len() * width);
            parts.push(part);
            out = rest;
        }
        parts
    }
}

/// The call behind its arguments with its order, if the kernels take it.
///
/// # Safety
/// The tensors must live for `'a`.
unsafe fn call<'a>(
    native: &Native<'_>,
    args: &MixtureArgs,
) -> Result<Option<(Mixture<'a>, Order)>> {
    let Some(kind) = gate_of(args.kind) else {
        return Ok(None);
    };
    // SAFETY: forwarded to the caller.
    let (gate, up, down) = unsafe {
        (
            Stack::of_layer(native, &args.gate)?,
            Stack::of_layer(native, &args.up)?,
            Stack::of_layer(native, &args.down)?,
        )
    };
    let (Some(gate), Some(up), Some(down)) = (gate, up, down) else {
        return Ok(None);
    };
    let shape = |stack: &Stack<'_>| [stack.matrices, stack.rows, stack.columns];
    let [matrices, inner, columns] = shape(&gate);
    if shape(&up) != shape(&gate) || shape(&down) != [matrices, columns, inner] {
        return Ok(None);
    }
    // SAFETY: as above.
    let Some((x, rows, mut dtype)) = (unsafe { rows_of(native, args.x, columns) })? else {
        return Ok(None);
    };
    let (Some(weights), experts) = (floats(native, args.weights)?, native.view(args.experts)?)
    else {
        return Ok(None);
    };
    let chosen = match experts.shape() {
        &[of, chosen] if of == rows as i64 && chosen > 0 => chosen as usize,
        _ => return Ok(None),
    };
    let Some(experts) = indices(&experts).filter(|_| weights.shape() == experts.shape()) else {
        return Ok(None);
    };
    if let Some(outside) = experts.iter().find(|expert| **expert >= matrices) {
        return Err(AbiError::invalid(format!(
            "mixture: expert {outside} of {matrices} is not there"
        )));
    }
    let plain = [&gate, &up, &down]
        .into_iter()
        .filter_map(|stack| stack.dtype);
    dtype = plain.fold(joint(dtype, weights.given), joint);
    let mut residual = None;
    if !args.residual.is_none() {
        // SAFETY: as above.
        residual = match unsafe { rows_of(native, args.residual, columns) }? {
            Some((residual, others, given)) if others == rows => {
                dtype = joint(dtype, given);
                Some(residual)
            }
            _ => return Ok(None),
        };
    }
    let mixture = Mixture {
        x,
        rows,
        dtype,
        chosen,
        // SAFETY: a contiguous f32 view; the rest is the caller's promise.
        weights: unsafe { weights.as_slice() },
        residual,
        gate,
        up,
        down,
        kind,
    };
    Ok(Some((mixture, Order::new(&experts))))
}

fn mixed(native: Native<'_>, state: &mut State, args: &MixtureArgs) -> Result<Option<Vec<Tensor>>> {
    // SAFETY: the caller holds the tensors during the call.
    let Some((mixture, order)) = (unsafe { call(&native, args) })? else {
        return Ok(None);
    };
    let [_, inner, columns] = [mixture.rows, mixture.gate.rows, mixture.gate.columns];
    let (rows, pairs) = (mixture.rows as i64, order.pairs.len() as i64);
    let wide = |columns: usize| Made::new(native, &[pairs, columns as i64]);
    let mut sorted = None;
    // One row is the input of each of its experts.
    if order.groups.len() < order.pairs.len() || mixture.rows > 1 {
        let mut made = wide(columns)?;
        if !mixture.sort(state, &order, made.slice()) {
            return Err(Native::panicked("mixture"));
        }
        sorted = Some(made);
    }
    let (mut gate, mut up, mut both) = (wide(inner)?, wide(inner)?, wide(inner)?);
    let mut y = wide(columns)?;
    let mut made = Made::new(native, &[rows, columns as i64])?;
    let input = match &mut sorted {
        Some(made) => &*made.slice(),
        None => mixture.x,
    };
    let outs = [gate.slice(), up.slice(), both.slice()];
    let done = mixture.gated(state, &order, input, outs)
        && mixture.summed(state, &order, both.slice(), y.slice(), made.slice());
    if !done {
        return Err(Native::panicked("mixture"));
    }
    Ok(Some(vec![made.rounded(mixture.dtype)?.give()]))
}

impl Mixture<'_> {
    /// The row of every place. False when a kernel panicked, here and below.
    fn sort(&self, state: &mut State, order: &Order, out: &mut [f32]) -> bool {
        let (columns, out) = (self.gate.columns, Shared::new(out));
        let serial_below = SERIAL_BELOW / columns + 1;
        let pairs = order.pairs.len();
        state.pool.split(pairs, 1, serial_below, &|places| {
            for place in places {
                let row = order.pairs[place] / self.chosen;
                // SAFETY: the pool's ranges are disjoint.
                let out = unsafe { out.part(place * columns..(place + 1) * columns) };
                out.copy_from_slice(&self.x[row * columns..(row + 1) * columns]);
            }
        })
    }

    /// `f(gate x) * up x` of every place.
    fn gated(
        &self,
        state: &mut State,
        order: &Order,
        x: &[f32],
        [gate_out, up_out, both]: [&mut [f32]; 3],
    ) -> bool {
        let (inner, columns) = (self.gate.rows, self.gate.columns);
        let (isa, kind) = (state.isa, self.kind);
        let is_shared = x.len() == columns;
        let outs = order.parts(gate_out, inner).into_iter();
        let outs = outs.zip(order.parts(up_out, inner));
        let both = Shared::new(both);
        let (mut inputs, mut of, mut targets, mut joined) = (vec![], vec![], vec![], vec![]);
        if is_shared {
            inputs.push(x);
        }
        for (group, (gate_out, up_out)) in order.groups.iter().zip(outs) {
            let Group { expert, places } = group;
            let m = places.len();
            let own = match is_shared {
                true => x,
                false => &x[places.start * columns..places.end * columns],
            };
            let stacks = (
                self.gate.joining(state, *expert, m),
                self.up.joining(state, *expert, m),
            );
            if let (Some(gate), Some(up)) = stacks {
                if !is_shared {
                    inputs.push(own);
                }
                of.extend([inputs.len() - 1; 2]);
                targets.push(qmatmul::Target {
                    w: gate,
                    y: gate_out,
                });
                targets.push(qmatmul::Target { w: up, y: up_out });
                joined.push(places.clone());
                continue;
            }
            if !self.gate.product(state, *expert, own, gate_out)
                || !self.up.product(state, *expert, own, up_out)
            {
                return false;
            }
            let (gate_out, up_out) = (&*gate_out, &*up_out);
            let start = places.start * inner;
            let done = state.pool.split(m * inner, 64, SERIAL_BELOW / 4, &|range| {
                let (g, u) = (&gate_out[range.clone()], &up_out[range.clone()]);
                // SAFETY: the pool's ranges are disjoint, and so are groups.
                let out = unsafe { both.part(start + range.start..start + range.end) };
                row::gated(isa, kind, g, u, out);
            });
            if !done {
                return false;
            }
        }
        qmatmul::matmul_grouped(
            (isa, state.precision),
            &mut state.pool,
            (&inputs, &of),
            &mut targets,
            &mut state.grouped,
            &|results, columns| {
                for (index, places) in joined.iter().enumerate() {
                    for (row, place) in places.clone().enumerate() {
                        let at =
                            |row: usize| row * inner + columns.start..row * inner + columns.end;
                        // SAFETY: columns of this thread, of three results.
                        let (g, u, out) = unsafe {
                            (
                                &*results.part(2 * index, at(row)),
                                &*results.part(2 * index + 1, at(row)),
                                both.part(at(place)),
                            )
                        };
                        row::gated(isa, kind, g, u, out);
                    }
                }
            },
        )
    }

    /// The last products of every place into `y`, and their weighted sums into `out`.
    fn summed(
        &self,
        state: &mut State,
        order: &Order,
        both: &[f32],
        y: &mut [f32],
        out: &mut [f32],
    ) -> bool {
        let (inner, width) = (self.down.columns, self.down.rows);
        let own = |group: &Group| &both[group.places.start * inner..group.places.end * inner];
        let out = Shared::new(out);
        let matrices: Vec<_> = order
            .groups
            .iter()
            .map(|group| self.down.joining(state, group.expert, group.places.len()))
            .collect();
        let is_joined = matrices.iter().all(Option::is_some);
        let (mut inputs, mut targets) = (vec![], vec![]);
        let parts = order.parts(&mut *y, width);
        for ((group, w), y) in order.groups.iter().zip(matrices).zip(parts) {
            if let Some(w) = w {
                inputs.push(own(group));
                targets.push(qmatmul::Target { w, y });
            } else if !self.down.product(state, group.expert, own(group), y) {
                return false;
            }
        }
        let of: Vec<usize> = (0..targets.len()).collect();
        // Where a row of a place is: its group, and its number there.
        let mut at = vec![(0, 0); order.pairs.len()];
        for (index, group) in order.groups.iter().enumerate() {
            for (row, place) in group.places.clone().enumerate() {
                at[place] = (index, row);
            }
        }
        let done = qmatmul::matmul_grouped(
            (state.isa, state.precision),
            &mut state.pool,
            (&inputs, &of),
            &mut targets,
            &mut state.grouped,
            &|results, columns| {
                if !is_joined {
                    return;
                }
                for row in 0..self.rows {
                    // SAFETY: columns of this thread.
                    let out =
                        unsafe { out.part(row * width + columns.start..row * width + columns.end) };
                    self.sum(row, columns.clone(), out, |pair| {
                        let (group, row) = at[order.places[pair]];
                        let range = row * width + columns.start..row * width + columns.end;
                        // SAFETY: columns of this thread, which are complete.
                        unsafe { &*results.part(group, range) }
                    });
                }
            },
        );
        if !done || is_joined {
            return done;
        }
        let y = &*y;
        let serial_below = SERIAL_BELOW / (self.chosen * width) + 1;
        state.pool.split(self.rows, 1, serial_below, &|rows| {
            for row in rows {
                // SAFETY: the pool's ranges are disjoint.
                let out = unsafe { out.part(row * width..(row + 1) * width) };
                self.sum(row, 0..width, out, |pair| {
                    let place = order.places[pair];
                    &y[place * width..(place + 1) * width]
                });
            }
        })
    }

    /// The weighted sum of some columns of a row, whose terms `of_pair` gives.
    fn sum<'a>(
        &self,
        row: usize,
        columns: Range<usize>,
        out: &mut [f32],
        of_pair: impl Fn(usize) -> &'a [f32],
    ) {
        out.fill(0.0);
        for pair in row * self.chosen..(row + 1) * self.chosen {
            let weight = self.weights[pair];
            for (out, term) in out.iter_mut().zip(of_pair(pair)) {
                *out += weight * term;
            }
        }
        if let Some(residual) = self.residual {
            let start = row * self.down.rows;
            let residual = &residual[start + columns.start..start + columns.end];
            out.iter_mut().zip(residual).for_each(|(y, x)| *y += x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_in_order_of_experts_and_of_rows() {
        let order = Order::new(&[3, 0, 3, 7, 0, 3]);
        assert_eq!(order.pairs, [1, 4, 0, 2, 5, 3]);
        assert_eq!(order.places, [2, 0, 3, 5, 1, 4]);
        let group = |expert, places| Group { expert, places };
        assert_eq!(
            order.groups,
            [group(0, 0..2), group(3, 2..5), group(7, 5..6)]
        );
        let mut out = [0.0; 12];
        let lens: Vec<usize> = order
            .parts(&mut out, 2)
            .iter()
            .map(|part| part.len())
            .collect();
        assert_eq!(lens, [4, 6, 2]);
    }
}
