//! Where things are in a window: the memory of a rank that all of them write to.

/// Threads of a block of `sum_small`, each with a packet of 16 bytes for 8 bytes of elements, and its blocks at most: on two H200 the
/// packets of 4 blocks are there after 3.2 us and those of 16 after 48, since all who wait for them read all the time. `sum_large`
/// takes 8.6 us for 512 KB.
pub(crate) const SMALL_THREADS: usize = 256;
const SMALL_BLOCKS: usize = 8;
const PACKET_BYTES: usize = 16;
/// Blocks of `sum_large` at most: no more than large devices run at once.
const LARGE_BLOCKS: usize = 128;
/// Bytes that a block of it takes at a time.
const LARGE_BYTES: usize = 32 << 10;
/// Things begin at multiples of this.
const ALIGNMENT: usize = 256;
/// The driver shares memory in pieces of this.
const SHARED_BYTES: usize = 2 << 20;

/// Ranks that a launch can have.
pub(crate) const MOST_RANKS: usize = 8;

/// A window for so many ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
}

/// Which kernel adds, and its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Small { blocks: u32 },
    Large { blocks: u32 },
}

impl Layout {
    /// Units of 16 bytes that a rank adds at a time in a block of `sum_large`.
    fn large_units(self) -> usize {
        LARGE_BYTES / 16 / self.ranks
    }

    /// Where the parts begin, in order, and where the last ends: packets, parts and sums of `sum_large`, what it says, and how often
    /// blocks of both have met.
    fn places(self) -> [usize; 7] {
        // By turns, in the two halves of each.
        let packets = 2 * SMALL_BLOCKS * self.ranks * SMALL_THREADS * PACKET_BYTES;
        let half = 2 * LARGE_BLOCKS * self.ranks * self.large_units() * 16;
        let said = LARGE_BLOCKS * 2 * self.ranks * size_of::<u32>();
        let sizes = [
            packets,
            half,
            half,
            said,
            SMALL_BLOCKS * size_of::<u32>(),
            LARGE_BLOCKS * size_of::<u32>(),
        ];
        let mut places = [0; 7];
        let mut at = 0;
        for (i, size) in sizes.into_iter().enumerate() {
            at += usize::next_multiple_of(size, ALIGNMENT);
            if let Some(place) = places.get_mut(i + 1) {
                *place = at;
            }
        }
        places
    }

    /// Size of a window.
    pub(crate) fn bytes(self) -> usize {
        let [.., end] = self.places();
        end.next_multiple_of(SHARED_BYTES)
    }

    /// What the kernels are compiled with.
    pub(crate) fn defines(self) -> Vec<String> {
        let [_, parts, sums, said, small, large, _] = self.places();
        vec![
            format!("RANKS={}", self.ranks),
            format!("SMALL_THREADS={SMALL_THREADS}"),
            format!("SMALL_BLOCKS={SMALL_BLOCKS}"),
            format!("LARGE_BLOCKS={LARGE_BLOCKS}"),
            format!("LARGE_UNITS={}", self.large_units()),
            format!("PARTS_AT={parts}"),
            format!("SUMS_AT={sums}"),
            format!("SAID_AT={said}"),
            format!("SMALL_COUNTERS_AT={small}"),
            format!("LARGE_COUNTERS_AT={large}"),
        ]
    }

    /// How `bytes` are added: the same on all ranks, which is why no device is asked.
    pub(crate) fn way(self, bytes: usize) -> Way {
        let each = SMALL_THREADS * PACKET_BYTES / 2;
        if bytes <= SMALL_BLOCKS * each {
            let blocks = bytes.div_ceil(each) as u32;
            return Way::Small { blocks };
        }
        let at_once = self.ranks * self.large_units() * 16;
        let blocks = bytes.div_ceil(at_once).min(LARGE_BLOCKS) as u32;
        Way::Large { blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_window_do_not_overlap() {
        for ranks in 2..=MOST_RANKS {
            let layout = Layout { ranks };
            let places = layout.places();
            assert!(places.is_sorted() && places.iter().all(|at| at % ALIGNMENT == 0));
            assert!(places[1] >= 2 * SMALL_BLOCKS * ranks * SMALL_THREADS * PACKET_BYTES);
            let half = 2 * LARGE_BLOCKS * ranks * layout.large_units() * 16;
            assert!(places[2] - places[1] >= half && places[3] - places[2] >= half);
            assert!(layout.bytes() >= places[6] && layout.bytes() <= 32 << 20);
        }
    }

    #[test]
    fn a_row_is_sent_in_packets_and_a_prompt_in_two_halves() {
        let two = Layout { ranks: 2 };
        assert_eq!(two.way(8 << 10), Way::Small { blocks: 4 });
        assert_eq!(two.way(16), Way::Small { blocks: 1 });
        assert_eq!(two.way(16 << 10), Way::Small { blocks: 8 });
        assert_eq!(two.way((16 << 10) + 16), Way::Large { blocks: 1 });
        assert_eq!(two.way(256 << 10), Way::Large { blocks: 8 });
        assert_eq!(two.way(64 << 20), Way::Large { blocks: 128 });
        let eight = Layout { ranks: 8 };
        assert_eq!(eight.way(16 << 10), Way::Small { blocks: 8 });
        assert_eq!(eight.way(64 << 10), Way::Large { blocks: 2 });
    }
}
