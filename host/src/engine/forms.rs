//! In which forms a backend takes the tensors of a checkpoint.

use serde_json::Value;

use mlxcel_registry::checkpoint::{CentredForm, Checkpoint};

use crate::plugin::{DType, SelectedBackend};

use super::detect::OpenedModel;
use super::error::EngineError;

/// The checkpoint with tensors in the centred forms that the backend takes; none where it stays as it is. Backends
/// say so of f32 activations alone.
pub fn checkpoint_for(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    activations: DType,
) -> Result<Option<Checkpoint>, EngineError> {
    let forms = match activations {
        DType::F32 => listed(selected.report.details.get("centred_forms")),
        _ => Vec::new(),
    };
    Ok(opened.checkpoint.with_centred(&forms)?)
}

/// What is not a form is one of a later time.
fn listed(value: Option<&Value>) -> Vec<CentredForm> {
    let entries = value.and_then(Value::as_array).into_iter().flatten();
    let number = |entry: &Value, key: &str| u32::try_from(entry.get(key)?.as_u64()?).ok();
    let form = |entry: &Value| {
        Some(CentredForm {
            bits: number(entry, "bits")?,
            group_size: number(entry, "group_size")?,
        })
    };
    entries.filter_map(form).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn forms_are_read_and_others_left_out() {
        let found = listed(Some(&json!([
            {"bits": 6, "group_size": 16},
            {"bits": -1, "group_size": 16},
            {"bits": 4},
            "q6",
        ])));
        let form = CentredForm {
            bits: 6,
            group_size: 16,
        };
        assert_eq!(found, [form]);
        assert_eq!(listed(Some(&json!({"bits": 6}))), []);
        assert_eq!(listed(None), []);
    }
}
