//! What one token id contributes to the text: the tokenizer's decoder read as data.
//!
//! `tokenizers` decodes a whole list at a time. Streaming needs the contribution of each id on its own, so the decoder
//! is recognised by shape here. Shapes that do not split by token fall back to [`PieceStyle::Window`].

use serde_json::Value;

/// How ids become bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PieceStyle {
    /// Byte-level BPE: every character of a piece stands for one byte.
    ByteLevel,
    /// SentencePiece: `space` stands for a blank, `<0xAB>` may stand for a byte.
    Sentence {
        /// The character that stands for a blank, U+2581.
        space: char,
        /// Whether `<0xAB>` pieces are bytes.
        byte_fallback: bool,
        /// Blanks to drop at the start of the text.
        strip_start: usize,
    },
    /// Metaspace decoder: as `Sentence`, and the first piece loses its `space` characters if `drop_first`.
    Metaspace {
        /// The character that stands for a blank.
        space: char,
        /// Whether the first piece's blanks were put there by the encoder.
        drop_first: bool,
    },
    /// WordPiece: pieces are separated by blanks unless they continue a word.
    WordPiece {
        /// The mark of a continuing piece, usually `##`.
        prefix: String,
        /// Whether blanks before punctuation are removed.
        cleanup: bool,
    },
    /// No decoder: the pieces joined by blanks.
    Joined,
    /// Any other decoder: decode a short window again and again.
    Window,
}

impl PieceStyle {
    /// Recognises the `decoder` object of a `tokenizer.json`.
    pub(crate) fn recognise(decoder: &Value) -> Self {
        match kind(decoder) {
            None => PieceStyle::Joined,
            Some("ByteLevel") => PieceStyle::ByteLevel,
            Some("Metaspace") => metaspace(decoder).unwrap_or(PieceStyle::Window),
            Some("WordPiece") => PieceStyle::WordPiece {
                prefix: decoder
                    .get("prefix")
                    .and_then(Value::as_str)
                    .unwrap_or("##")
                    .to_owned(),
                cleanup: decoder
                    .get("cleanup")
                    .and_then(Value::as_bool)
                    .unwrap_or(true),
            },
            Some("Sequence") => {
                let steps: &[Value] = decoder
                    .get("decoders")
                    .and_then(Value::as_array)
                    .map_or(&[], Vec::as_slice);
                match steps {
                    [only] => PieceStyle::recognise(only),
                    _ => sentence(steps).unwrap_or(PieceStyle::Window),
                }
            }
            Some(_) => PieceStyle::Window,
        }
    }
}

fn kind(value: &Value) -> Option<&str> {
    value.get("type").and_then(Value::as_str)
}

fn metaspace(decoder: &Value) -> Option<PieceStyle> {
    let mut characters = decoder.get("replacement")?.as_str()?.chars();
    let space = characters.next().filter(|_| characters.next().is_none())?;
    let drop_first = decoder.get("prepend_scheme").and_then(Value::as_str) != Some("never");
    Some(PieceStyle::Metaspace { space, drop_first })
}

/// `Replace(space -> " ")`, then optionally `ByteFallback`, `Fuse` and `Strip` from the left, in this order.
fn sentence(steps: &[Value]) -> Option<PieceStyle> {
    let mut steps = steps.iter().peekable();
    let replace = steps.next().filter(|step| kind(step) == Some("Replace"))?;
    if replace.get("content")?.as_str()? != " " {
        return None;
    }
    let mut characters = replace.get("pattern")?.get("String")?.as_str()?.chars();
    let space = characters.next().filter(|_| characters.next().is_none())?;
    let byte_fallback = steps
        .next_if(|step| kind(step) == Some("ByteFallback"))
        .is_some();
    let fused = steps.next_if(|step| kind(step) == Some("Fuse")).is_some();
    let mut strip_start = 0;
    if let Some(strip) = steps.next_if(|step| kind(step) == Some("Strip")) {
        // Without `Fuse` the strip is applied to every piece, which is another decoder altogether.
        let left_only = strip.get("stop").and_then(Value::as_u64) == Some(0);
        if !fused || !left_only || strip.get("content").and_then(Value::as_str) != Some(" ") {
            return None;
        }
        strip_start = usize::try_from(strip.get("start")?.as_u64()?).ok()?;
    }
    steps.next().is_none().then_some(PieceStyle::Sentence {
        space,
        byte_fallback,
        strip_start,
    })
}

/// The byte of a `<0xAB>` piece.
pub(crate) fn byte_piece(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The bytes of a byte-level piece. A piece with a character outside the byte alphabet is an added token and stands
/// for itself, as in the reference decoder.
pub(crate) fn byte_level_bytes(piece: &str) -> Vec<u8> {
    piece
        .chars()
        .map(byte_of)
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| piece.as_bytes().to_vec())
}

/// GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 are moved to U+0100 and up in order.
pub(crate) fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    let printable = |code: u32| matches!(code, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match code {
        _ if printable(code) => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The blanks that the WordPiece decoder removes before punctuation and in English contractions.
pub(crate) fn word_cleanup(piece: &str) -> String {
    const RULES: [(&str, &str); 11] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" do not", " don't"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    RULES
        .iter()
        .fold(piece.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                assert!(!seen[usize::from(byte)], "byte {byte} twice");
                seen[usize::from(byte)] = true;
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(byte_level_bytes("Ġhé"), [b' ', b'h', 0xe9]);
        assert_eq!(byte_level_bytes("｜x"), "｜x".as_bytes());
    }

    #[test]
    fn decoders_are_recognised_by_shape() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(
            PieceStyle::recognise(&llama),
            PieceStyle::Sentence {
                space: '▁',
                byte_fallback: true,
                strip_start: 1
            }
        );
        let gemma = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]});
        assert_eq!(
            PieceStyle::recognise(&gemma),
            PieceStyle::Sentence {
                space: '▁',
                byte_fallback: true,
                strip_start: 0
            }
        );
        let per_piece_strip = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(PieceStyle::recognise(&per_piece_strip), PieceStyle::Window);
        assert_eq!(
            PieceStyle::recognise(&json!({"type": "ByteLevel"})),
            PieceStyle::ByteLevel
        );
        assert_eq!(PieceStyle::recognise(&Value::Null), PieceStyle::Joined);
        assert_eq!(
            PieceStyle::recognise(&json!({"type": "CTC"})),
            PieceStyle::Window
        );
        assert_eq!(
            PieceStyle::recognise(
                &json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})
            ),
            PieceStyle::Metaspace {
                space: '▁',
                drop_first: true
            }
        );
    }

    #[test]
    fn byte_pieces() {
        assert_eq!(byte_piece("<0x0A>"), Some(10));
        assert_eq!(byte_piece("<0xGG>"), None);
        assert_eq!(byte_piece("<0x0A0>"), None);
    }
}
