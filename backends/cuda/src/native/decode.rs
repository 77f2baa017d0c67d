//! A step of decoding, where every row is alone in its sequence: norms of heads, rotation, append and attention by one kernel.

use mlxcel_abi::{DType, Result};

use super::State;
use super::rotations::{Append, HeadNorms, Turn};
use crate::driver::{Arguments, Shape, pair};
use crate::kernels::{ENGINE_ARCHITECTURE, Text};

/// Blocks of a cluster, and the kernel that is compiled for them.
const CLUSTERS: [(usize, &str); 4] = [
    (8, "decode_8"),
    (4, "decode_4"),
    (2, "decode_2"),
    (1, "decode_1"),
];
/// Blocks that find room on a multiprocessor.
const BLOCKS_EACH: usize = 2;
/// Keys below which another cluster does not pay, and most clusters of a row.
const CLUSTER_KEYS: usize = 1024;
const MOST_CLUSTERS: usize = 8;
/// Keys up to which a warp has no more than one unit, or little more.
const FEW_KEYS: usize = 2048;
/// Warps of a block, and bytes that one of them has under way in a stage: as the kernel has them for up to `MOST_HEADS` heads.
const WARPS: u32 = 8;
const STAGE_BYTES: u32 = 4096;
/// Query heads of a block up to which two blocks find room.
pub(super) const MOST_HEADS: u32 = 4;

/// How the keys of a row are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Division {
    name: &'static str,
    /// Blocks of a cluster.
    cluster: usize,
    /// Clusters of a row and its group of heads.
    clusters: usize,
    /// Units of keys that a warp has under way.
    stages: u32,
}

impl Division {
    /// For so many rows times groups of `group` heads; none where rotation and attention apart were measured to be faster, or
    /// nothing was measured.
    pub(super) fn of(
        (width, group): (u32, u32),
        blocks: usize,
        keys: usize,
        processors: usize,
    ) -> Option<Self> {
        let room = BLOCKS_EACH * processors;
        let (cluster, name) = CLUSTERS
            .into_iter()
            .find(|(cluster, _)| blocks * cluster <= room)
            .unwrap_or((1, "decode_1"));
        let is_few = 8 * blocks <= processors;
        // Blocks come in rounds; one that is not full takes as long as one that is.
        let is_full = blocks <= 2 * room && 32 * blocks >= 31 * room * blocks.div_ceil(room);
        let pays = matches!(width, 64 | 128) && (blocks <= room || is_full);
        (pays && group <= MOST_HEADS).then(|| Self {
            name,
            cluster,
            clusters: (room / (blocks * cluster))
                .min(keys / CLUSTER_KEYS)
                .clamp(1, MOST_CLUSTERS),
            // One leaves the next launch more room to read ahead, two read many keys faster.
            stages: if is_few && keys <= FEW_KEYS { 1 } else { 2 },
        })
    }

    /// Where clusters put their parts: for every block of one of them its share of the sums, and highest scores and totals.
    fn scratch_bytes(&self, (width, group): (u32, u32), blocks: usize) -> usize {
        if self.clusters == 1 {
            return 0;
        }
        let part = (group * width) as usize / self.cluster + 2 * group as usize;
        blocks * self.cluster * self.clusters * part * size_of::<f32>()
    }
}

/// One call; addresses on the device.
#[derive(Debug)]
pub(super) struct Decode {
    pub(super) division: Division,
    pub(super) append: Append,
    /// None where nothing turns.
    pub(super) turn: Option<Turn>,
    pub(super) row_sequences: usize,
    pub(super) positions: usize,
    pub(super) page_table: usize,
    pub(super) sinks: usize,
    pub(super) out: usize,
    pub(super) rows: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) width: u32,
    /// Query heads of a block.
    pub(super) group: u32,
    pub(super) page_shift: u32,
    pub(super) table_width: i32,
    pub(super) pages: i32,
    pub(super) window: i32,
    /// Rows of the page table.
    pub(super) sequences: i32,
    pub(super) scale: f32,
    pub(super) softcap: f32,
    pub(super) dtype: DType,
}

