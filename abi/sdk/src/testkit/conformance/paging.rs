//! Attention over a paged pool.

use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, Tensor as Handle, status};

use super::FLOATS;
use super::array::Array;
use super::suite::Suite;
use crate::{Backend, DenseAttention, Result, Tensor};

/// Rows of one sequence in a step: position of the first, and how many.
type Part = (i64, i64);

/// A step over a pool.
#[derive(Debug, Clone)]
pub(super) struct Scene {
    pub dtype: DType,
    pub page_size: i64,
    pub heads: i64,
    pub kv_heads: i64,
    pub width: i64,
    pub value_width: i64,
    pub parts: Vec<Part>,
    pub padding_rows: i64,
    pub window: u32,
    pub chunk: u32,
    pub softcap: f32,
    pub sinks: bool,
}

impl Scene {
    pub(super) fn pages_of(&self, part: Part) -> i64 {
        (part.0 + part.1 + self.page_size - 1) / self.page_size
    }

    fn table_width(&self) -> i64 {
        self.parts
            .iter()
            .map(|&part| self.pages_of(part))
            .max()
            .unwrap_or(1)
            + 1
    }

    /// Pages in all: page 0 belongs to nobody, and one more is left free.
    pub(super) fn pages(&self) -> i64 {
        self.parts
            .iter()
            .map(|&part| self.pages_of(part))
            .sum::<i64>()
            + 2
    }

    /// Pages of a sequence: handed out backwards, so that none lies in order.
    pub(super) fn page(&self, sequence: usize, index: i64) -> i64 {
        let before: i64 = self.parts[..sequence]
            .iter()
            .map(|&part| self.pages_of(part))
            .sum();
        self.pages() - 1 - before - index
    }

    pub(super) fn rows(&self) -> i64 {
        self.parts.iter().map(|part| part.1).sum()
    }

