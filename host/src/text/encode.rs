//! Text to ids, with control tokens only where they are meant.
//!
//! **The rule.** A text in which no untrusted part spells a control token is given to the tokenizer whole, so its ids
//! are exactly those of the reference. Only where an untrusted part does spell one is the text cut, after the first
//! character of the spelling; the two halves then cannot be read as the token. The result is checked, because a
//! normalizer may also turn other characters into a spelling (NFKC folds `＜/s＞`), and cut again where needed.

use std::ops::Range;

use super::TextError;
use super::control::Spelling;
use super::guard::guarded;
use super::prompt::Prompt;
use super::tokenizer::{BosRule, Boundary, Tokenizer};

/// Largest text that is encoded: far above any context, and it bounds memory (about 30 bytes per input byte).
const MAX_TEXT_BYTES: usize = 256 << 20;

/// A cut can only reveal another spelling that overlaps the first, so two rounds do in practice.
const MAX_ROUNDS: usize = 8;

/// Who wrote the spellings of control tokens that are not listed as literal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Author {
    Trusted,
    Untrusted,
}

impl Tokenizer {
    /// Encodes text from a person or a file. A spelled control token is encoded as the characters it is made of.
    pub fn encode_text(&self, text: &str, boundary: Boundary) -> Result<Vec<u32>, TextError> {
        let literal: Vec<Range<usize>> = self
            .control()
            .find_in(text)
            .into_iter()
            .map(|s| s.range)
            .collect();
        let body = self.encode_body(text, literal, Author::Untrusted)?;
        Ok(self.framed(body, boundary))
    }

    /// Encodes a rendered chat template: its control tokens are real outside [`Prompt::literal`].
    pub fn encode_template(&self, prompt: &Prompt, bos: BosRule) -> Result<Vec<u32>, TextError> {
        let body = self.encode_body(prompt.text(), prompt.literal().to_vec(), Author::Trusted)?;
        Ok(match bos {
            BosRule::FromTemplate => body,
            BosRule::IfMissing => self.with_prefix(body),
        })
    }

    /// Encodes text whose author may write control tokens: a raw prompt from the operator.
    pub fn encode_markup(&self, text: &str, boundary: Boundary) -> Result<Vec<u32>, TextError> {
        let body = self.encode_body(text, Vec::new(), Author::Trusted)?;
        Ok(self.framed(body, boundary))
    }

    fn framed(&self, body: Vec<u32>, boundary: Boundary) -> Vec<u32> {
        match boundary {
            Boundary::Bare => body,
            Boundary::AsTrained => {
                let mut ids = self.with_prefix(body);
                if !self.inner.suffix.is_empty() && !ids.ends_with(&self.inner.suffix) {
                    ids.extend_from_slice(&self.inner.suffix);
                }
                ids
            }
        }
    }

    fn with_prefix(&self, mut body: Vec<u32>) -> Vec<u32> {
        if !self.inner.prefix.is_empty() && !body.starts_with(&self.inner.prefix) {
            body.splice(0..0, self.inner.prefix.iter().copied());
        }
        body
    }

