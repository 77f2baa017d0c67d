//! `tojson` as Python's `json.dumps(x, ensure_ascii=False)`: what the templates' authors saw.
//!
//! The engine's own filter escapes HTML characters and prints numbers as JavaScript does.

use std::fmt::Write as _;

use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, State};

use super::arguments::Arguments;

/// Deeper values than any schema; protects the stack.
const MAX_DEPTH: usize = 128;

/// Wider indentation than anybody writes; one call must not fill the memory.
const MAX_INDENT: i64 = 64;

/// Layout options of `json.dumps`.
struct Dump<'a> {
    state: &'a State<'a, 'a>,
    ensure_ascii: bool,
    sort_keys: bool,
    /// One level of indentation, or nothing for a single line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    out: String,
    /// How much of `out` is paid for.
    charged: usize,
}

/// The filter, with the positional order of `transformers`' own.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let args = Arguments::new(args, 4)?;
    let ensure_ascii = args.flag(0, "ensure_ascii")?;
    let indent = args
        .get(1, "indent")?
        .map(|value| indent_unit(&value))
        .transpose()?;
    let (item_separator, key_separator) = match args.get(2, "separators")? {
        Some(pair) => read_separators(&pair)?,
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let sort_keys = args.flag(3, "sort_keys")?;
    args.finish()?;
    let mut dump = Dump {
        state,
        ensure_ascii,
        sort_keys,
        indent,
        item_separator,
        key_separator,
        out: String::new(),
        charged: 0,
    };
    dump.value(value, 0)?;
    Ok(Value::from(dump.out))
}

fn indent_unit(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let width = value
        .as_i64()
        .ok_or_else(|| invalid("tojson: indent must be a number or a string"))?;
    if width > MAX_INDENT {
        return Err(invalid(format!(
            "tojson: indent is {width}, the limit is {MAX_INDENT}"
        )));
    }
    // Python takes a negative width as none, with line breaks all the same.
    Ok(" ".repeat(usize::try_from(width).unwrap_or(0)))
}

fn read_separators(pair: &Value) -> Result<(String, String), Error> {
    let wrong = || invalid("tojson: separators must be two strings");
    let parts: Vec<Value> = pair.try_iter().map_err(|_| wrong())?.take(3).collect();
    match parts.as_slice() {
        [item, key] => {
            let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(wrong);
            Ok((text(item)?, text(key)?))
        }
        _ => Err(wrong()),
    }
}

impl Dump<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container('[', ']', items.len(), depth, |dump, index| {
                    items
                        .get(index)
                        .map_or(Ok(()), |item| dump.value(item, depth + 1))
                })?;
            }
            ValueKind::Map => self.map(value, depth)?,
            _ => {
                return Err(invalid(format!(
                    "tojson: a value of type {} has no JSON form",
                    value.kind()
                )));
            }
        }
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            let text = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                ValueKind::None => "null".to_owned(),
                ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
                ValueKind::Number => number(&key),
                other => {
                    return Err(invalid(format!(
                        "tojson: a key of type {other} has no JSON form"
                    )));
                }
            };
            entries.push((text, value.get_item(&key)?));
        }
        if self.sort_keys {
            entries.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.container('{', '}', entries.len(), depth, |dump, index| {
            let Some((key, item)) = entries.get(index) else {
                return Ok(());
            };
            dump.string(key);
            let separator = dump.key_separator.clone();
            dump.out.push_str(&separator);
            dump.value(item, depth + 1)
        })
    }

    fn container(
        &mut self,
        open: char,
        close: char,
        count: usize,
        depth: usize,
        mut item: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for index in 0..count {
            if index > 0 {
                let separator = self.item_separator.clone();
                self.out.push_str(&separator);
            }
            self.line(depth + 1);
            item(self, index)?;
        }
        if count > 0 {
            self.line(depth);
        }
        self.out.push(close);
        // One fuel pays for 64 bytes, as for text that the engine itself makes.
        let fresh = self.out.len() - self.charged;
        self.charged = self.out.len();
        self.state.consume_fuel((fresh / 64) as u64)
    }

    fn line(&mut self, depth: usize) {
        if let Some(unit) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&unit.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                control if control < ' ' => self.escape(control),
                plain if plain.is_ascii() && plain != '\u{7f}' => self.out.push(plain),
                wide if self.ensure_ascii => self.escape(wide),
                wide => self.out.push(wide),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

/// A number as Python's `repr` writes it.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(number) => python_float(number),
        Err(_) => value.to_string(),
    }
}

/// `repr(float)`: shortest digits, exponent form below 1e-4 and from 1e16 on.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let text = number.to_string();
    if text.contains('.') {
        text
    } else {
        format!("{text}.0")
    }
}

fn invalid(detail: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (number, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-10, "1.5e-10"),
            (-0.0, "-0.0"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(number), expected);
        }
    }
}
