//! Python methods on values that the engine's own compatibility layer lacks or does otherwise.

use minijinja::value::{Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Answers method calls on built-in values.
pub(super) fn unknown_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let found = match value.kind() {
        ValueKind::String => {
            string_method(state, value.as_str().unwrap_or_default(), method, args)?
        }
        ValueKind::Map if method == "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        ValueKind::Seq => list_method(value, method, args)?,
        _ => None,
    };
    match found {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn string_method(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(args)?;
            let drop =
                |c: char| characters.map_or_else(|| is_python_space(c), |set| set.contains(c));
            Value::from(match method {
                "strip" => text.trim_matches(drop),
                "lstrip" => text.trim_start_matches(drop),
                _ => text.trim_end_matches(drop),
            })
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            partition(text, separator, method == "rpartition")?
        }
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            rsplit(text, separator, limit)?
        }
        "split"
            if args
                .first()
                .is_some_and(|separator| separator.as_str() == Some("")) =>
        {
            return Err(invalid("split: the separator is empty"));
        }
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            Value::from_iter(split_lines(text, keep_ends.unwrap_or(false)))
        }
        "index" | "rindex" => {
            let (needle,): (&str,) = from_args(args)?;
            let at = if method == "index" {
                text.find(needle)
            } else {
                text.rfind(needle)
            };
            let at = at.ok_or_else(|| invalid("substring not found"))?;
            Value::from(text.get(..at).unwrap_or_default().chars().count())
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(state, text, method, args)?,
        "swapcase" => {
            let () = from_args(args)?;
            Value::from(text.chars().map(swap_case).collect::<String>())
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        "isdecimal" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit()))
        }
        _ => return Ok(None),
    }))
}

fn list_method(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "index" => {
            let (needle,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *needle);
            Value::from(at.ok_or_else(|| invalid(format!("{needle} is not in list")))?)
        }
        "copy" => {
            let () = from_args(args)?;
            value.clone()
        }
        _ => return Ok(None),
    }))
}

fn partition(text: &str, separator: &str, from_right: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(invalid("partition: the separator is empty"));
    }
    let split = if from_right {
        text.rsplit_once(separator)
    } else {
        text.split_once(separator)
    };
    let parts = match split {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

fn rsplit(text: &str, separator: Option<&str>, limit: Option<i64>) -> Result<Value, Error> {
    if separator == Some("") {
        return Err(invalid("rsplit: the separator is empty"));
    }
    let limit = limit.and_then(|limit| usize::try_from(limit).ok());
    let mut parts: Vec<&str> = match (separator, limit) {
        (Some(separator), None) => text.rsplit(separator).collect(),
        (Some(separator), Some(limit)) => {
            text.rsplitn(limit.saturating_add(1), separator).collect()
        }
        (None, None) => text.split_whitespace().rev().collect(),
        (None, Some(limit)) => {
            let mut parts = Vec::new();
            let mut rest = text.trim_end();
            while !rest.is_empty() && parts.len() < limit {
                let at = rest
                    .rfind(char::is_whitespace)
                    .map_or(0, |at| at + rest.get(at..).map_or(0, first_len));
                parts.push(rest.get(at..).unwrap_or_default());
                rest = rest.get(..at).unwrap_or_default().trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest.trim_start());
            }
            parts
        }
    };
    parts.reverse();
    Ok(Value::from_iter(parts))
}

fn first_len(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

/// Python's line ends: more than `\n`, and `\r\n` is one.
fn split_lines(text: &str, keep_ends: bool) -> Vec<Value> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_end) {
        let after = rest.get(at..).unwrap_or_default();
        let length = if after.starts_with("\r\n") {
            2
        } else {
            first_len(after)
        };
        let cut = if keep_ends { at + length } else { at };
        lines.push(Value::from(rest.get(..cut).unwrap_or_default()));
        rest = rest.get(at + length..).unwrap_or_default();
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    lines
}

fn pad(state: &State<'_, '_>, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<char>) = from_args(args)?;
    let length = text.chars().count();
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(length);
    // The result is paid for before it exists: a template must not fill the memory with one call.
    state.consume_fuel((missing / 16) as u64)?;
    let fill = if method == "zfill" {
        '0'
    } else {
        fill.unwrap_or(' ')
    };
    let run = |count: usize| fill.to_string().repeat(count);
    Ok(Value::from(match method {
        "ljust" => format!("{text}{}", run(missing)),
        "rjust" => format!("{}{text}", run(missing)),
        "zfill" => {
            let (sign, digits) = match text.strip_prefix(['-', '+']) {
                Some(digits) => text.split_at(text.len() - digits.len()),
                None => ("", text),
            };
            format!("{sign}{}{digits}", run(missing))
        }
        _ => {
            // CPython puts the odd blank to the left if both the gap and the width are odd.
            let left = missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1);
            format!("{}{text}{}", run(left), run(missing - left))
        }
    }))
}

fn swap_case(c: char) -> String {
    if c.is_uppercase() {
        c.to_lowercase().collect()
    } else {
        c.to_uppercase().collect()
    }
}

/// `str.isspace`: Unicode white space and the four separators of ASCII.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

fn invalid(detail: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}
