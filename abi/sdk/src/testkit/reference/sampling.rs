//! One token for every row of logits, by sorting all of it.

use mlxcel_abi::fused_args::{MAX_TOP_K, NO_TOKEN, SampleArgs};
use mlxcel_abi::{AbiError, DType, Result, Tensor};

use super::edge::slots;
use super::inner::Inner;
use super::value::{Data, Value};

slots! {
    fn sample(inner, args: *const SampleArgs, out: *mut Tensor) {
        let args = SampleArgs::read(args)?;
        inner.give(out, tokens(inner, &args)?)
    }
}

/// Numbers of one row.
#[derive(Debug)]
struct Draw {
    top_k: i128,
    top_p: f64,
    min_p: f64,
    temperature: f64,
    uniform: f64,
}

fn tokens(inner: &Inner, args: &SampleArgs) -> Result<Value> {
    let logits = inner.get(args.logits)?;
    let &[rows, vocabulary] = logits.shape.as_slice() else {
        return Err(AbiError::invalid(format!(
            "sample: logits have the shape {:?}, expected [rows, vocabulary]",
            logits.shape
        )));
    };
    if !logits.dtype.is_float() || vocabulary == 0 {
        return Err(AbiError::invalid(format!(
            "sample: logits are {} {:?}, expected floats and a vocabulary",
            logits.dtype.name(),
            logits.shape
        )));
    }
    let column = |name: &str, t: Tensor, dtype: DType| {
        let value = inner.get(t)?;
        if value.shape == [rows] && value.dtype == dtype {
            return Ok(value);
        }
        Err(AbiError::invalid(format!(
            "sample: {name} is {} {:?}, expected {} [{rows}]",
            value.dtype.name(),
            value.shape,
            dtype.name()
        )))
    };
    let top_k = column("top_k", args.top_k, DType::I32)?;
    let real = |name, t| column(name, t, DType::F32);
    let (top_p, min_p) = (real("top_p", args.top_p)?, real("min_p", args.min_p)?);
    let temperature = real("temperature", args.temperature)?;
    let uniform = real("uniform", args.uniform)?;
    inner.mode.value(DType::U32, vec![rows], || {
        let numbers = logits.reals();
        let tokens = numbers
            .chunks_exact(vocabulary)
            .enumerate()
            .map(|(row, logits)| {
                let draw = Draw {
                    top_k: top_k.ints()?[row],
                    top_p: top_p.reals()[row],
                    min_p: min_p.reals()[row],
                    temperature: temperature.reals()[row],
                    uniform: uniform.reals()[row],
                };
                draw.check(row)?;
                Ok(i128::from(draw.token(logits)))
            });
        Ok(Data::Int(tokens.collect::<Result<_>>()?))
    })
}

impl Draw {
    fn check(&self, row: usize) -> Result<()> {
        let fits = (1..=i128::from(MAX_TOP_K)).contains(&self.top_k)
            && (0.0..=1.0).contains(&self.top_p)
            && (0.0..=1.0).contains(&self.min_p)
            && self.temperature > 0.0
            && (0.0..1.0).contains(&self.uniform);
        if fits {
            return Ok(());
        }
        Err(AbiError::invalid(format!(
            "sample: row {row} has a number out of its range: {self:?}"
        )))
    }

    fn token(&self, logits: &[f64]) -> u32 {
        if logits
            .iter()
            .any(|logit| logit.is_nan() || *logit == f64::INFINITY)
        {
            return NO_TOKEN;
        }
        let mut ranked: Vec<(f64, u32)> = logits.iter().copied().zip(0..).collect();
        ranked.retain(|(logit, _)| *logit > f64::NEG_INFINITY);
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        ranked.truncate(self.top_k as usize);
        let Some(&(max, _)) = ranked.first() else {
            return NO_TOKEN;
        };
        if self.top_p < 1.0 {
            let weights = ranked.iter().map(|(logit, _)| (logit - max).exp());
            let total: f64 = weights.clone().sum();
            let mut sum = 0.0;
            let before = weights.take_while(|weight| {
                let is_before = sum < self.top_p * total;
                sum += weight;
                is_before
            });
            let kept = before.count();
            ranked.truncate(kept.max(1));
        }
        if self.min_p > 0.0 {
            ranked.retain(|(logit, _)| *logit >= max + self.min_p.ln());
        }
        let weight = |logit: f64| ((logit - max) / self.temperature).exp();
        let total: f64 = ranked.iter().map(|(logit, _)| weight(*logit)).sum();
        let mut sum = 0.0;
        let drawn = ranked.iter().find(|(logit, _)| {
            sum += weight(*logit);
            sum > self.uniform * total
        });
        drawn.map_or(NO_TOKEN, |(_, token)| *token)
    }
}