    pub(super) fn each_row(&self) -> impl Iterator<Item = (usize, i64)> + '_ {
        let parts = self.parts.iter().enumerate();
        parts.flat_map(|(sequence, &(start, rows))| {
            (start..start + rows).map(move |position| (sequence, position))
        })
    }

    pub(super) fn row_list(&self, f: impl Fn(usize, i64) -> i64) -> Array {
        let real = self
            .each_row()
            .map(|(sequence, position)| f(sequence, position) as f64);
        let padded = real.chain(core::iter::repeat_n(0.0, self.padding_rows as usize));
        Array::of(DType::I32, &[self.rows() + self.padding_rows], padded)
    }

    pub(super) fn slots(&self) -> Array {
        self.row_list(|sequence, position| {
            self.page(sequence, position / self.page_size) * self.page_size
                + position % self.page_size
        })
    }

    pub(super) fn page_table(&self) -> Array {
        let width = self.table_width();
        let entries = self.parts.iter().enumerate().flat_map(|(sequence, &part)| {
            (0..width).map(move |i| {
                if i < self.pages_of(part) {
                    self.page(sequence, i) as f64
                } else {
                    0.0
                }
            })
        });
        Array::of(DType::I32, &[self.parts.len() as i64, width], entries)
    }

    pub(super) fn row_starts(&self) -> Vec<u32> {
        let mut starts = vec![0];
        for part in &self.parts {
            starts.push(starts[starts.len() - 1] + part.1 as u32);
        }
        starts
    }

    pub(super) fn activation(&self, heads: i64, width: i64, seed: u64) -> Array {
        Array::usual(
            self.dtype,
            &[self.rows() + self.padding_rows, heads, width],
            seed,
        )
    }

    pub(super) fn pool(&self, width: i64, seed: u64) -> Array {
        Array::usual(
            self.dtype,
            &[self.pages(), self.page_size, self.kv_heads, width],
            seed,
        )
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    fn sink_logits(&self) -> Array {
        Array::usual(self.dtype, &[self.heads], 6)
    }

    /// The fused operation: real rows of the result, and the pools without page 0, which padding
    /// rows write to.
    pub(super) fn fused(&self, b: &Backend) -> Result<Vec<Tensor>> {
        let rows = [
            self.activation(self.heads, self.width, 1).on(b)?,
            self.activation(self.kv_heads, self.width, 2).on(b)?,
            self.activation(self.kv_heads, self.value_width, 3).on(b)?,
        ];
        self.through(b, &rows, |args, out| {
            command!(b.table(), paged_attention, args, out)
        })
    }

    /// Positions of the rows, as the slots take them.
    pub(super) fn positions(&self) -> Array {
        self.row_list(|_, position| position)
    }

    /// Runs a slot over queries, keys and values: real rows of the result, and the pools without page 0.
    pub(super) fn through(
        &self,
        b: &Backend,
        [q, k, v]: &[Tensor; 3],
        slot: impl FnOnce(&PagedAttentionArgs, &mut [Handle; 3]) -> Result<()>,
    ) -> Result<Vec<Tensor>> {
        let (k_pool, v_pool) = (
            self.pool(self.width, 4).on(b)?,
            self.pool(self.value_width, 5).on(b)?,
        );
        let (slots, page_table) = (self.slots().on(b)?, self.page_table().on(b)?);
        let row_sequences = self.row_list(|sequence, _| sequence as i64).on(b)?;
        let positions = self.positions().on(b)?;
        let sinks = if self.sinks {
            Some(self.sink_logits().on(b)?)
        } else {
            None
        };
        let row_starts = self.row_starts();
        let args = PagedAttentionArgs {
            q: q.handle(),
            k: k.handle(),
            v: v.handle(),
            k_pool: k_pool.handle(),
            v_pool: v_pool.handle(),
            slots: slots.handle(),
            row_sequences: row_sequences.handle(),
            positions: positions.handle(),
            page_table: page_table.handle(),
            row_starts: row_starts.as_ptr(),
            n_sequences: self.parts.len() as u32,
            window: self.window,
            scale: self.scale(),
            softcap: self.softcap,
            sinks: Tensor::handle_of(sinks.as_ref()),
            chunk: self.chunk,
            ..PagedAttentionArgs::default()
        };
        let mut out = [Handle::NONE; 3];
        slot(&args, &mut out)?;
        let [mixed, k_new, v_new] = out.map(|handle| Tensor::from_handle(b, handle));
        Ok(vec![
            mixed.narrow(0, 0, self.rows())?,
            k_new.narrow(0, 1, self.pages() - 1)?,
            v_new.narrow(0, 1, self.pages() - 1)?,
        ])
    }

    /// The same from simple operations: scatter into the pools, gather a sequence's pages, attend
    /// densely.
    pub(super) fn composed(&self, b: &Backend) -> Result<Vec<Tensor>> {
        let q = self.activation(self.heads, self.width, 1).on(b)?;
        let k_pool = self.appended(b, self.width, 2, 4)?;
        let v_pool = self.appended(b, self.value_width, 3, 5)?;
        let sinks = if self.sinks {
            Some(self.sink_logits().on(b)?)
        } else {
            None
        };
        let mut mixed = Vec::new();
        let mut first = 0;
        for (sequence, &(start, rows)) in self.parts.iter().enumerate() {
            let end = start + rows;
            let pages = (0..self.pages_of((start, rows))).map(|i| self.page(sequence, i) as f64);
            let pages = Array::of(DType::I32, &[self.pages_of((start, rows))], pages).on(b)?;
            let history = |pool: &Tensor, width: i64| {
                let flat = pool
                    .take(&pages, 0)?
                    .reshape(&[-1, self.kv_heads, width])?
                    .narrow(0, 0, end)?;
                flat.transpose(&[1, 0, 2])?.unsqueeze(0)
            };
            let queries = q
                .narrow(0, first, rows)?
                .transpose(&[1, 0, 2])?
                .unsqueeze(0)?;
            let mask = match self.chunk {
                0 => None,
                _ => Some(self.chunk_mask(start, end).on(b)?),
            };
            let options = DenseAttention {
                scale: self.scale(),
                softcap: self.softcap,
                causal: true,
                window: if mask.is_some() { 0 } else { self.window },
                mask: mask.as_ref(),
                sinks: sinks.as_ref(),
            };
            let (k, v) = (
                history(&k_pool, self.width)?,
                history(&v_pool, self.value_width)?,
            );
            let out = queries.attention(&k, &v, &options)?;
            mixed.push(
                out.reshape(&[self.heads, rows, self.value_width])?
                    .transpose(&[1, 0, 2])?,
            );
            first += rows;
        }
        let mixed = Tensor::concat(b, &mixed.iter().collect::<Vec<_>>(), 0)?;
        let real_pages = |pool: &Tensor| pool.narrow(0, 1, self.pages() - 1);
        Ok(vec![mixed, real_pages(&k_pool)?, real_pages(&v_pool)?])
    }

    /// What rows from `start` to `end` see of the keys before `end`, as bool.
    fn chunk_mask(&self, start: i64, end: i64) -> Array {
        let (window, chunk) = (i64::from(self.window), i64::from(self.chunk));
        let sees = move |position: i64, key: i64| {
            let in_window = window == 0 || key > position - window;
            key <= position && in_window && key / chunk == position / chunk
        };
        let seen = (start..end)
            .flat_map(|position| (0..end).map(move |key| f64::from(u8::from(sees(position, key)))));
        Array::of(DType::BOOL, &[end - start, end], seen)
    }

    pub(super) fn appended(
        &self,
        b: &Backend,
        width: i64,
        rows_seed: u64,
        pool_seed: u64,
    ) -> Result<Tensor> {
        let pool = self.pool(width, pool_seed).on(b)?;
        let rows = self
            .activation(self.kv_heads, width, rows_seed)
            .on(b)?
            .narrow(0, 0, self.rows())?;
        let slots = self.slots().on(b)?.narrow(0, 0, self.rows())?;
        let flat = pool.reshape(&[-1, self.kv_heads, width])?;
        let written = flat.scatter(
            mlxcel_abi::kinds::scatter::SET,
            &[&slots],
            &[0],
            &rows.unsqueeze(1)?,
        )?;
        written.reshape(&[self.pages(), self.page_size, self.kv_heads, width])
    }

    pub(super) fn name(&self) -> String {
        let Self {
            page_size,
            heads,
            kv_heads,
            width,
            value_width,
            parts,
            padding_rows,
            window,
            chunk,
            softcap,
            sinks,
            ..
        } = self;
        format!(
            "{} parts {parts:?} + {padding_rows}, pages of {page_size}, heads {heads}/{kv_heads}, width {width}/{value_width}, window {window}, chunk {chunk}, cap {softcap}, sinks {sinks}",
            self.dtype.name()
        )
    }
}

