//! Bytes that arrive in pieces, as text that never breaks a character.

/// Collects bytes and gives out complete characters.
///
/// Bytes that can never become a character turn into U+FFFD exactly as `String::from_utf8_lossy` does over the whole
/// input: one for each maximal part of a broken sequence. Bytes that may still be completed are held back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Utf8Stream {
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Adds `bytes` and appends every character that is now certain to `out`.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest: &[u8] = &self.pending;
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    out.push_str(std::str::from_utf8(good).unwrap_or_default());
                    match error.error_len() {
                        Some(length) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = bad.get(length..).unwrap_or_default();
                        }
                        None => {
                            rest = bad;
                            break;
                        }
                    }
                }
            }
        }
        let keep = rest.len();
        self.pending.drain(..self.pending.len() - keep);
    }

    /// Ends the stream: an incomplete sequence becomes one U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }

    /// Whether bytes are held back.
    pub(crate) fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_split_equals_lossy_decoding(bytes in prop::collection::vec(any::<u8>(), 0..64), cut in 1usize..7) {
            let mut stream = Utf8Stream::default();
            let mut out = String::new();
            for chunk in bytes.chunks(cut) {
                stream.push(chunk, &mut out);
            }
            stream.finish(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn valid_text_never_shows_a_replacement(text in "\\PC{0,20}", cut in 1usize..4) {
            let mut stream = Utf8Stream::default();
            let mut out = String::new();
            for chunk in text.as_bytes().chunks(cut) {
                stream.push(chunk, &mut out);
                prop_assert!(text.starts_with(&out));
            }
            prop_assert!(!stream.is_pending());
        }
    }
}
