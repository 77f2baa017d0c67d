//! One page of the prefix cache, or the recurrent states at its end, as a file.
//!
//! `magic, version, part, page_tokens, n_tokens, payload_len, fingerprint, namespace, tokens, payload, SHA-256 of all
//! before`, numbers little-endian. The tokens are those of the whole way to the page's end, so that a file is right or
//! wrong by comparison and never by its name alone.

use sha2::{Digest, Sha256};

/// Any digest here.
pub type Digest32 = [u8; 32];

const MAGIC: &[u8; 8] = b"mlxcelkv";

/// Goes up with every change of the layout; files of another version are deleted.
const VERSION: u32 = 2;

/// Bytes in front of the tokens.
pub const HEADER_LEN: usize = 104;

const DIGEST_LEN: usize = 32;

/// What of the caches is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// What is kept of every position: keys, values, index keys.
    Page,
    /// Recurrent states behind the last of the tokens.
    States,
}

impl Part {
    fn code(self) -> u32 {
        match self {
            Self::Page => 0,
            Self::States => 1,
        }
    }
}

/// What a file is about: model, tenant, tokens, and which part.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Model, plugins and layout.
    pub fingerprint: &'a Digest32,
    /// The tenant.
    pub namespace: &'a Digest32,
    /// All tokens up to the end of the page.
    pub tokens: &'a [u32],
    /// Positions of a page.
    pub page_tokens: usize,
    /// Which of the caches.
    pub part: Part,
}

impl Subject<'_> {
    fn header(&self, payload_len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_LEN);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.part.code().to_le_bytes());
        bytes.extend_from_slice(&(self.page_tokens as u64).to_le_bytes());
        bytes.extend_from_slice(&(self.tokens.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(payload_len as u64).to_le_bytes());
        bytes.extend_from_slice(self.fingerprint);
        bytes.extend_from_slice(self.namespace);
        bytes
    }

    /// The file with this payload.
    pub fn encode(&self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = self.header(payload.len());
        bytes.reserve(self.tokens.len() * 4 + payload.len() + DIGEST_LEN);
        for token in self.tokens {
            bytes.extend_from_slice(&token.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        let digest: Digest32 = Sha256::digest(&bytes).into();
        bytes.extend_from_slice(&digest);
        bytes
    }

    /// The payload of a file that is about this and whole.
    pub fn decode(&self, mut file: Vec<u8>, payload_len: usize) -> Option<Vec<u8>> {
        let begin = HEADER_LEN + self.tokens.len() * 4;
        let end = begin.checked_add(payload_len)?;
        if file.len() != end + DIGEST_LEN || file.get(..HEADER_LEN)? != self.header(payload_len) {
            return None;
        }
        let tokens = file.get(HEADER_LEN..begin)?.chunks_exact(4);
        let is_same = tokens
            .zip(self.tokens)
            .all(|(bytes, token)| *bytes == token.to_le_bytes());
        let digest: Digest32 = Sha256::digest(file.get(..end)?).into();
        if !is_same || file.get(end..)? != digest {
            return None;
        }
        file.truncate(end);
        file.drain(..begin);
        Some(file)
    }
}

/// Whether a file that begins so and is so long can be a page of this version; if so, its fingerprint.
pub fn peek(header: &[u8; HEADER_LEN], file_len: u64) -> Option<Digest32> {
    let number = |at: usize| {
        let bytes = header.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_le_bytes(bytes))
    };
    let is_ours = header.starts_with(MAGIC) && header.get(8..12)? == VERSION.to_le_bytes();
    let tokens = number(24)?.checked_mul(4)?;
    let expected = tokens
        .checked_add(number(32)?)?
        .checked_add((HEADER_LEN + DIGEST_LEN) as u64)?;
    if !is_ours || expected != file_len {
        return None;
    }
    header.get(40..72)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SUBJECT: Subject<'_> = Subject {
        fingerprint: &[7; 32],
        namespace: &[9; 32],
        tokens: &[1, 2, 3, 4],
        page_tokens: 4,
        part: Part::Page,
    };

    #[test]
    fn a_file_gives_back_what_was_put_in_and_to_nobody_else() {
        let file = SUBJECT.encode(b"payload");
        assert_eq!(SUBJECT.decode(file.clone(), 7).unwrap(), b"payload");
        let header: [u8; HEADER_LEN] = file[..HEADER_LEN].try_into().unwrap();
        assert_eq!(peek(&header, file.len() as u64), Some([7; 32]));
        for other in [
            Subject {
                fingerprint: &[8; 32],
                ..SUBJECT
            },
            Subject {
                namespace: &[8; 32],
                ..SUBJECT
            },
            Subject {
                tokens: &[1, 2, 3, 5],
                ..SUBJECT
            },
            Subject {
                tokens: &[1, 2, 3],
                ..SUBJECT
            },
            Subject {
                page_tokens: 2,
                ..SUBJECT
            },
            Subject {
                part: Part::States,
                ..SUBJECT
            },
        ] {
            assert_eq!(other.decode(file.clone(), 7), None);
        }
        assert_eq!(SUBJECT.decode(file, 6), None);
    }

    proptest! {
        #[test]
        fn no_change_of_a_file_goes_unseen(at in 0usize..200, bit in 0u8..8, cut in 0usize..150) {
            let file = SUBJECT.encode(b"payload");
            let mut changed = file.clone();
            let at = at % changed.len();
            changed[at] ^= 1 << bit;
            prop_assert_eq!(SUBJECT.decode(changed, 7), None);
            let short = file[..cut.min(file.len() - 1)].to_vec();
            if let Some(header) = short.first_chunk::<HEADER_LEN>() {
                prop_assert_eq!(peek(header, short.len() as u64), None);
            }
            prop_assert_eq!(SUBJECT.decode(short, 7), None);
            let mut long = file;
            long.push(0);
            prop_assert_eq!(SUBJECT.decode(long, 7), None);
        }
    }
}
