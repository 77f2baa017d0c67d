//! Attention that appends nothing, over latent keys, over chosen keys; and the choice of keys.

use mlxcel_abi::cache_args::SparseIndexArgs;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, Tensor as Handle};

use super::FLOATS;
use super::array::Array;
use super::attention::NEAR;
use super::paging::{Scene, scenes};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::compose::{self, Index};
use crate::{Backend, DenseAttention, Result, Tensor};

/// What is special about a call.
#[derive(Debug, Clone, Copy)]
struct Special {
    /// Values are this many elements of keys; 0 has values of their own.
    latent: i64,
    read_only: bool,
    /// Keys that each row chose; 0 chooses none.
    chosen: i64,
}

impl Special {
    fn name(self, scene: &Scene) -> String {
        format!("{self:?} {}", scene.name())
    }

    /// Every third position and the row's own, those of other rows and none: `[T, N]`.
    fn selection(self, scene: &Scene) -> Array {
        let rows = scene.rows() + scene.padding_rows;
        let mut numbers = Vec::new();
        for (_, position) in scene.each_row() {
            let mut own: Vec<i128> = (0..=position / 3).map(|i| i128::from(3 * i)).collect();
            own.retain(|&p| p != i128::from(position));
            own.insert(0, i128::from(position));
            // Not visible yet, so it does not count.
            own.insert(1, i128::from(position) + 1);
            own.resize(self.chosen as usize, -1);
            numbers.extend(own);
        }
        numbers.resize((rows * self.chosen) as usize, -1);
        Array::ints(DType::I32, &[rows, self.chosen], &numbers)
    }

    /// The slot: real rows of the result, and the pools without page 0.
    fn fused(self, b: &Backend, scene: &Scene) -> Result<Vec<Tensor>> {
        let q = scene.activation(scene.heads, scene.width, 1).on(b)?;
        let k = scene.activation(scene.kv_heads, scene.width, 2).on(b)?;
        let v = scene
            .activation(scene.kv_heads, scene.value_width, 3)
            .on(b)?;
        let k_pool = scene.pool(scene.width, 4).on(b)?;
        let v_pool = scene.pool(scene.value_width, 5).on(b)?;
        let (slots, page_table) = (scene.slots().on(b)?, scene.page_table().on(b)?);
        let row_sequences = scene.row_list(|sequence, _| sequence as i64).on(b)?;
        let positions = scene.row_list(|_, position| position).on(b)?;
        let selection = if self.chosen > 0 {
            Some(self.selection(scene).on(b)?)
        } else {
            None
        };
        let row_starts = scene.row_starts();
        let given = |tensor: &Tensor, is_given: bool| {
            if is_given {
                tensor.handle()
            } else {
                Handle::NONE
            }
        };
        let (appends, has_values) = (!self.read_only, self.latent == 0);
        let args = PagedAttentionArgs {
            q: q.handle(),
            k: given(&k, appends),
            v: given(&v, appends && has_values),
            k_pool: k_pool.handle(),
            v_pool: given(&v_pool, has_values),
            slots: given(&slots, appends),
            row_sequences: row_sequences.handle(),
            positions: positions.handle(),
            page_table: page_table.handle(),
            row_starts: row_starts.as_ptr(),
            n_sequences: scene.parts.len() as u32,
            window: scene.window,
            scale: scene.scale(),
            softcap: scene.softcap,
            selection: Tensor::handle_of(selection.as_ref()),
            latent_dim: self.latent as u32,
            read_only: u32::from(self.read_only),
            ..PagedAttentionArgs::default()
        };
        let mut out = [Handle::NONE; 3];
        command!(b.table(), paged_attention, &args, &mut out)?;
        let pages = scene.pages() - 1;
        let mut results = Vec::new();
        for (i, handle) in out
            .into_iter()
            .enumerate()
            .filter(|(_, handle)| !handle.is_none())
        {
            let tensor = Tensor::from_handle(b, handle);
            results.push(match i {
                0 => tensor.narrow(0, 0, scene.rows())?,
                _ => tensor.narrow(0, 1, pages)?,
            });
        }
        Ok(results)
    }

