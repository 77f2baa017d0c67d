//! Attention over pools of quantised rows: a backend that lists such a type in `kv_dtypes` gives what the numbers behind
//! the codes give in f64, within attention's own tolerance, and writes exactly the codes of rows that have some.
//! Any other backend refuses.

use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, Tensor as Handle, status};

use super::array::{Array, Numbers};
use super::paging::{Scene, scenes};
use super::suite::Suite;
use crate::{Backend, Result, Tensor};

/// Elements that share a scale.
const GROUP: usize = 32;

/// How many bits a code has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bits {
    Eight,
    Four,
}

/// Rows of a pool: what is stored, and what that stands for. Every group has the largest code and a power of two as its
/// scale, so that quantising the numbers gives the codes back whatever the rounding.
#[derive(Clone)]
struct Rows {
    width: usize,
    bytes: Vec<Vec<u8>>,
    numbers: Vec<Vec<f64>>,
}

impl Rows {
    fn new(count: i64, width: i64, bits: Bits, seed: u64) -> Self {
        let mut random = Numbers::new(seed);
        let width = width as usize;
        let mut rows = Self {
            width,
            bytes: Vec::new(),
            numbers: Vec::new(),
        };
        for _ in 0..count {
            let (mut scales, mut codes, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
            for start in (0..width).step_by(GROUP) {
                let exponent =
                    (random.unit() * 3.0) as u16 + if bits == Bits::Eight { 6 } else { 2 };
                // f16 of 2^-exponent.
                scales.extend(((15 - exponent) << 10).to_le_bytes());
                let scale = 0.5f64.powi(i32::from(exponent));
                for index in start..width.min(start + GROUP) {
                    let code = match bits {
                        Bits::Eight if index == start => 127,
                        Bits::Eight => (random.unit() * 255.0) as i32 - 127,
                        Bits::Four if index == start => -8,
                        Bits::Four => (random.unit() * 16.0) as i32 - 8,
                    };
                    codes.push(code);
                    numbers.push(f64::from(code) * scale);
                }
            }
            let packed: Vec<u8> = match bits {
                Bits::Eight => codes.iter().map(|code| (code + 128) as u8).collect(),
                Bits::Four => codes
                    .chunks(2)
                    .map(|pair| (pair[0] + 8) as u8 | ((pair[1] + 8) as u8) << 4)
                    .collect(),
            };
            rows.bytes.push([scales, packed].concat());
            rows.numbers.push(numbers);
        }
        rows
    }

    /// With rows of `others`, `heads` of them for every slot, in their places.
    fn with(&self, slots: &[i64], heads: i64, others: &Self) -> Self {
        let mut rows = self.clone();
        for (row, slot) in slots.iter().enumerate() {
            for head in 0..heads as usize {
                let (to, from) = (
                    *slot as usize * heads as usize + head,
                    row * heads as usize + head,
                );
                rows.bytes[to].clone_from(&others.bytes[from]);
                rows.numbers[to].clone_from(&others.numbers[from]);
            }
        }
        rows
    }

    fn stored(&self, dims: &[i64]) -> Array {
        let width = self.bytes[0].len() as i64;
        let bytes = self.bytes.iter().flatten().map(|byte| f64::from(*byte));
        Array::of(DType::U8, &[dims, &[width]].concat(), bytes)
    }

    fn plain(&self, dtype: DType, dims: &[i64]) -> Array {
        let numbers = self.numbers.iter().flatten().copied();
        Array::of(dtype, &[dims, &[self.width as i64]].concat(), numbers)
    }
}

/// A step over quantised pools.
struct Case {
    scene: Scene,
    bits: Bits,
    appends: bool,
}

impl Case {
    fn name(&self) -> String {
        let bits = if self.bits == Bits::Eight { 8 } else { 4 };
        let what = if self.appends { "" } else { ", read only" };
        format!("{bits} bits{what}, {}", self.scene.name())
    }

    fn pool_dims(&self) -> [i64; 3] {
        [
            self.scene.pages(),
            self.scene.page_size,
            self.scene.kv_heads,
        ]
    }

    /// Keys or values: the pool before, the rows that come, and the pool after.
    fn halves(&self, width: i64, seed: u64) -> [Rows; 3] {
        let scene = &self.scene;
        let before = Rows::new(self.pool_dims().iter().product(), width, self.bits, seed);
        let count = (scene.rows() + scene.padding_rows) * scene.kv_heads;
        let new = Rows::new(count, width, self.bits, seed + 1);
        let slots: Vec<i64> = scene
            .each_row()
            .map(|(sequence, position)| {
                scene.page(sequence, position / scene.page_size) * scene.page_size
                    + position % scene.page_size
            })
            .collect();
        let after = match self.appends {
            true => before.with(&slots, scene.kv_heads, &new),
            false => before.clone(),
        };
        [before, new, after]
    }