    fn encode_body(
        &self,
        text: &str,
        literal: Vec<Range<usize>>,
        author: Author,
    ) -> Result<Vec<u32>, TextError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TextError::TooLarge {
                what: "prompt".to_owned(),
                bytes: text.len() as u64,
                limit_bytes: MAX_TEXT_BYTES as u64,
            });
        }
        if literal.is_empty() {
            let ids = self.library_encode(text)?;
            let meant = match author {
                Author::Trusted => self.control().find_in(text),
                Author::Untrusted => Vec::new(),
            };
            if self.is_as_meant(&ids, &meant) {
                return Ok(ids);
            }
        }
        self.encode_cut(text, literal, author)
    }

    /// Whether the control tokens among `ids` are those that were spelled on purpose, in order. The unknown token may
    /// always appear: the model emits it for characters it cannot write.
    fn is_as_meant(&self, ids: &[u32], meant: &[Spelling]) -> bool {
        let mut meant = meant.iter();
        ids.iter()
            .filter(|&&id| self.control().contains(id) && Some(id) != self.inner.unknown_id)
            .all(|id| meant.any(|spelling| spelling.id == *id))
    }

    /// Encodes with cuts inside every literal spelling, adding cuts until no control token is left that was not meant.
    fn encode_cut(
        &self,
        text: &str,
        literal: Vec<Range<usize>>,
        author: Author,
    ) -> Result<Vec<u32>, TextError> {
        let mut literal = literal;
        let mut cuts = Vec::new();
        for _ in 0..MAX_ROUNDS {
            cuts = literal
                .iter()
                .filter_map(|range| cut_inside(text, range))
                .collect();
            cuts.sort_unstable();
            cuts.dedup();
            let (ids, unmeant) = self.encode_pieces(text, &cuts, &literal, author)?;
            if unmeant.is_empty() {
                return Ok(ids);
            }
            for (range, id) in unmeant {
                if cut_inside(text, &range).is_none_or(|cut| cuts.contains(&cut)) {
                    return Err(self.cannot_cut(id));
                }
                literal.push(range);
            }
        }
        let (_, unmeant) = self.encode_pieces(text, &cuts, &literal, author)?;
        Err(self.cannot_cut(unmeant.first().map_or(0, |(_, id)| *id)))
    }

    fn cannot_cut(&self, id: u32) -> TextError {
        TextError::ControlFromText {
            token: self.control().spelling(id).unwrap_or_default().to_owned(),
        }
    }

    /// The ids of the text cut at `cuts`, and the control tokens among them that nobody meant.
    #[expect(
        clippy::type_complexity,
        reason = "two lists that are used at once by the only caller"
    )]
    fn encode_pieces(
        &self,
        text: &str,
        cuts: &[usize],
        literal: &[Range<usize>],
        author: Author,
    ) -> Result<(Vec<u32>, Vec<(Range<usize>, u32)>), TextError> {
        let mut ids = Vec::new();
        let mut unmeant = Vec::new();
        let mut start = 0;
        for &end in cuts.iter().chain([&text.len()]) {
            let piece = text.get(start..end).unwrap_or_default();
            for (id, offsets) in self.encode_piece(piece, start > 0)? {
                if self.control().contains(id) {
                    let range = start + offsets.start..start + offsets.end;
                    if !self.is_meant(text, &range, id, literal, author) {
                        unmeant.push((range, id));
                    }
                }
                ids.push(id);
            }
            start = end;
        }
        Ok((ids, unmeant))
    }

    fn is_meant(
        &self,
        text: &str,
        range: &Range<usize>,
        id: u32,
        literal: &[Range<usize>],
        author: Author,
    ) -> bool {
        let spelling = self.control().spelling(id).unwrap_or_default();
        let slice = text.get(range.clone()).unwrap_or_default();
        if Some(id) == self.inner.unknown_id && slice.trim() != spelling {
            return true;
        }
        // A token may take blanks beside it (`lstrip`, `rstrip`), nothing else.
        author == Author::Trusted
            && slice.trim() == spelling.trim()
            && !literal
                .iter()
                .any(|bad| bad.start < range.end && range.start < bad.end)
    }

    /// Ids with their byte ranges in `piece`. A piece from the middle of a text is encoded behind an anchor, so that
    /// it does not get the blank that some tokenizers put in front of a text.
    fn encode_piece(
        &self,
        piece: &str,
        in_the_middle: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, TextError> {
        if piece.is_empty() {
            return Ok(Vec::new());
        }
        if in_the_middle && self.inner.start_sensitive {
            for anchor in ["\n", ".", "a"] {
                let alone = self.library_encode(anchor)?;
                let both = self.library_encode_ranges(&format!("{anchor}{piece}"))?;
                let is_prefix = both
                    .iter()
                    .map(|(id, _)| *id)
                    .take(alone.len())
                    .eq(alone.iter().copied());
                if is_prefix
                    && both
                        .get(alone.len())
                        .is_some_and(|(_, range)| range.start >= anchor.len())
                {
                    let shifted = both.into_iter().skip(alone.len());
                    return Ok(shifted
                        .map(|(id, range)| {
                            (
                                id,
                                range.start - anchor.len()..range.end.saturating_sub(anchor.len()),
                            )
                        })
                        .collect());
                }
            }
        }
        self.library_encode_ranges(piece)
    }

    fn library_encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        guarded("encode", || {
            Ok(self
                .inner
                .library
                .encode_fast(text, false)?
                .get_ids()
                .to_vec())
        })
    }

    fn library_encode_ranges(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, TextError> {
        guarded("encode", || {
            let encoding = self.inner.library.encode(text, false)?;
            let ranges = encoding
                .get_offsets()
                .iter()
                .map(|&(start, end)| start..end);
            Ok(encoding.get_ids().iter().copied().zip(ranges).collect())
        })
    }
}

/// The place after the first character of `range`, if that is still inside: leading blanks that a token swallowed do
/// not count, as a cut among them would leave the spelling whole.
fn cut_inside(text: &str, range: &Range<usize>) -> Option<usize> {
    let slice = text.get(range.clone())?;
    let blanks = slice.len() - slice.trim_start().len();
    let first = slice.trim_start().chars().next()?;
    let cut = range.start + blanks + first.len_utf8();
    (cut < range.end).then_some(cut)
}