impl Decode {
    /// Rows times groups of heads.
    fn blocks(&self) -> usize {
        self.rows as usize * (self.heads as usize / self.group as usize)
    }

    /// As the kernel's struct of that name lies in memory.
    fn words(&self, parts: usize, counters: usize) -> [u64; 24] {
        let to = &self.append;
        let (table, dims, interleaved, inverse, turn_scale, norms) =
            self.turn
                .map_or((0, 0, 0, 0, 1.0, HeadNorms::default()), |turn| {
                    (
                        turn.table,
                        turn.dims,
                        turn.interleaved,
                        turn.is_inverse,
                        turn.scale,
                        turn.norms,
                    )
                });
        let numbers = |first: i32, second: i32| pair(first as u32, second as u32);
        let floats = |first: f32, second: f32| pair(first.to_bits(), second.to_bits());
        [
            to.q as u64,
            to.k as u64,
            to.v as u64,
            to.key_pool as u64,
            to.value_pool as u64,
            self.row_sequences as u64,
            self.positions as u64,
            self.page_table as u64,
            to.slots as u64,
            table as u64,
            self.sinks as u64,
            norms.q as u64,
            norms.k as u64,
            self.out as u64,
            parts as u64,
            counters as u64,
            numbers(self.heads, self.kv_heads),
            numbers(self.page_shift as i32, self.table_width),
            numbers(self.pages, self.window),
            numbers(dims, interleaved),
            numbers(inverse, self.sequences),
            floats(self.scale, self.softcap),
            floats(turn_scale, norms.eps),
            numbers(i32::from(norms.is_normed), 0),
        ]
    }
}

/// Whether the kernel can turn features so: what 8 of them need is 8 others, or among them.
pub(super) fn can_turn(turn: Option<&Turn>) -> bool {
    turn.is_none_or(|turn| turn.interleaved == 1 || turn.dims % 16 == 0)
}

impl State {
    /// How [`State::submit_decode`] would divide a call, or none.
    pub(super) fn division(
        &self,
        heads_each: (u32, u32),
        blocks: usize,
        keys: usize,
    ) -> Option<Division> {
        // Clusters came with the copy engine.
        (self.architecture >= ENGINE_ARCHITECTURE)
            .then(|| Division::of(heads_each, blocks, keys, self.processors as usize))
            .flatten()
    }