/// Steps of every kind.
pub(super) fn scenes(dtype: DType) -> Vec<Scene> {
    let base = Scene {
        dtype,
        page_size: 4,
        heads: 4,
        kv_heads: 2,
        width: 16,
        value_width: 16,
        parts: vec![(0, 5), (9, 1), (4, 3)],
        padding_rows: 0,
        window: 0,
        chunk: 0,
        softcap: 0.0,
        sinks: false,
    };
    vec![
        base.clone(),
        Scene {
            parts: vec![(0, 1)],
            ..base.clone()
        },
        Scene {
            parts: vec![(7, 1), (0, 1), (16, 1), (3, 1)],
            padding_rows: 4,
            ..base.clone()
        },
        Scene {
            parts: vec![(0, 19)],
            padding_rows: 1,
            ..base.clone()
        },
        Scene {
            parts: vec![(11, 8)],
            ..base.clone()
        },
        Scene {
            parts: (0..13).map(|i| (i * 5, 1)).collect(),
            padding_rows: 3,
            ..base.clone()
        },
        Scene {
            page_size: 1,
            ..base.clone()
        },
        Scene {
            page_size: 16,
            heads: 8,
            kv_heads: 1,
            width: 64,
            value_width: 64,
            ..base.clone()
        },
        Scene {
            kv_heads: 4,
            width: 24,
            value_width: 8,
            ..base.clone()
        },
        Scene {
            window: 3,
            ..base.clone()
        },
        Scene {
            window: 1,
            softcap: 3.0,
            ..base.clone()
        },
        Scene {
            chunk: 3,
            parts: vec![(0, 19), (5, 1), (12, 1), (6, 4)],
            padding_rows: 2,
            ..base.clone()
        },
        Scene {
            chunk: 8,
            window: 5,
            sinks: true,
            ..base.clone()
        },
        Scene {
            sinks: true,
            padding_rows: 2,
            ..base.clone()
        },
        Scene {
            window: 4,
            softcap: 2.0,
            sinks: true,
            ..base.clone()
        },
        Scene {
            page_size: 32,
            parts: vec![(0, 70), (64, 1)],
            heads: 2,
            kv_heads: 1,
            width: 128,
            value_width: 128,
            ..base
        },
    ]
}

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in FLOATS {
        for scene in scenes(dtype) {
            suite.check_all(
                "paged_attention",
                scene.name(),
                super::attention::NEAR,
                |b| scene.fused(b),
            );
        }
    }
    super::quantised_pools::run(suite);
    let scene = &scenes(DType::F32)[0];
    suite.holds(
        "paged_attention",
        "leaves the given pools as they are",
        |b| {
            let pool = scene.pool(scene.width, 4);
            let kept = pool.on(b).map_err(|e| e.to_string())?;
            let attend = scene.fused(b).map_err(|e| e.to_string())?;
            drop(attend);
            let now = Array::read(&kept).map_err(|e| e.to_string())?;
            if now.0 == pool.0 {
                Ok(())
            } else {
                Err("the pool was written in place".to_owned())
            }
        },
    );
    let bad =
        |scene: Scene| move |b: &Backend| scene.fused(b).map(|mut results| results.swap_remove(0));
    let heads = Scene {
        heads: 3,
        ..scene.clone()
    };
    suite.refuses(
        "paged_attention",
        "heads that key heads do not divide",
        status::INVALID_ARGUMENT,
        bad(heads),
    );
}
