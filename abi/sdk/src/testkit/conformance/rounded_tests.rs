//! The suite on a backend that rounds activations, rightly and in ways that are wrong.

use core::cell::Cell;
use core::ffi::c_void;

use mlxcel_abi::ops_args::QuantizedMatmulArgs;
use mlxcel_abi::{DType, ErrorObj, Status, Tensor as Handle};

use super::array::Array;
use super::rounding::GROUP;
use super::tests::{original, patched};
use super::*;
use crate::Tensor;
use crate::testkit::reference::value::Data;

/// What a product with a quantised weight gets wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// One scale of the weight is larger by this share.
    OneScale(f64),
    /// The scale of every fourth group of a weight is larger by this share.
    Scales(f64),
    /// Groups of the weight take the scale of their neighbour.
    NextScale,
    /// The first group of every row has no bias.
    NoBias,
    /// Steps are those of the group before.
    NextStep,
    /// Steps are so many times as large.
    Coarse(f64),
    /// Activations are cut off instead of rounded.
    CutOff,
}

thread_local! {
    static NOW: Cell<(Rounding, Fault)> = const { Cell::new((Rounding::Eight, Fault::None)) };
}

/// Activations as a backend rounds them, in f64.
fn round(x: &mut [f64], width: usize, rounding: Rounding, fault: Fault) {
    for row in x.chunks_mut(width) {
        let steps: Vec<f64> = row
            .chunks(GROUP)
            .map(|group| group.iter().fold(0.0, |a: f64, x| a.max(x.abs())) / rounding.limit())
            .collect();
        for (g, group) in row.chunks_mut(GROUP).enumerate() {
            let step = match fault {
                Fault::Coarse(times) => times * steps[g],
                _ => steps[g],
            };
            let scale = match fault {
                Fault::NextStep => steps[(g + 1) % steps.len()],
                _ => step,
            };
            group.iter_mut().filter(|_| step > 0.0).for_each(|x| {
                *x = match fault {
                    Fault::CutOff => (*x / step).floor(),
                    _ => (*x / step).round_ties_even(),
                } * scale;
            });
        }
    }
}

fn change(array: &mut Array, each: impl FnOnce(&mut [f64])) {
    if let Data::Real(numbers) = &mut array.0.data {
        each(numbers);
    }
}

/// The product of what is rounded, with what `NOW` says is wrong.
///
/// # Safety
/// As for slots of a table.
unsafe fn product(
    ctx: *mut c_void,
    args: *const QuantizedMatmulArgs,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
    is_gathered: bool,
) -> Status {
    let table = original(ctx);
    let call = match is_gathered {
        true => table.gather_quantized_matmul,
        false => table.quantized_matmul,
    };
    // SAFETY: the table is a reference's, arguments are the caller's.
    let (b, mut args) = unsafe {
        (
            Backend::from_raw(&table),
            QuantizedMatmulArgs::read(args).unwrap(),
        )
    };
    let read = |handle| Array::read(&Tensor::borrow_handle(&b, handle).unwrap()).unwrap();
    let mut held = Vec::new();
    let mut hold = |array: Array| {
        held.push(array.on(&b).unwrap());
        held[held.len() - 1].handle()
    };
    let mut x = read(args.x);
    let (rounding, fault) = NOW.get();
    if x.0.dtype == DType::F32 && args.transpose == 1 {
        let width = x.0.last_dim();
        change(&mut x, |x| round(x, width, rounding, fault));
        args.x = hold(x);
        let mut scales = read(args.w.scales);
        change(&mut scales, |scales| match fault {
            Fault::Scales(share) => scales.iter_mut().step_by(4).for_each(|s| *s *= 1.0 + share),
            Fault::OneScale(share) => scales[0] *= 1.0 + share,
            Fault::NextScale => scales.rotate_left(1),
            _ => {}
        });
        args.w.scales = hold(scales);
        if !args.w.biases.is_none() {
            let mut biases = read(args.w.biases);
            let groups = biases.0.last_dim();
            if fault == Fault::NoBias {
                change(&mut biases, |biases| {
                    let firsts = biases.iter_mut().step_by(groups);
                    firsts.for_each(|bias| *bias = 0.0);
                });
            }
            args.w.biases = hold(biases);
        }
    }
    // SAFETY: arguments are live, places are the caller's.
    unsafe { call(ctx, &args, out, err) }
}

unsafe extern "C" fn quantized_matmul(
    ctx: *mut c_void,
    args: *const QuantizedMatmulArgs,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded from the caller.
    unsafe { product(ctx, args, out, err, false) }
}

unsafe extern "C" fn gather_quantized_matmul(
    ctx: *mut c_void,
    args: *const QuantizedMatmulArgs,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded from the caller.
    unsafe { product(ctx, args, out, err, true) }
}

/// Failing cases of the group `quantization` on a backend that rounds so and is wrong so, when `depth` is compared.
fn failing(depth: Depth, rounding: Rounding, fault: Fault) -> usize {
    NOW.set((rounding, fault));
    let reference = reference_backend(ReferenceOptions::default());
    let backend = patched(&reference, |table| {
        table.quantized_matmul = quantized_matmul;
        table.gather_quantized_matmul = gather_quantized_matmul;
    });
    let groups = [*group("quantization").unwrap()];
    let report = run("rounded", &backend, &groups, depth);
    let failed = report.outcomes.iter().filter(|o| o.failure.is_some());
    failed.count()
}

const ROUNDINGS: [Rounding; 2] = [Rounding::Sixteen, Rounding::Eight];

#[test]
fn rounding_that_was_stated_is_allowed_and_other_is_not() {
    for rounding in ROUNDINGS {
        assert_eq!(
            failing(Depth::Rounded(rounding), rounding, Fault::None),
            0,
            "{rounding:?}"
        );
        assert!(
            failing(Depth::Values, rounding, Fault::None) > 150,
            "{rounding:?}"
        );
    }
    let stated = Depth::Rounded(Rounding::Sixteen);
    assert!(failing(stated, Rounding::Eight, Fault::None) > 150);
}

#[test]
fn rounding_hides_nothing_that_is_wrong() {
    // Of 157 products with affine weights and f32 activations, and of 51 with others, which have no such scales and biases.
    for (fault, sixteen, eight) in [
        (Fault::OneScale(0.05), 150, 120),
        (Fault::OneScale(0.2), 150, 140),
        (Fault::Scales(0.02), 150, 130),
        (Fault::NextScale, 150, 150),
        (Fault::NoBias, 150, 150),
        (Fault::NextStep, 150, 150),
        (Fault::CutOff, 100, 100),
        (Fault::Coarse(2.0), 0, 5),
        (Fault::Coarse(3.0), 20, 20),
    ] {
        for (rounding, least) in ROUNDINGS.into_iter().zip([sixteen, eight]) {
            let failed = failing(Depth::Rounded(rounding), rounding, fault);
            assert!(failed >= least, "{rounding:?} {fault:?}: {failed}");
        }
    }
}
