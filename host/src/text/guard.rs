//! The edge to the `tokenizers` crate: its panics on hostile files become errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::TextError;

/// Runs `body`, turning both a library error and a panic into a [`TextError`].
///
/// Nothing that `body` may leave half-changed is used afterwards: callers either build a new object or only read.
pub(crate) fn guarded<T>(
    stage: &'static str,
    body: impl FnOnce() -> Result<T, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<T, TextError> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(TextError::Tokenizers {
            stage,
            detail: plain_words(&error.to_string()),
        }),
        Err(payload) => Err(TextError::Panicked {
            stage,
            detail: message(payload.as_ref()),
        }),
    }
}

/// The parts of `tokenizer.json` by the names that the library has for what they may be.
const PARTS: [(&str, &str); 5] = [
    ("ModelWrapper", "model"),
    ("NormalizerWrapper", "normalizer"),
    ("PreTokenizerWrapper", "pre_tokenizer"),
    ("PostProcessorWrapper", "post_processor"),
    ("DecoderWrapper", "decoder"),
];

/// A reader's message without the names of types of a program.
pub(super) fn plain_words(message: &str) -> String {
    let none_fits = "data did not match any variant of untagged enum ";
    if let Some((before, rest)) = message.split_once(none_fits) {
        let end = rest.find(' ').unwrap_or(rest.len());
        let (name, place) = rest.split_at(end);
        let part = PARTS.iter().find(|(wrapper, _)| *wrapper == name);
        let part = part.map_or("a part", |(_, part)| part);
        return format!("{before}{part} is of no known kind or lacks what its kind needs{place}");
    }
    let mut words = Vec::new();
    let mut all = message.split(' ').peekable();
    while let Some(word) = all.next() {
        let is_name = |next: &&str| next.starts_with(|c: char| c.is_ascii_uppercase());
        match (word, all.next_if(is_name)) {
            ("struct", Some(_)) => words.extend(["an", "object"]),
            ("enum" | "variant", Some(_)) => words.extend(["a", "known", "name"]),
            (word, next) => {
                words.push(word);
                words.extend(next);
            }
        }
    }
    words.join(" ")
}

fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "no message".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::plain_words;

    #[test]
    fn names_of_types_are_left_out() {
        let said = [
            "data did not match any variant of untagged enum ModelWrapper at line 1 column 90",
            "data did not match any variant of untagged enum Other",
            "invalid type: integer `7`, expected struct Shell at line 1 column 1",
            "unknown variant `x`, expected a List of names",
        ]
        .map(plain_words);
        insta::assert_snapshot!(said.join("\n"), @r"
        model is of no known kind or lacks what its kind needs at line 1 column 90
        a part is of no known kind or lacks what its kind needs
        invalid type: integer `7`, expected an object at line 1 column 1
        unknown variant `x`, expected a List of names
        ");
    }
}