    /// Norms and rotates queries and keys, appends keys and values, and attends.
    pub(super) fn submit_decode(&mut self, decode: &Decode) -> Result<()> {
        let Division {
            name,
            cluster,
            clusters,
            stages,
        } = decode.division;
        let bytes = decode
            .division
            .scratch_bytes((decode.width, decode.group), decode.blocks());
        let parts = if bytes > 0 { self.scratch(bytes)? } else { 0 };
        let shape = Shape {
            grid: [
                (cluster * clusters) as u32,
                decode.heads as u32 / decode.group,
                decode.rows as u32,
            ],
            threads: 32 * WARPS,
            shared_bytes: WARPS * stages * STAGE_BYTES,
        };
        let text = Text::Decode {
            width: decode.width,
            group: decode.group,
            stages,
        };
        let arguments = Arguments::new().record(&decode.words(parts, self.counters));
        let most = shape.shared_bytes;
        // SAFETY: shapes were checked by the caller; the scratch holds the parts of every cluster, and where there are several of a
        // row their blocks are no more than two for each multiprocessor, so each has a counter.
        unsafe { self.launch(text, decode.dtype, name, &shape, most, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an H200.
    const PROCESSORS: usize = 132;

    fn found(width: u32, blocks: usize, keys: usize) -> Option<(&'static str, usize)> {
        let division = Division::of((width, 4), blocks, keys, PROCESSORS);
        division.map(|division| (division.name, division.clusters))
    }

    #[test]
    fn shapes_are_divided_where_one_kernel_was_measured_to_be_faster() {
        // Sequences of 8 key heads.
        for (sequences, expected) in [
            (1, Some(("decode_8", 1))),
            (2, Some(("decode_8", 1))),
            (4, Some(("decode_8", 1))),
            (8, Some(("decode_4", 1))),
            (16, Some(("decode_2", 1))),
            (24, Some(("decode_1", 1))),
            (32, Some(("decode_1", 1))),
            (48, None),
            (64, Some(("decode_1", 1))),
            (96, None),
        ] {
            assert_eq!(found(128, 8 * sequences, 512), expected, "{sequences}");
        }
        assert_eq!(found(128, 8, 2048), Some(("decode_8", 2)));
        assert_eq!(found(128, 8, 32768), Some(("decode_8", 4)));
        assert_eq!(found(64, 3, 1 << 20), Some(("decode_8", 8)));
        assert_eq!(found(64, 64, 512), Some(("decode_4", 1)));
        assert_eq!(found(64, 96, 512), Some(("decode_2", 1)));
        assert_eq!(found(64, 288, 512), None);
        assert_eq!(found(256, 8, 512), None);
        assert_eq!(Division::of((128, 8), 8, 512, PROCESSORS), None);
    }

    #[test]
    fn clusters_of_a_row_have_counters_and_room_for_parts() {
        for group in 1..=MOST_HEADS {
            for blocks in 1..=600 {
                for keys in [1, 1024, 4096, 1 << 20] {
                    let shape = (64, group);
                    let Some(division) = Division::of(shape, blocks, keys, PROCESSORS) else {
                        continue;
                    };
                    let Division {
                        cluster, clusters, ..
                    } = division;
                    let each = division.scratch_bytes(shape, blocks);
                    if clusters > 1 {
                        assert!(blocks * cluster * clusters <= 2 * PROCESSORS);
                        let part = group as usize * 64 / cluster + 2 * group as usize;
                        assert_eq!(each, 4 * blocks * cluster * clusters * part);
                    } else {
                        assert_eq!(each, 0);
                    }
                }
            }
        }
    }

    #[test]
    fn a_call_lies_as_the_kernel_reads_it() {
        let decode = Decode {
            division: Division::of((128, 4), 8, 512, PROCESSORS).unwrap(),
            append: Append {
                q: 1,
                k: 2,
                v: 3,
                key_pool: 4,
                value_pool: 5,
                slots: 9,
                pool_rows: 0,
            },
            turn: Some(Turn {
                positions: 7,
                table: 10,
                dims: 128,
                interleaved: 1,
                is_inverse: 1,
                scale: 2.0,
                rows: 1,
                width: 128,
                dtype: DType::BF16,
                norms: HeadNorms {
                    q: 12,
                    k: 13,
                    eps: 0.25,
                    is_normed: true,
                },
            }),
            row_sequences: 6,
            positions: 7,
            page_table: 8,
            sinks: 11,
            out: 14,
            rows: 1,
            heads: 32,
            kv_heads: 8,
            width: 128,
            group: 4,
            page_shift: 5,
            table_width: 16,
            pages: 100,
            window: 77,
            sequences: 3,
            scale: 1.0,
            softcap: 0.5,
            dtype: DType::BF16,
        };
        let words = decode.words(15, 16);
        let addresses: Vec<u64> = (1..=16).collect();
        assert_eq!(words[..16], addresses);
        let numbers: Vec<u32> = (words[16..].iter())
            .flat_map(|word| [*word as u32, (*word >> 32) as u32])
            .collect();
        let floats = [1.0_f32, 0.5, 2.0, 0.25].map(f32::to_bits);
        assert_eq!(numbers[..10], [32, 8, 5, 16, 100, 77, 128, 1, 1, 3]);
        assert_eq!(numbers[10..14], floats);
        assert_eq!(numbers[14..], [1, 0]);
        assert!(can_turn(decode.turn.as_ref()) && can_turn(None));
    }
}
