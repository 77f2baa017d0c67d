//! What a family says of a checkpoint that does not fit: the tensor, in full, and nothing leaks.

use mlxcel_abi::DType;

use super::model::LoadedModel;
use super::{FamilyUnderTest, MapWeights};
use crate::testkit::{ReferenceOptions, reference_backend};

type Checked = core::result::Result<(), String>;

/// Loads over shapes alone; gives the error's text, or none when loading succeeded.
fn refusal(
    family: &FamilyUnderTest,
    weights: &MapWeights,
) -> core::result::Result<Option<String>, String> {
    let reference = reference_backend(ReferenceOptions {
        shapes_only: true,
        ..ReferenceOptions::default()
    });
    let outcome = LoadedModel::load(family, weights, &reference.backend(), DType::F32);
    let text = outcome.err().map(|error| error.to_string());
    match reference.statistics().live_tensors {
        0 => Ok(text),
        live => Err(format!(
            "{live} handle(s) live after a load that ended with {text:?}"
        )),
    }
}

fn must_name(family: &FamilyUnderTest, weights: &MapWeights, name: &str, what: &str) -> Checked {
    match refusal(family, weights)? {
        None => Err(format!("\"{name}\" {what} and loading succeeded")),
        Some(text) if text.contains(name) => Ok(()),
        Some(text) => Err(format!(
            "\"{name}\" {what} and the error does not name it: {text}"
        )),
    }
}

fn names(family: &FamilyUnderTest) -> Vec<String> {
    family.weights.names().map(str::to_owned).collect()
}

pub(super) fn missing(family: &FamilyUnderTest) -> Checked {
    for name in names(family) {
        if family.optional.contains(&name) {
            continue;
        }
        let mut weights = family.weights.clone();
        weights.remove(&name);
        // Without its scales a module counts as not quantised, so it is the weight that does not fit.
        let told = name
            .strip_suffix(".scales")
            .or(name.strip_suffix(".biases"))
            .unwrap_or(&name);
        must_name(family, &weights, told, "is missing")?;
    }
    Ok(())
}

pub(super) fn misshapen(family: &FamilyUnderTest) -> Checked {
    for name in names(family) {
        let Some((dtype, shape)) = family.weights.info(&name) else {
            continue;
        };
        let (dtype, shape) = (dtype, shape.to_vec());
        let mut longer = shape.clone();
        if let Some(last) = longer.last_mut() {
            *last += 1;
        }
        let deeper = [&[1], shape.as_slice()].concat();
        for wrong in [longer, deeper] {
            let mut weights = family.weights.clone();
            weights.declare(&name, dtype, &wrong);
            let told = name
                .strip_suffix(".scales")
                .or(name.strip_suffix(".biases"))
                .unwrap_or(&name);
            must_name(
                family,
                &weights,
                told,
                &format!("has shape {wrong:?} instead of {shape:?}"),
            )?;
        }
    }
    Ok(())
}

pub(super) fn extra(family: &FamilyUnderTest) -> Checked {
    let mut weights = family.weights.clone();
    let name = "model.of_no_use.weight";
    weights.declare(name, DType::F32, &[2, 2]);
    must_name(family, &weights, name, "is more than the model asks for")
}
