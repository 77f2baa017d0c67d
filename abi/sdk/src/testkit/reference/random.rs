//! Random draws from explicit keys.
//!
//! Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
//! 3"). The same key gives the same values; other backends may give other values.

use core::f64::consts::TAU;

use mlxcel_abi::kinds::random as kind;
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{need_float, next_below, round_float};
use super::shape;
use super::value::{Data, Mode, Value};

const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];

fn threefry(key: [u32; 2], counter: [u32; 2]) -> [u32; 2] {
    let keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1bd1_1bda];
    let mut x = [
        counter[0].wrapping_add(keys[0]),
        counter[1].wrapping_add(keys[1]),
    ];
    for group in 0..5u32 {
        for rotation in ROTATIONS[group as usize % 2] {
            x[0] = x[0].wrapping_add(x[1]);
            x[1] = x[1].rotate_left(rotation) ^ x[0];
        }
        let next = group as usize + 1;
        x[0] = x[0].wrapping_add(keys[next % 3]);
        x[1] = x[1]
            .wrapping_add(keys[(next + 1) % 3])
            .wrapping_add(next as u32);
    }
    x
}

/// `count` words of the stream of `key`.
fn bits(key: [u32; 2], count: usize) -> Vec<u32> {
    let mut out = Vec::with_capacity(count + 1);
    for block in 0..count.div_ceil(2) as u64 {
        out.extend(threefry(key, [block as u32, (block >> 32) as u32]));
    }
    out.truncate(count);
    out
}

/// Uniform numbers in the open interval (0, 1).
fn units(key: [u32; 2], count: usize) -> impl Iterator<Item = f64> {
    bits(key, count)
        .into_iter()
        .map(|word| (f64::from(word) + 0.5) / 4_294_967_296.0)
}

fn key_of(key: &Value) -> Result<[u32; 2]> {
    need_key(key)?;
    match key.ints()? {
        &[a, b] => Ok([a as u32, b as u32]),
        _ => Err(AbiError::internal("a key has two words")),
    }
}

fn need_key(key: &Value) -> Result<()> {
    if key.dtype != DType::U32 {
        return Err(AbiError::invalid(format!(
            "a random key must be u32, found {}",
            key.dtype.name()
        )));
    }
    shape::need("a random key", &key.shape, &[2])
}

/// Key from a seed.
pub(super) fn key(mode: Mode, seed: u64) -> Result<Value> {
    mode.value(DType::U32, vec![2], || {
        Ok(Data::Int(vec![(seed >> 32).into(), (seed as u32).into()]))
    })
}

/// `n` independent keys from one.
pub(super) fn split(mode: Mode, key: &Value, n: i64) -> Result<Value> {
    need_key(key)?;
    let out = shape::from_dims(&[n, 2])?;
    mode.value(DType::U32, out, || {
        // A stream of its own, so that splitting and drawing from one key differ.
        let [a, b] = threefry(key_of(key)?, [u32::MAX, u32::MAX]);
        Ok(Data::Int(
            bits([a, b], 2 * n as usize)
                .into_iter()
                .map(i128::from)
                .collect(),
        ))
    })
}

/// What to draw.
pub(super) struct Draw<'a> {
    pub kind: u32,
    pub dtype: DType,
    pub key: &'a Value,
    pub dims: &'a [i64],
    pub a: f64,
    pub b: f64,
    pub logits: Option<&'a Value>,
}

/// One of [`mlxcel_abi::kinds::random`].
pub(super) fn random(mode: Mode, draw: &Draw<'_>) -> Result<Value> {
    need_key(draw.key)?;
    let dtype = match draw.kind {
        kind::BITS => DType::U32,
        kind::BERNOULLI => DType::BOOL,
        kind::CATEGORICAL => return categorical(mode, draw),
        kind::UNIFORM | kind::NORMAL | kind::GUMBEL => {
            need_float("the result", draw.dtype)?;
            draw.dtype
        }
        code => {
            return Err(AbiError::unimplemented(format!(
                "random draw {code} is not known to this backend"
            )));
        }
    };
    let out = shape::from_dims(draw.dims)?;
    let count = shape::count(&out)?;
    let (a, b) = (draw.a, draw.b);
    mode.value(dtype, out, || {
        let key = key_of(draw.key)?;
        Ok(match draw.kind {
            kind::BITS => Data::Int(bits(key, count).into_iter().map(i128::from).collect()),
            kind::BERNOULLI => Data::Int(units(key, count).map(|u| i128::from(u < a)).collect()),
            kind::UNIFORM => Data::Real(
                units(key, count)
                    .map(|u| {
                        let x = round_float(dtype, a + u * (b - a));
                        if x < b || a >= b {
                            x
                        } else {
                            next_below(dtype, b)
                        }
                    })
                    .collect(),
            ),
            kind::NORMAL => Data::Real(normals(key, count).map(|z| a + z * b).collect()),
            _ => Data::Real(units(key, count).map(|u| -(-u.ln()).ln()).collect()),
        })
    })
}

/// Standard normal numbers (Box and Muller 1958).
fn normals(key: [u32; 2], count: usize) -> impl Iterator<Item = f64> {
    let units: Vec<f64> = units(key, 2 * count).collect();
    (0..count).map(move |i| (-2.0 * units[2 * i].ln()).sqrt() * (TAU * units[2 * i + 1]).cos())
}

/// One index per row of logits: the largest of the logits with Gumbel noise.
fn categorical(mode: Mode, draw: &Draw<'_>) -> Result<Value> {
    let Some(logits) = draw.logits else {
        return Err(AbiError::invalid("categorical draws need logits"));
    };
    need_float("logits", logits.dtype)?;
    let classes = logits.last_dim();
    if logits.shape.is_empty() || classes == 0 {
        return Err(AbiError::invalid(format!(
            "logits of shape {:?} have no classes",
            logits.shape
        )));
    }
    let out = logits.shape[..logits.shape.len() - 1].to_vec();
    mode.value(DType::U32, out, || {
        let noise: Vec<f64> = units(key_of(draw.key)?, logits.count())
            .map(|u| -(-u.ln()).ln())
            .collect();
        let noisy: Vec<f64> = logits
            .reals()
            .iter()
            .zip(noise)
            .map(|(x, g)| x + g)
            .collect();
        Ok(Data::Int(
            noisy
                .chunks_exact(classes)
                .map(|row| {
                    (1..classes).fold(0, |best, i| if row[i] > row[best] { i } else { best })
                        as i128
                })
                .collect(),
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threefry_gives_the_published_values() {
        // Known answers of the Random123 distribution for threefry2x32-20.
        assert_eq!(threefry([0, 0], [0, 0]), [0x6b20_0159, 0x99ba_4efe]);
        assert_eq!(
            threefry([u32::MAX; 2], [u32::MAX; 2]),
            [0x1cb9_96fc, 0xbb00_2be7]
        );
        assert_eq!(
            threefry([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3]),
            [0xc492_3a9c, 0x483d_f7a0]
        );
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let z: Vec<f64> = normals([7, 9], 4000).collect();
        let mean = z.iter().sum::<f64>() / 4000.0;
        let variance = z.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 4000.0;
        assert!(
            mean.abs() < 0.06 && (variance - 1.0).abs() < 0.1,
            "{mean} {variance}"
        );
    }
}