    /// The result alone from simple operations: a sequence's pages, attended densely with a mask.
    fn composed(self, b: &Backend, scene: &Scene) -> Result<Vec<Tensor>> {
        let q = scene.activation(scene.heads, scene.width, 1).on(b)?;
        let pool = |width: i64, rows_seed, pool_seed| match self.read_only {
            true => scene.pool(width, pool_seed).on(b),
            false => scene.appended(b, width, rows_seed, pool_seed),
        };
        let k_pool = pool(scene.width, 2, 4)?;
        let v_pool = match self.latent {
            0 => pool(scene.value_width, 3, 5)?,
            width => k_pool.narrow(3, 0, width)?,
        };
        let mut mixed = Vec::new();
        let mut first = 0;
        for (sequence, &(start, rows)) in scene.parts.iter().enumerate() {
            let n_pages = scene.pages_of((start, rows));
            let pages = (0..n_pages).map(|i| scene.page(sequence, i) as f64);
            let pages = Array::of(DType::I32, &[n_pages], pages).on(b)?;
            let history = |pool: &Tensor| {
                let width = pool.dim(3)?;
                let flat = pool
                    .take(&pages, 0)?
                    .reshape(&[-1, scene.kv_heads, width])?;
                flat.narrow(0, 0, start + rows)?
                    .transpose(&[1, 0, 2])?
                    .unsqueeze(0)
            };
            let queries = q
                .narrow(0, first, rows)?
                .transpose(&[1, 0, 2])?
                .unsqueeze(0)?;
            let mask = self.mask(b, scene, first, start, rows)?;
            let options = DenseAttention {
                scale: scene.scale(),
                softcap: scene.softcap,
                causal: false,
                window: 0,
                mask: Some(&mask),
                sinks: None,
            };
            let out = queries.attention(&history(&k_pool)?, &history(&v_pool)?, &options)?;
            let width = out.dim(3)?;
            mixed.push(
                out.reshape(&[scene.heads, rows, width])?
                    .transpose(&[1, 0, 2])?,
            );
            first += rows;
        }
        Ok(vec![Tensor::concat(
            b,
            &mixed.iter().collect::<Vec<_>>(),
            0,
        )?])
    }

    fn mask(self, b: &Backend, scene: &Scene, first: i64, start: i64, rows: i64) -> Result<Tensor> {
        let selection = self.selection(scene);
        let chosen = selection
            .0
            .ints()
            .map_err(|e| crate::Error::Other(e.to_string()))?;
        let mut visible = Vec::new();
        for row in 0..rows {
            let (own, n) = (start + row, self.chosen as usize);
            let picks = &chosen[(first + row) as usize * n..][..n];
            for key in 0..start + rows {
                let in_window = scene.window == 0 || key > own - i64::from(scene.window);
                let is_chosen = n == 0 || picks.contains(&i128::from(key));
                visible.push(f64::from(u8::from(key <= own && in_window && is_chosen)));
            }
        }
        Array::of(DType::BOOL, &[1, 1, rows, start + rows], visible).on(b)
    }
}

