//! What another rank writes to stderr, passed on by whole lines: several ranks and this process share one stderr.

use std::io::{self, BufRead, BufReader, Read, Write};

/// A longer line is passed on as several.
const LINE_BYTES: u64 = 64 << 10;

/// Passes on what `from` gives until it ends. Each line is one call of `to`, which stderr does not interleave with others.
pub(super) fn pass_on(from: impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        if from
            .by_ref()
            .take(LINE_BYTES)
            .read_until(b'\n', &mut line)?
            == 0
        {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            // The last words of one that died, or too long: what comes next is of another line.
            line.push(b'\n');
        }
        to.write_all(&line)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// As a pipe: every read gives what one write put there.
    struct Pipe(VecDeque<Vec<u8>>);

    impl Read for Pipe {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Some(mut part) = self.0.pop_front() else {
                return Ok(0);
            };
            let count = part.len().min(buffer.len());
            buffer[..count].copy_from_slice(&part[..count]);
            let rest = part.split_off(count);
            if !rest.is_empty() {
                self.0.push_front(rest);
            }
            Ok(count)
        }
    }

    /// Keeps every call.
    #[derive(Default)]
    struct Calls(Vec<Vec<u8>>);

    impl Write for Calls {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.push(text.to_vec());
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn calls(parts: &[&[u8]]) -> Vec<Vec<u8>> {
        let pipe = Pipe(parts.iter().map(|part| part.to_vec()).collect());
        let mut calls = Calls::default();
        pass_on(pipe, &mut calls).unwrap();
        calls.0
    }

    #[test]
    fn lines_are_whole_however_they_come_and_the_last_needs_no_end() {
        let found = calls(&[b"lost ra", b"nk 2\nand", b" more\n\n", b"no\xff end"]);
        let expected = [&b"lost rank 2\n"[..], b"and more\n", b"\n", b"no\xff end\n"];
        assert_eq!(found, expected);
        assert!(calls(&[]).is_empty());
    }

    #[test]
    fn a_line_that_does_not_end_is_not_held_for_ever() {
        let most = LINE_BYTES as usize;
        let long = vec![b'x'; 2 * most + 3];
        let found = calls(&[&long, b"\nnext\n"]);
        let lengths: Vec<usize> = found.iter().map(Vec::len).collect();
        assert_eq!(lengths, [most + 1, most + 1, 4, 5]);
    }
}
