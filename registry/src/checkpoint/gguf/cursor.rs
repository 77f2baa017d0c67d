//! Reads little-endian values one after the other and says where the bytes ran out.

use std::fmt::Display;
use std::ops::Range;

use super::error::GgufError;

/// A position in the file.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    /// Byte that is read next.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Steps over `len` bytes and says where they are.
    pub(super) fn skip(&mut self, len: u64, what: impl Display) -> Result<Range<usize>, GgufError> {
        let left = self.bytes.len() - self.at;
        match usize::try_from(len) {
            Ok(len) if len <= left => {
                let range = self.at..self.at + len;
                self.at = range.end;
                Ok(range)
            }
            _ => Err(GgufError::Truncated {
                what: what.to_string(),
                at: self.at,
                needed: len,
                left,
            }),
        }
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        what: impl Display,
    ) -> Result<[u8; N], GgufError> {
        let range = self.skip(N as u64, what)?;
        let chunk = self
            .bytes
            .get(range)
            .and_then(|bytes| bytes.first_chunk::<N>());
        Ok(chunk.copied().unwrap_or([0; N]))
    }

    pub(super) fn u32(&mut self, what: impl Display) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: impl Display) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length and that many bytes; says where the bytes are.
    pub(super) fn string(
        &mut self,
        limit: u64,
        what: impl Display,
    ) -> Result<Range<usize>, GgufError> {
        let len = self.u64(&what)?;
        if len > limit {
            let what = format!("the length of {what}");
            return Err(GgufError::Limit {
                what,
                found: len,
                limit,
            });
        }
        self.skip(len, what)
    }

    /// A string that must be UTF-8.
    pub(super) fn text(&mut self, limit: u64, what: impl Display) -> Result<&'a str, GgufError> {
        let range = self.string(limit, &what)?;
        let bytes = self.bytes.get(range).unwrap_or(&[]);
        std::str::from_utf8(bytes).map_err(|_| GgufError::Utf8 {
            what: what.to_string(),
        })
    }
}