/// Index heads and `top_k` over a scene's pages.
fn index(b: &Backend, scene: &Scene, heads: i64, top_k: u32, fused: bool) -> Result<Vec<Tensor>> {
    let (rows, width) = (scene.rows() + scene.padding_rows, scene.width);
    // Products above 0: where all are cut off, scores are equal and the choice is not defined.
    let positive = |dims: &[i64], seed| Array::spread(scene.dtype, dims, 0.1, 1.0, seed);
    let q = positive(&[rows, heads, width], 1).on(b)?;
    let k = positive(&[rows, width], 2).on(b)?;
    let weights = Array::usual(scene.dtype, &[rows, heads], 3).on(b)?;
    let pool = positive(&[scene.pages(), scene.page_size, width], 4);
    let (slots, page_table) = (scene.slots().on(b)?, scene.page_table().on(b)?);
    let row_sequences = scene.row_list(|sequence, _| sequence as i64).on(b)?;
    let positions = scene.row_list(|_, position| position).on(b)?;
    let scale = 0.3;
    let in_order = |chosen: &Tensor| chosen.narrow(0, 0, scene.rows())?.sort(-1);
    if fused {
        let (held, row_starts) = (pool.on(b)?, scene.row_starts());
        let args = SparseIndexArgs {
            q: q.handle(),
            k: k.handle(),
            weights: weights.handle(),
            pool: held.handle(),
            slots: slots.handle(),
            row_sequences: row_sequences.handle(),
            positions: positions.handle(),
            page_table: page_table.handle(),
            row_starts: row_starts.as_ptr(),
            n_sequences: scene.parts.len() as u32,
            top_k,
            scale,
            ..SparseIndexArgs::default()
        };
        let mut out = [Handle::NONE; 2];
        match command!(b.table(), sparse_index, &args, &mut out) {
            Ok(()) => {
                let [chosen, after] = out.map(|handle| Tensor::from_handle(b, handle));
                return Ok(vec![
                    in_order(&chosen)?,
                    after.narrow(0, 1, scene.pages() - 1)?,
                ]);
            }
            Err(error) if error.is_unimplemented() => {}
            Err(error) => return Err(error),
        }
    }
    let flat = pool.on(b)?.reshape(&[-1, width])?;
    let real = scene.rows();
    let written = flat.scatter(
        mlxcel_abi::kinds::scatter::SET,
        &[&slots.narrow(0, 0, real)?],
        &[0],
        &k.narrow(0, 0, real)?.unsqueeze(1)?,
    )?;
    let after = written.reshape(&[scene.pages(), scene.page_size, width])?;
    let keys = after
        .take(&page_table, 0)?
        .reshape(&[scene.parts.len() as i64, -1, width])?;
    let inputs = Index {
        q: &q,
        k: &k,
        weights: &weights,
        top_k: top_k as usize,
        scale,
    };
    let chosen = compose::index(&inputs, &keys, &positions, &row_sequences)?;
    Ok(vec![
        in_order(&chosen)?,
        after.narrow(0, 1, scene.pages() - 1)?,
    ])
}

pub(super) fn run(suite: &mut Suite<'_>) {
    let special = |latent, read_only, chosen| Special {
        latent,
        read_only,
        chosen,
    };
    for dtype in FLOATS {
        for scene in scenes(dtype)
            .into_iter()
            .filter(|scene| !scene.sinks && scene.chunk == 0)
        {
            let width = scene.width / 2;
            for (special, kv_heads) in [
                (special(0, true, 0), scene.kv_heads),
                (special(0, false, 24), scene.kv_heads),
                (special(width, false, 0), 1),
                (special(width, true, 24), 1),
                (special(scene.width, false, 24), 1),
            ] {
                let scene = Scene {
                    kv_heads,
                    ..scene.clone()
                };
                let case = special.name(&scene);
                suite.check_all("paged_attention", case.clone(), NEAR, |b| {
                    special.fused(b, &scene)
                });
                suite.check_against(
                    "paged_attention",
                    format!("{case}, composed"),
                    NEAR,
                    |b| special.composed(b, &scene),
                    |b| Ok(special.fused(b, &scene)?.drain(..1).collect()),
                );
            }
            for (heads, top_k) in [(3, 4), (1, 1), (5, 200)] {
                let case = format!("{heads} heads, {top_k} keys, {}", scene.name());
                suite.check_all("sparse_index", case.clone(), Tolerance::EXACT, |b| {
                    index(b, &scene, heads, top_k, true)
                });
                suite.check_against(
                    "sparse_index",
                    format!("{case}, composed"),
                    Tolerance::EXACT,
                    |b| index(b, &scene, heads, top_k, false),
                    |b| index(b, &scene, heads, top_k, true),
                );
            }
        }
    }
}
