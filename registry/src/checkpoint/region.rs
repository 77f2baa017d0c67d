//! Memory for tensors that live as long as a model: regions on large pages, handed out piece by piece.
//!
//! A decode step reads every weight once. With pages of 4 KiB a processor spends a third of that time
//! on looking up pages; Linux backs aligned stretches of 2 MiB by one page where it is asked to.
//! Single tensors are often smaller than that, hence the regions. The second place of this crate with
//! `unsafe`, beside the maps of files.

use std::sync::{Arc, Mutex, PoisonError};

use memmap2::MmapMut;

/// Size and alignment of a large page on the processors we know.
const LARGE_PAGE: usize = 2 << 20;

/// Bytes of a region; pages that nobody writes are not resident.
const REGION: usize = 64 << 20;

/// Alignment of pieces: a cache line, enough for every vector load.
const ALIGN: usize = 64;

/// No piece starts at a multiple of this. A library that keeps a size in front of its buffers takes foreign memory
/// without a copy only where the bytes before it lie on the same page.
const PAGE: usize = 4096;

/// One anonymous map, given back when its last piece is dropped.
struct Region {
    /// First byte of the first whole large page.
    first: *mut u8,
    _map: MmapMut,
}

// SAFETY: the pointer is to the map's own memory, of which every byte belongs to at most one piece.
unsafe impl Send for Region {}
// SAFETY: as above; a region itself is never read or written.
unsafe impl Sync for Region {}

/// A region with bytes left.
struct Open {
    region: Arc<Region>,
    used: usize,
    len: usize,
}

static OPEN: Mutex<Option<Open>> = Mutex::new(None);

/// Zeroed bytes of a region, aligned to 64.
pub(super) struct Piece {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

impl Piece {
    /// `len` zeros; `None` when the system has no such map to give.
    pub(super) fn zeroed(len: usize) -> Option<Self> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |open: &Open| open.len.saturating_sub(open.next()) >= len;
        if len > REGION / 4 {
            // A region of its own, so that no large rest of the open one is left behind.
            return Some(Open::new(len.checked_add(ALIGN)?)?.take(len));
        }
        if !open.as_ref().is_some_and(fits) {
            *open = Some(Open::new(REGION)?);
        }
        open.as_mut().map(|open| open.take(len))
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: inside the map, initialised (an anonymous map is zeros), and only this piece has
        // these bytes, which it does not lend for writing meanwhile.
        unsafe { std::slice::from_raw_parts(self.region.first.add(self.start), self.len) }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.region.first.add(self.start), self.len) }
    }
}

impl Open {
    fn new(len: usize) -> Option<Self> {
        let mut map = MmapMut::map_anon(len.checked_add(LARGE_PAGE)?).ok()?;
        // A hint: without it the pages are small.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let skip = map.as_ptr().addr().wrapping_neg() % LARGE_PAGE;
        let first = map.as_mut_ptr().wrapping_add(skip);
        Some(Open {
            region: Arc::new(Region { first, _map: map }),
            used: 0,
            len,
        })
    }

    /// Where the next piece starts.
    fn next(&self) -> usize {
        match self.used.is_multiple_of(PAGE) {
            true => self.used + ALIGN,
            false => self.used,
        }
    }

    /// The next `len` bytes, which the caller knows to be there.
    fn take(&mut self, len: usize) -> Piece {
        let start = self.next();
        self.used = (start + len).next_multiple_of(ALIGN).min(self.len);
        Piece {
            region: Arc::clone(&self.region),
            start,
            len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_aligned_and_apart() {
        let mut pieces: Vec<Piece> = [1, 100, 64, 5000, REGION / 4, REGION, 0, 7]
            .into_iter()
            .map(|len| Piece::zeroed(len).unwrap())
            .collect();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert!(piece.as_slice().iter().all(|byte| *byte == 0));
            assert!(piece.as_slice().as_ptr().addr().is_multiple_of(ALIGN));
            assert!(!piece.as_slice().as_ptr().addr().is_multiple_of(PAGE));
            piece.as_mut_slice().fill(i as u8 + 1);
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.as_slice().iter().all(|byte| *byte == i as u8 + 1));
        }
    }

    #[test]
    fn threads_get_bytes_of_their_own() {
        let threads: Vec<_> = (0..4u8)
            .map(|i| {
                std::thread::spawn(move || {
                    let mut pieces: Vec<Piece> =
                        (0..50).map(|n| Piece::zeroed(1000 + n).unwrap()).collect();
                    pieces
                        .iter_mut()
                        .for_each(|piece| piece.as_mut_slice().fill(i));
                    pieces
                        .iter()
                        .all(|piece| piece.as_slice().iter().all(|byte| *byte == i))
                })
            })
            .collect();
        assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
    }
}
