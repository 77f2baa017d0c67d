//! Token ids to text, one at a time.
//!
//! The joined output of [`Detokenizer::push`] and [`Detokenizer::finish`] is the text of the whole list. No output ever
//! ends inside a character, and the work for one id does not grow with the length of the answer.
//!
//! One deliberate difference from the reference decoder: bytes that are not UTF-8 become one U+FFFD for each maximal
//! broken part (as `String::from_utf8_lossy`), for byte-fallback tokenizers too. The reference looks at a whole run of
//! byte pieces and replaces *every* byte of it if any is bad, which no stream can do without holding back the run.

use super::piece::{PieceStyle, byte_level_bytes, byte_piece, word_cleanup};
use super::tokenizer::Tokenizer;
use super::utf8::Utf8Stream;

/// What comes before the first id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StreamStart {
    /// Nothing, or a chat header: the blank that SentencePiece puts before the first word is dropped.
    #[default]
    Text,
    /// A prompt that the answer continues in the same sentence: the first blank is part of the text.
    Continuation,
}

/// How a [`Detokenizer`] treats its ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetokenizerOptions {
    /// Leave control tokens out of the text.
    pub skip_control: bool,
    /// What comes before the first id.
    pub start: StreamStart,
}

impl Default for DetokenizerOptions {
    fn default() -> Self {
        DetokenizerOptions {
            skip_control: true,
            start: StreamStart::Text,
        }
    }
}

/// Turns a stream of ids into a stream of text.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    options: DetokenizerOptions,
    bytes: Utf8Stream,
    /// Blanks that may still be dropped at the start.
    strip_left: usize,
    /// Whether no piece has been seen yet.
    first: bool,
    window: Window,
}

impl Detokenizer {
    /// A stream for `tokenizer`.
    pub fn new(tokenizer: &Tokenizer, options: DetokenizerOptions) -> Self {
        let strip_left = match (tokenizer.piece_style(), options.start) {
            (PieceStyle::Sentence { strip_start, .. }, StreamStart::Text) => *strip_start,
            _ => 0,
        };
        Detokenizer {
            tokenizer: tokenizer.clone(),
            options,
            bytes: Utf8Stream::default(),
            strip_left,
            first: options.start == StreamStart::Text,
            window: Window::default(),
        }
    }

    /// Adds one id and returns the text that became certain, which may be empty.
    ///
    /// An id outside the vocabulary (a padded row of the output matrix) adds nothing, as in the reference.
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        if self.options.skip_control && self.tokenizer.control().contains(id) {
            return out;
        }
        if *self.tokenizer.piece_style() == PieceStyle::Window {
            return self.window.push(&self.tokenizer, id);
        }
        let Some(piece) = self.tokenizer.piece(id) else {
            return out;
        };
        let bytes = self.piece_bytes(&piece);
        self.first = false;
        self.bytes.push(&bytes, &mut out);
        self.strip(&mut out);
        out
    }

    /// Ends the stream and returns what was held back. Bytes of an unfinished character become one U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut out = self.window.finish(&self.tokenizer);
        self.bytes.finish(&mut out);
        self.strip(&mut out);
        out
    }

    /// Whether text is held back.
    pub fn is_pending(&self) -> bool {
        self.bytes.is_pending() || self.window.is_pending()
    }

    fn piece_bytes(&self, piece: &str) -> Vec<u8> {
        match self.tokenizer.piece_style() {
            PieceStyle::ByteLevel => byte_level_bytes(piece),
            PieceStyle::Sentence {
                space,
                byte_fallback,
                ..
            } => match byte_piece(piece).filter(|_| *byte_fallback) {
                Some(byte) => vec![byte],
                None => piece.replace(*space, " ").into_bytes(),
            },
            PieceStyle::Metaspace { space, drop_first } => piece
                .replace(*space, if self.first && *drop_first { "" } else { " " })
                .into_bytes(),
            PieceStyle::WordPiece { prefix, cleanup } => {
                let text = match piece.strip_prefix(prefix.as_str()) {
                    _ if self.first => piece.to_owned(),
                    Some(rest) => rest.to_owned(),
                    None => format!(" {piece}"),
                };
                if *cleanup {
                    word_cleanup(&text).into_bytes()
                } else {
                    text.into_bytes()
                }
            }
            PieceStyle::Joined if self.first => piece.as_bytes().to_vec(),
            PieceStyle::Joined => format!(" {piece}").into_bytes(),
            PieceStyle::Window => Vec::new(),
        }
    }

    fn strip(&mut self, out: &mut String) {
        if self.strip_left == 0 || out.is_empty() {
            return;
        }
        let blanks = out
            .bytes()
            .take(self.strip_left)
            .take_while(|&byte| byte == b' ')
            .count();
        // Another character ends the blanks for good.
        self.strip_left = if blanks == out.len() {
            self.strip_left - blanks
        } else {
            0
        };
        out.drain(..blanks);
    }
}

/// Ids kept for decoders that cannot be split by token: the text of the last few ids is decoded again, and what it
/// adds to the text of the same ids without the newest is given out.
#[derive(Debug, Clone, Default)]
struct Window {
    ids: Vec<u32>,
    /// How many of `ids` are already given out.
    settled: usize,
    /// The text of the settled ids.
    prefix: String,
}

/// A window that still ends in U+FFFD after so many ids ends in a real one: bytes of one character are at most four.
const WINDOW_IDS: usize = 16;

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.ids.push(id);
        let text = tokenizer.library_decode(&self.ids);
        let fresh = self.ids.len() - self.settled;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && fresh < WINDOW_IDS {
            return String::new();
        }
        let out = text
            .get(common_prefix(&self.prefix, &text)..)
            .unwrap_or_default()
            .to_owned();
        self.ids.drain(..self.settled);
        self.settled = self.ids.len();
        self.prefix = tokenizer.library_decode(&self.ids);
        out
    }

    fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        if !self.is_pending() {
            return String::new();
        }
        let text = tokenizer.library_decode(&self.ids);
        let out = text
            .get(common_prefix(&self.prefix, &text)..)
            .unwrap_or_default()
            .to_owned();
        *self = Window::default();
        out
    }

    fn is_pending(&self) -> bool {
        self.ids.len() > self.settled
    }
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.chars()
        .zip(b.chars())
        .take_while(|(x, y)| x == y)
        .map(|(x, _)| x.len_utf8())
        .sum()
}
