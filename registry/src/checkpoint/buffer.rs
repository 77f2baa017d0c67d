//! Bytes of a tensor: a range of a mapped file, or an aligned buffer of our own.
//!
//! Owns alignment and sharing. Must not know where the values came from.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::dtype::DType;
use super::map::MappedFile;
use super::region::Piece;

/// Alignment of owned buffers: a cache line, enough for every vector load.
const ALIGN: usize = 64;

/// A buffer whose first byte is aligned to 64. Not `Clone`: a copied vector has another address.
pub struct AlignedBuffer(Memory);

enum Memory {
    Heap {
        raw: Vec<u8>,
        start: usize,
        len: usize,
    },
    Region(Piece),
}

impl AlignedBuffer {
    /// A buffer of zeros.
    pub fn zeroed(len: usize) -> Self {
        let raw = vec![0u8; len.saturating_add(ALIGN)];
        // The vector is never resized, so its address, and with it this offset, stays.
        let start = raw.as_ptr().addr().wrapping_neg() % ALIGN;
        AlignedBuffer(Memory::Heap { raw, start, len })
    }

    /// A buffer of zeros for what stays as long as the model: on large pages, where there are some.
    /// Its memory is given back when all of the same region are dropped.
    pub fn lasting(len: usize) -> Self {
        match Piece::zeroed(len) {
            Some(piece) => AlignedBuffer(Memory::Region(piece)),
            None => AlignedBuffer::zeroed(len),
        }
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = AlignedBuffer::zeroed(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        buffer
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Memory::Heap { raw, start, len } => raw.get(*start..start + len).unwrap_or(&[]),
            Memory::Region(piece) => piece.as_slice(),
        }
    }

    /// The bytes, to be filled.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Heap { raw, start, len } => {
                raw.get_mut(*start..*start + *len).unwrap_or(&mut [])
            }
            Memory::Region(piece) => piece.as_mut_slice(),
        }
    }
}

#[derive(Clone)]
enum Storage {
    Mapped {
        file: Arc<MappedFile>,
        range: Range<usize>,
    },
    // The buffer was moved, not reallocated, so its alignment holds.
    Owned(Arc<AlignedBuffer>),
}

/// Shared, immutable bytes. Cloning copies no bytes; the file stays mapped while a clone lives.
#[derive(Clone)]
pub struct TensorBytes(Storage);

impl TensorBytes {
    /// A range of a mapped file, copied only when its address is not a multiple of `align`.
    ///
    /// `None` when the range is not inside the file.
    pub fn from_file(file: &Arc<MappedFile>, range: Range<usize>, align: usize) -> Option<Self> {
        let bytes = file.bytes().get(range.clone())?;
        if bytes.as_ptr().addr().is_multiple_of(align) {
            Some(TensorBytes(Storage::Mapped {
                file: Arc::clone(file),
                range,
            }))
        } else {
            Some(TensorBytes(Storage::Owned(Arc::new(
                AlignedBuffer::copy_of(bytes),
            ))))
        }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Storage::Mapped { file, range } => file.bytes().get(range.clone()).unwrap_or(&[]),
            Storage::Owned(buffer) => buffer.as_slice(),
        }
    }

    /// Whether these are pages of the checkpoint file, not memory of our own.
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Storage::Mapped { .. })
    }
}

impl From<AlignedBuffer> for TensorBytes {
    fn from(buffer: AlignedBuffer) -> Self {
        TensorBytes(Storage::Owned(Arc::new(buffer)))
    }
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for TensorBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_mapped() { "mapped" } else { "owned" };
        write!(f, "TensorBytes({kind}, {} bytes)", self.as_slice().len())
    }
}

/// A loaded tensor. The first byte is aligned to the element type.
#[derive(Debug, Clone)]
pub struct TensorData {
    /// Element type of `bytes`.
    pub dtype: DType,
    /// Row-major shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Little-endian values, `shape` times the element size long.
    pub bytes: TensorBytes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_buffers_are_aligned() {
        for len in [0, 1, 3, 64, 1000] {
            let buffer = AlignedBuffer::zeroed(len);
            assert_eq!(buffer.as_slice().len(), len);
            assert_eq!(AlignedBuffer::lasting(len).as_slice(), buffer.as_slice());
            let bytes = TensorBytes::from(buffer);
            assert!(len == 0 || bytes.as_ptr().addr().is_multiple_of(64));
        }
    }

    #[test]
    fn clones_keep_alignment() {
        let bytes = TensorBytes::from(AlignedBuffer::copy_of(&[1, 2, 3, 4, 5]));
        assert_eq!(&bytes.clone()[..], &[1, 2, 3, 4, 5]);
    }

    #[test]
    fn only_unaligned_ranges_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, (0u8..32).collect::<Vec<_>>()).unwrap();
        let file = Arc::new(MappedFile::open(&path).unwrap());

        let aligned = TensorBytes::from_file(&file, 8..16, 8).unwrap();
        assert!(aligned.is_mapped());
        assert_eq!(aligned[0], 8);

        let copied = TensorBytes::from_file(&file, 9..17, 4).unwrap();
        assert!(!copied.is_mapped());
        assert_eq!(&copied[..], &(9u8..17).collect::<Vec<_>>()[..]);

        assert!(TensorBytes::from_file(&file, 30..40, 1).is_none());
    }
}