    fn attend(&self, b: &Backend, pools: [&Array; 2]) -> Result<[Tensor; 3]> {
        let scene = &self.scene;
        let row_dims = [scene.rows() + scene.padding_rows, scene.kv_heads];
        let rows = |width: i64, seed: u64| {
            let [_, new, _] = self.halves(width, seed);
            self.appends
                .then(|| new.plain(scene.dtype, &row_dims).on(b))
                .transpose()
        };
        let q = scene.activation(scene.heads, scene.width, 1).on(b)?;
        let (k, v) = (rows(scene.width, 40)?, rows(scene.value_width, 50)?);
        let (k_pool, v_pool) = (pools[0].on(b)?, pools[1].on(b)?);
        let (slots, page_table) = (scene.slots().on(b)?, scene.page_table().on(b)?);
        let row_sequences = scene.row_list(|sequence, _| sequence as i64).on(b)?;
        let positions = scene.row_list(|_, position| position).on(b)?;
        let row_starts = scene.row_starts();
        let args = PagedAttentionArgs {
            q: q.handle(),
            k: Tensor::handle_of(k.as_ref()),
            v: Tensor::handle_of(v.as_ref()),
            k_pool: k_pool.handle(),
            v_pool: v_pool.handle(),
            slots: slots.handle(),
            row_sequences: row_sequences.handle(),
            positions: positions.handle(),
            page_table: page_table.handle(),
            row_starts: row_starts.as_ptr(),
            n_sequences: scene.parts.len() as u32,
            window: scene.window,
            scale: scene.scale(),
            softcap: scene.softcap,
            chunk: scene.chunk,
            read_only: u32::from(!self.appends),
            ..PagedAttentionArgs::default()
        };
        let mut out = [Handle::NONE; 3];
        command!(b.table(), paged_attention, &args, &mut out)?;
        Ok(out.map(|handle| Tensor::from_handle(b, handle)))
    }

    fn real(&self, [mixed, k_pool, v_pool]: [Tensor; 3]) -> Result<Vec<Tensor>> {
        let pages = self.scene.pages() - 1;
        Ok(vec![
            mixed.narrow(0, 0, self.scene.rows())?,
            k_pool.narrow(0, 1, pages)?,
            v_pool.narrow(0, 1, pages)?,
        ])
    }

    /// Over codes.
    fn quantised(&self, b: &Backend) -> Result<Vec<Tensor>> {
        let dims = self.pool_dims();
        let [keys, ..] = self.halves(self.scene.width, 40);
        let [values, ..] = self.halves(self.scene.value_width, 50);
        self.real(self.attend(b, [&keys.stored(&dims), &values.stored(&dims)])?)
    }

    /// Over the numbers behind the codes; pools are those that should be written.
    fn expected(&self, b: &Backend) -> Result<Vec<Tensor>> {
        let (dims, dtype) = (self.pool_dims(), self.scene.dtype);
        let [keys, _, new_keys] = self.halves(self.scene.width, 40);
        let [values, _, new_values] = self.halves(self.scene.value_width, 50);
        let pools = [&keys.plain(dtype, &dims), &values.plain(dtype, &dims)];
        let [mixed, ..] = self.attend(b, pools)?;
        let (keys, values) = (
            new_keys.stored(&dims).on(b)?,
            new_values.stored(&dims).on(b)?,
        );
        self.real([mixed, keys, values])
    }
}

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in [DType::F32, DType::F16] {
        for scene in scenes(dtype).into_iter().filter(|scene| !scene.sinks) {
            for (bits, appends) in [
                (Bits::Eight, true),
                (Bits::Four, true),
                (Bits::Eight, false),
                (Bits::Four, false),
            ] {
                let case = Case {
                    scene: scene.clone(),
                    bits,
                    appends,
                };
                suite.check_against(
                    "paged_attention",
                    case.name(),
                    super::attention::NEAR,
                    |b| match case.quantised(b) {
                        Err(error)
                            if [status::INVALID_ARGUMENT, status::UNIMPLEMENTED]
                                .contains(&error.code()) =>
                        {
                            case.expected(b)
                        }
                        other => other,
                    },
                    |b| case.expected(b),
                );
            }
        }
    }
}
