//! Values that namespaces may keep: plain data of bounded depth (see `syntax`).

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// JSON from a request is at most 128 deep.
const MAX_DEPTH: usize = 160;

/// Copies the containers of `value`. Lazy sequences become lists, so that they cannot pile up on each other either,
/// and a namespace becomes a mapping.
pub(super) fn plain_data(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    copy(state, value, 0)
}

fn copy(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<Value, Error> {
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(value.clone());
    }
    if depth >= MAX_DEPTH {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "value is nested too deeply for a namespace",
        ));
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        state.consume_fuel(1)?;
        items.push(item);
    }
    if kind == ValueKind::Map {
        let pairs = items.into_iter().map(|key| {
            let item = copy(state, &value.get_item(&key)?, depth + 1)?;
            Ok((key, item))
        });
        return Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?));
    }
    let items = items
        .iter()
        .map(|item| copy(state, item, depth + 1))
        .collect::<Result<Vec<_>, Error>>()?;
    Ok(if value.is_tuple() {
        Value::from(Tuple::from(items))
    } else {
        Value::from(items)
    })
}
