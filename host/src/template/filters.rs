//! Filters and tests where the engine differs from Jinja2.

use minijinja::value::{Rest, StringInput, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind};

use super::arguments::Arguments;
use super::tojson::tojson;

/// Adds them to `env`.
pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter("tojson", tojson);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("wordcount", |text: &str| text.split_whitespace().count());
    env.add_filter("truncate", truncate);
    env.add_filter("striptags", minijinja_contrib::filters::striptags);
    env.add_filter("filesizeformat", minijinja_contrib::filters::filesizeformat);
    // Jinja2 asks for a length and an index: strings and mappings have both.
    env.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::String | ValueKind::Map
        )
    });
    env.add_test("iterable", |value: &Value| match value.kind() {
        ValueKind::None => false,
        ValueKind::Undefined => true,
        _ => value.try_iter().is_ok(),
    });
    env.add_test("callable", is_callable);
}

/// `int(default=0, base=10)`: anything that is not a number gives the default instead of an error.
fn int(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args, 2)?;
    let default = args.get(0, "default")?.unwrap_or_else(|| Value::from(0));
    let base = match args.get(1, "base")? {
        None => 10,
        Some(base) => base
            .as_usize()
            .and_then(|base| u32::try_from(base).ok())
            .filter(|base| (2..=36).contains(base))
            .ok_or_else(|| invalid(format!("int: base is {base}, expected 2 to 36")))?,
    };
    args.finish()?;
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Number => f64::try_from(value.clone()).map_or(default, whole),
        ValueKind::String => parse_int(value.as_str().unwrap_or_default(), base).unwrap_or(default),
        _ => default,
    })
}

fn parse_int(text: &str, base: u32) -> Option<Value> {
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        16 => ["0x", "0X"],
        8 => ["0o", "0O"],
        2 => ["0b", "0B"],
        _ => ["", ""],
    };
    let digits = prefix
        .iter()
        .find_map(|prefix| digits.strip_prefix(prefix))
        .unwrap_or(digits);
    if let Ok(number) = i128::from_str_radix(&digits.replace('_', ""), base) {
        return Some(Value::from(if negative { -number } else { number }));
    }
    // Jinja2 falls back to `int(float(value))`.
    text.parse::<f64>()
        .ok()
        .filter(|number| number.is_finite())
        .map(whole)
}

fn whole(number: f64) -> Value {
    // `as` saturates, which is all that can be done with a number this large.
    Value::from(number.trunc() as i128)
}

/// `float(default=0.0)`.
fn float(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args, 1)?;
    let default = args.get(0, "default")?.unwrap_or_else(|| Value::from(0.0));
    args.finish()?;
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).map_or(default, Value::from),
        ValueKind::String => value
            .as_str()
            .unwrap_or_default()
            .trim()
            .parse::<f64>()
            .map_or(default, Value::from),
        _ => default,
    })
}

/// `truncate(length=255, killwords=false, end="...", leeway=5)`.
fn truncate(text: StringInput<'_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args, 4)?;
    let count = |index, name, otherwise: usize| {
        Ok::<usize, Error>(
            args.get(index, name)?
                .and_then(|value| value.as_usize())
                .unwrap_or(otherwise),
        )
    };
    let length = count(0, "length", 255)?;
    let kill_words = args.flag(1, "killwords")?;
    let end = args
        .get(2, "end")?
        .map_or_else(|| "...".to_owned(), |end| end.to_string());
    let leeway = count(3, "leeway", 5)?;
    args.finish()?;
    let end_length = end.chars().count();
    if length < end_length {
        return Err(invalid(format!(
            "truncate: length is {length}, expected at least {end_length}"
        )));
    }
    let characters: Vec<char> = text.as_str().chars().collect();
    if characters.len() <= length.saturating_add(leeway) {
        return Ok(Value::from(text.as_str()));
    }
    let mut kept: String = characters.iter().take(length - end_length).collect();
    if !kill_words {
        kept.truncate(kept.rfind(' ').unwrap_or(kept.len()));
    }
    Ok(Value::from(kept + &end))
}

/// Only functions and macros can be called; both are plain objects to the engine.
fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
}

fn invalid(detail: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}
