//! Which experts of a mixture a row goes to.

use core::ffi::c_void;

use mlxcel_abi::fused_args::RouteArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::Native;

use super::fused::give;
use super::made::Made;
use super::rows::{SERIAL_BELOW, Shared};
use super::{State, floats};

pub(super) fn install(table: &mut BackendOps) {
    table.route = route;
}

unsafe extern "C" fn route(
    ctx: *mut c_void,
    args: *const RouteArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract: live arguments, room for two results.
    unsafe {
        give(ctx, out.cast(), err, |native, state| {
            routed(native, state, &RouteArgs::read(args)?)
        })
    }
}

fn routed(native: Native<'_>, state: &mut State, args: &RouteArgs) -> Result<Option<Vec<Tensor>>> {
    let Some(logits) = floats(&native, args.logits)? else {
        return Ok(None);
    };
    let &[rows, n] = logits.shape() else {
        return Ok(None);
    };
    let (n, k) = (n as usize, args.top_k as usize);
    if !(1..=n).contains(&k) {
        return Err(AbiError::invalid(format!(
            "route: {k} of {n} experts are not possible, expected 1 to {n}"
        )));
    }
    let is_renormalised = args.renormalised == 1;
    // SAFETY: a contiguous f32 view of a tensor that the caller holds.
    let (dtype, logits) = (logits.given, unsafe { logits.as_slice::<f32>() });
    let shape = [rows, k as i64];
    // Numbers of experts have the size of weights.
    let mut experts = Made::of(native, DType::U32, &shape)?;
    let mut weights = Made::new(native, &shape)?;
    let (to, shares) = (Shared::new(experts.slice()), Shared::new(weights.slice()));
    let done = state
        .pool
        .split(rows as usize, 1, SERIAL_BELOW / (8 * n) + 1, &|range| {
            let mut best = Vec::with_capacity(k + 1);
            for row in range {
                let logits = &logits[row * n..(row + 1) * n];
                highest(logits, k, &mut best);
                // SAFETY: the pool's ranges are disjoint.
                let (to, shares) = unsafe {
                    let own = row * k..(row + 1) * k;
                    (to.part(own.clone()), shares.part(own))
                };
                for (to, expert) in to.iter_mut().zip(&best) {
                    *to = f32::from_bits(*expert);
                }
                shares_of(logits, &best, is_renormalised, shares);
            }
        });
    if !done {
        return Err(Native::panicked("route"));
    }
    let weights = weights.rounded(dtype)?.give();
    Ok(Some(vec![experts.give(), weights]))
}

/// The `k` highest, highest first, the lower number first among equals. What is no number is lowest.
fn highest(logits: &[f32], k: usize, best: &mut Vec<u32>) {
    best.clear();
    let key = |i: u32| match logits[i as usize] {
        x if x.is_nan() => f32::NEG_INFINITY,
        x => x,
    };
    for i in 0..logits.len() as u32 {
        let is_full = best.len() == k;
        if is_full && best.last().is_some_and(|last| key(i) <= key(*last)) {
            continue;
        }
        let at = best.partition_point(|other| key(*other) >= key(i));
        best.insert(at, i);
        best.truncate(k);
    }
}

/// Softmax of the chosen logits, over them alone or over all.
fn shares_of(logits: &[f32], chosen: &[u32], is_renormalised: bool, out: &mut [f32]) {
    let highest = chosen.first().map_or(0.0, |i| logits[*i as usize]);
    let mut total = 0.0;
    for (out, i) in out.iter_mut().zip(chosen) {
        *out = (logits[*i as usize] - highest).exp();
        total += *out;
    }
    if !is_renormalised {
        total = logits.iter().map(|x| (x - highest).exp()).sum();
    }
    out.iter_mut().for_each(|share| *share /= total);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_are_found_in_order_and_what_is_no_number_is_last() {
        let mut best = Vec::new();
        let logits = [1.0, f32::NAN, 3.0, -1.0, 3.0, f32::NEG_INFINITY];
        highest(&logits, 3, &mut best);
        assert_eq!(best, [2, 4, 0]);
        highest(&logits, 6, &mut best);
        assert_eq!(best, [2, 4, 0, 3, 1, 5]);
        highest(&[f32::NAN; 4], 2, &mut best);
        assert_eq!(best, [0, 1]);
    }

    #[test]
    fn shares_are_of_the_chosen_or_of_all() {
        let logits = [0.0, 2f32.ln(), 3f32.ln(), 100f32.ln()];
        let mut out = [0.0; 2];
        shares_of(&logits[..3], &[2, 1], true, &mut out);
        assert!((out[0] - 0.6).abs() < 1e-6 && (out[1] - 0.4).abs() < 1e-6);
        shares_of(&logits[..3], &[2, 1], false, &mut out);
        assert!((out[0] - 0.5).abs() < 1e-6 && (out[1] - 1.0 / 3.0).abs() < 1e-6);
        shares_of(&[f32::NAN, 1.0], &[1], false, &mut out[..1]);
        assert!(out[0].is_nan());
    }
}
