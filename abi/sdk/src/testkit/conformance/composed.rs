//! Fused operations against their composition from simple ones: what the SDK composes when a
//! backend lacks them, and what a backend would compose itself.

use mlxcel_abi::DType;

use super::FLOATS;
use super::array::Array;
use super::attention::{Inputs, NEAR};
use super::paging::scenes;
use super::suite::Suite;
use super::{norms, quantization};
use crate::backend::Fused;
use crate::{Backend, DenseAttention, Result, Tensor};

pub(super) fn run(suite: &mut Suite<'_>) {
    composing(suite, &[Fused::RmsNorm, Fused::LayerNorm], |suite| {
        norms::norms(suite, ", composed")
    });
    composing(suite, &[Fused::Rope], |suite| {
        norms::rotations(suite, ", composed")
    });
    composing(suite, &[Fused::Glu], |suite| {
        norms::gates(suite, ", composed")
    });
    composing(
        suite,
        &[Fused::GatherQuantizedMatmul],
        quantization::composed,
    );
    attention(suite);
    for dtype in FLOATS {
        for scene in scenes(dtype) {
            suite.check_against(
                "paged_attention",
                format!("{}, composed", scene.name()),
                NEAR,
                |b| scene.composed(b),
                |b| scene.fused(b),
            );
        }
    }
}

/// Runs cases while the subject's backend composes some operations.
fn composing(suite: &mut Suite<'_>, which: &[Fused], cases: impl FnOnce(&mut Suite<'_>)) {
    let subject = suite.subject.clone();
    which
        .iter()
        .for_each(|&one| subject.set_composed(one, true));
    cases(suite);
    which
        .iter()
        .for_each(|&one| subject.set_composed(one, false));
}

/// Attention from products and a softmax.
fn attention(suite: &mut Suite<'_>) {
    let sizes = [2, 4, 2, 3, 7, 32, 16];
    for dtype in FLOATS {
        let inputs = Inputs::new(dtype, sizes);
        let options = |causal, softcap| DenseAttention {
            scale: 0.2,
            softcap,
            causal,
            ..DenseAttention::default()
        };
        for (causal, softcap) in [(false, 0.0), (true, 0.0), (false, 3.0)] {
            suite.check_against(
                "attention",
                format!("{} causal {causal} cap {softcap}, composed", dtype.name()),
                NEAR,
                |b| Ok(vec![from_products(b, &inputs, causal, softcap)?]),
                |b| {
                    let (q, k, v) = (inputs.q.on(b)?, inputs.k.on(b)?, inputs.v.on(b)?);
                    Ok(vec![q.attention(&k, &v, &options(causal, softcap))?])
                },
            );
        }
    }
}

fn from_products(b: &Backend, inputs: &Inputs, causal: bool, softcap: f32) -> Result<Tensor> {
    let (q, k, v) = (inputs.q.on(b)?, inputs.k.on(b)?, inputs.v.on(b)?);
    let group = q.dim(1)? / k.dim(1)?;
    let (k, v) = (k.repeat(group, 1)?, v.repeat(group, 1)?);
    let mut scores = q.matmul(&k.t()?)?.cast(DType::F32)?.mul_scalar(0.2)?;
    if softcap > 0.0 {
        scores = scores
            .div_scalar(softcap.into())?
            .tanh()?
            .mul_scalar(softcap.into())?;
    }
    if causal {
        let (tq, tk) = (q.dim(2)?, k.dim(2)?);
        let visible = (0..tq * tk).map(|i| f64::from(u8::from(i % tk <= i / tk + tk - tq)));
        let visible = Array::of(DType::BOOL, &[tq, tk], visible).on(b)?;
        let never = Tensor::full(b, f64::NEG_INFINITY, DType::F32, &[])?;
        scores = visible.select(&scores, &never)?;
    }
    scores.softmax(-1)?.cast(q.dtype()?)?.matmul(&v)
}
