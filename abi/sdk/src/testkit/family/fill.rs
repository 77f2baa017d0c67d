//! Random weights for a configuration: which tensors a family asks for, and numbers for them.

use mlxcel_abi::{DType, status};

use super::model::{LoadedModel, source_of};
use super::{FamilyUnderTest, MapWeights};
use crate::testkit::conformance::array::{Array, Numbers};
use crate::testkit::{ReferenceOptions, reference_backend};
use crate::{Error, Result};

/// Most tensors that are looked for.
const MOST_TENSORS: usize = 20_000;

/// Finds the tensors that loading needs, starting from those in `weights`: a load over shapes alone
/// names the next missing one with its shape.
pub(super) fn discover(
    family: &FamilyUnderTest,
    weights: &mut MapWeights,
    dtype: DType,
) -> Result<()> {
    let reference = reference_backend(ReferenceOptions {
        shapes_only: true,
        ..ReferenceOptions::default()
    });
    let backend = reference.backend();
    for _ in 0..MOST_TENSORS {
        let Err(error) = LoadedModel::load(family, weights, &backend, dtype) else {
            return Ok(());
        };
        let missing = source_of(&error).filter(|source| source.code == status::NOT_FOUND);
        let Some((name, shape)) = missing.and_then(|source| missing_tensor(&source.message)) else {
            return Err(error);
        };
        if weights.info(&name).is_some() {
            return Err(Error::Other(format!(
                "\"{name}\" is said to be missing and is there: {error}"
            )));
        }
        weights.declare(&name, DType::F32, &shape);
    }
    Err(Error::Other(format!(
        "the model asks for more than {MOST_TENSORS} tensors"
    )))
}

/// Name and shape out of the SDK's text for a missing tensor.
fn missing_tensor(text: &str) -> Option<(String, Vec<i64>)> {
    let (_, rest) = text.split_once("tensor \"")?;
    let (name, rest) = rest.split_once("\" is missing")?;
    let (_, rest) = rest.split_once("(expected shape [")?;
    let (dims, _) = rest.split_once("])")?;
    let dims = dims
        .split(", ")
        .map(|dim| dim.parse().ok().filter(|&dim: &i64| dim > 0));
    Some((name.to_owned(), dims.collect::<Option<_>>()?))
}

/// Gives numbers to every tensor without data. The rule is that of `tests/golden/tools`: norms near
/// 1, biases near 0, embeddings and heads of 0.5, other matrices of 1.5 / sqrt(columns).
pub(super) fn fill(weights: &mut MapWeights, salt: u64) -> Result<()> {
    let names: Vec<String> = weights.names().map(str::to_owned).collect();
    for name in names {
        let Some((dtype, shape)) = weights.undecided(&name) else {
            continue;
        };
        let numbers = normals(salt, &name);
        let columns = shape.last().copied().unwrap_or(1).max(1) as f64;
        let (centre, size) = match shape.len() {
            0 | 1 if name.contains("norm") => (1.0, 0.1),
            0 | 1 => (0.0, 0.1),
            _ if name.contains("embed") || name.contains("head") => (0.0, 0.5),
            _ => (0.0, 1.5 / columns.sqrt()),
        };
        let array = Array::of(dtype, &shape, numbers.map(|z| centre + size * z));
        weights.insert_array(&name, &array)?;
    }
    Ok(())
}

/// Standard normal numbers of their own for every name (Box and Muller 1958).
fn normals(salt: u64, name: &str) -> impl Iterator<Item = f64> {
    // FNV-1a: any spread of the names will do.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut numbers = Numbers::new(hash ^ salt.rotate_left(32));
    core::iter::from_fn(move || {
        let (u, v) = (1.0 - numbers.unit(), numbers.unit());
        Some((-2.0 * u.ln()).sqrt() * (core::f64::consts::TAU * v).cos())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_for_a_missing_tensor_is_understood() {
        let error = Error::MissingTensor {
            name: "a.b".to_owned(),
            expected: format!("{:?}", [3, 4]),
        };
        assert_eq!(
            missing_tensor(&error.to_string()),
            Some(("a.b".to_owned(), vec![3, 4]))
        );
        assert_eq!(
            missing_tensor("tensor \"a\" is missing from the checkpoint (expected shape [-1, 2])"),
            None
        );
        assert_eq!(missing_tensor("something else"), None);
    }

    #[test]
    fn numbers_depend_on_name_and_salt_alone() {
        let first = |salt, name| normals(salt, name).next().unwrap();
        assert_eq!(first(1, "a"), first(1, "a"));
        assert!(first(1, "a") != first(1, "b") && first(1, "a") != first(2, "a"));
        let mean = normals(1, "a").take(2000).sum::<f64>() / 2000.0;
        assert!(mean.abs() < 0.1, "{mean}");
    }
}
