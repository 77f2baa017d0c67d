//! One token for every row of logits, by sorting them.

use mlxcel_abi::fused_args::{NO_TOKEN, SampleArgs};
use mlxcel_abi::{AbiError, DType, Result, Tensor};

use crate::device::{Device, Value};

/// Numbers of one row, in the order of [`SampleArgs`].
type Numbers = [f64; 5];

impl Device {
    /// Chooses the tokens. With `is_spoilt` the first logit becomes something that is no number.
    pub fn sample(&mut self, args: &SampleArgs, is_spoilt: bool) -> Result<Tensor> {
        let logits = self.arena.get(args.logits)?;
        if is_spoilt {
            logits.spoil();
        }
        let info = logits.info();
        let &[rows, width] = info.shape() else {
            return Err(AbiError::invalid("sample: logits have no rows"));
        };
        let mut columns = Vec::new();
        for t in [
            args.top_k,
            args.top_p,
            args.min_p,
            args.temperature,
            args.uniform,
        ] {
            let column = self.arena.get(t)?;
            if column.info().shape() != [rows] {
                return Err(AbiError::invalid("sample: expected a number for every row"));
            }
            columns.push(column.numbers()?);
        }
        let all = logits.numbers()?;
        let mut bytes = Vec::new();
        for (row, logits) in all.chunks(usize::try_from(width).unwrap_or(1)).enumerate() {
            let mut numbers: Numbers = [0.0; 5];
            for (number, column) in numbers.iter_mut().zip(&columns) {
                *number = column.get(row).copied().unwrap_or(f64::NAN);
            }
            bytes.extend(token(logits, numbers).to_ne_bytes());
        }
        self.arena.insert(Value::owned(DType::U32, &[rows], bytes)?)
    }
}

fn token(logits: &[f64], [top_k, top_p, min_p, temperature, uniform]: Numbers) -> u32 {
    if logits
        .iter()
        .any(|logit| logit.is_nan() || *logit == f64::INFINITY)
    {
        return NO_TOKEN;
    }
    let mut ranked: Vec<(f64, u32)> = logits.iter().copied().zip(0..).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    ranked.truncate(top_k as usize);
    let max = ranked.first().map_or(f64::NEG_INFINITY, |best| best.0);
    if max == f64::NEG_INFINITY {
        return NO_TOKEN;
    }
    let total: f64 = ranked.iter().map(|(logit, _)| (logit - max).exp()).sum();
    let mut sum = 0.0;
    ranked.retain(|(logit, _)| {
        let stays = sum < top_p * total || top_p >= 1.0 || sum == 0.0;
        sum += (logit - max).exp();
        stays && (*logit >= max + min_p.ln())
    });
    let weight = |logit: f64| ((logit - max) / temperature).exp();
    let limit = uniform * ranked.iter().map(|(logit, _)| weight(*logit)).sum::<f64>();
    let mut sum = 0.0;
    let drawn = ranked.iter().find(|(logit, _)| {
        sum += weight(*logit);
        sum > limit
    });
    drawn.map_or(NO_TOKEN, |(_, token)| *token)
}
