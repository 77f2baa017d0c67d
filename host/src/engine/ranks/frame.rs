//! Messages on a stream: their length in four bytes, then JSON.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Far above any step's arrays; a larger length is garbage.
const CAP_BYTES: usize = 256 << 20;

/// Writes one message.
pub fn write<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let len = bytes.len() - 4;
    if len > CAP_BYTES {
        let text = format!("a message of {len} bytes, at most {CAP_BYTES} are possible");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    if let Some(head) = bytes.first_chunk_mut::<4>() {
        *head = (len as u32).to_le_bytes();
    }
    to.write_all(&bytes)?;
    to.flush()
}

/// Reads one message; none at the end of the stream.
pub fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut head = [0; 4];
    match from.read_exact(&mut head) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let len = u32::from_le_bytes(head) as usize;
    if len > CAP_BYTES {
        let text = format!("a message says it has {len} bytes, at most {CAP_BYTES} are possible");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in(lists in proptest::collection::vec(proptest::collection::vec(any::<i32>(), 0..50), 0..5)) {
            let mut bytes = Vec::new();
            for list in &lists {
                write(&mut bytes, list).unwrap();
            }
            let mut rest = bytes.as_slice();
            for list in &lists {
                prop_assert_eq!(&read::<Vec<i32>>(&mut rest).unwrap().unwrap(), list);
            }
            prop_assert!(read::<Vec<i32>>(&mut rest).unwrap().is_none());
        }
    }

    #[test]
    fn damaged_streams_are_errors() {
        let cut = [5, 0, 0, 0, b'1'];
        assert!(read::<u32>(&mut cut.as_slice()).is_err());
        let huge = [0xff; 8];
        assert!(read::<u32>(&mut huge.as_slice()).is_err());
        let text = [1, 0, 0, 0, b'x'];
        assert!(read::<u32>(&mut text.as_slice()).is_err());
    }
}
