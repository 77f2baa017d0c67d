//! States that move on with every row: short convolution and gated delta rule. The slots against the
//! reference, and the SDK's composition against it too.

use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, StateRows};
use mlxcel_abi::kinds::unary;
use mlxcel_abi::{DType, Tensor as Handle, status};

use super::FLOATS;
use super::array::Array;
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::compose::{self, GatedDelta, RowMap, ShortConv};
use crate::{Backend, Result, Tensor};

const NEAR: Tolerance = Tolerance::units(64.0, 4.0).floor(1.0);

/// Rows of a sequence, the slot it starts from, the slot it ends in.
type Part = (i64, i64, i64);

/// A step over a pool of five slots.
#[derive(Debug, Clone)]
struct Scene {
    dtype: DType,
    parts: Vec<Part>,
    /// Rows that a last sequence of padding owns.
    padding_rows: i64,
}

const SLOTS: i64 = 5;

impl Scene {
    fn all(dtype: DType) -> Vec<Self> {
        let scene = |parts: &[Part], padding_rows| Self {
            dtype,
            parts: parts.to_vec(),
            padding_rows,
        };
        vec![
            scene(&[(1, 2, 2)], 0),
            scene(&[(1, -1, 1)], 0),
            // In place, from a checkpoint to another slot, from zeros.
            scene(&[(5, 1, 1), (1, 3, 2), (3, -1, 4)], 0),
            scene(&[(1, 4, 4), (1, 1, 1), (1, -1, 2)], 1),
            scene(&[(2, 1, 1), (0, 3, 2), (9, 3, 4)], 3),
            scene(&[(17, -1, 3)], 0),
        ]
    }

    fn rows(&self) -> i64 {
        self.parts.iter().map(|part| part.0).sum()
    }

    fn all_rows(&self) -> i64 {
        self.rows() + self.padding_rows
    }

    fn sequences(&self) -> Vec<Part> {
        let padding = (self.padding_rows > 0).then_some((self.padding_rows, -1, 0));
        self.parts.iter().copied().chain(padding).collect()
    }

    fn row_starts(&self) -> Vec<u32> {
        let mut starts = vec![0];
        for part in self.sequences() {
            starts.push(starts[starts.len() - 1] + part.0 as u32);
        }
        starts
    }

    fn ints(&self, numbers: impl Iterator<Item = i64>) -> Array {
        let numbers: Vec<i128> = numbers.map(i128::from).collect();
        Array::ints(DType::I32, &[numbers.len() as i64], &numbers)
    }

    fn sources(&self) -> Array {
        self.ints(self.sequences().into_iter().map(|part| part.1))
    }

    fn targets(&self) -> Array {
        self.ints(self.sequences().into_iter().map(|part| part.2))
    }

    fn map(&self, b: &Backend) -> Result<RowMap> {
        let owners = self.sequences().into_iter().enumerate();
        let owners = owners.flat_map(|(i, part)| core::iter::repeat_n(i as i64, part.0 as usize));
        Ok(RowMap {
            row_starts: self
                .ints(self.row_starts().into_iter().map(i64::from))
                .on(b)?,
            row_sequences: self.ints(owners).on(b)?,
        })
    }

    fn name(&self) -> String {
        format!(
            "{} parts {:?} + {}",
            self.dtype.name(),
            self.parts,
            self.padding_rows
        )
    }

    /// Runs `slot` with the arguments of the states; gives the real rows and the pool without slot 0.
    fn fused(
        &self,
        b: &Backend,
        pool: &Tensor,
        slot: impl FnOnce(StateRows, &mut [Handle; 2]) -> Result<()>,
    ) -> Result<Option<Vec<Tensor>>> {
        let (sources, targets) = (self.sources().on(b)?, self.targets().on(b)?);
        let (map, starts) = (self.map(b)?, self.row_starts());
        let rows = StateRows {
            sources: sources.handle(),
            targets: targets.handle(),
            row_sequences: map.row_sequences.handle(),
            row_starts: map.row_starts.handle(),
            host_row_starts: starts.as_ptr(),
            n_sequences: starts.len() as u32 - 1,
            ..StateRows::default()
        };
        let mut out = [Handle::NONE; 2];
        match slot(rows, &mut out) {
            Err(error) if error.is_unimplemented() => return Ok(None),
            other => other?,
        }
        let [y, after] = out.map(|handle| Tensor::from_handle(b, handle));
        if pool.shape()? != after.shape()? {
            return Err(crate::Error::Other("the pool changed its shape".to_owned()));
        }
        Ok(Some(vec![
            y.narrow(0, 0, self.rows())?,
            after.narrow(0, 1, SLOTS - 1)?,
        ]))
    }

    /// The same through `rule`, from states `[S, ..]` to rows and states.
    fn composed(
        &self,
        b: &Backend,
        pool: &Tensor,
        rule: impl FnOnce(&Tensor, &RowMap) -> Result<(Tensor, Tensor)>,
    ) -> Result<Vec<Tensor>> {
        let sequences = self.sequences();
        let mut before = Vec::new();
        for (_, source, _) in &sequences {
            let held = pool.narrow(0, (*source).max(0), 1)?;
            before.push(if *source < 0 {
                Tensor::zeros(b, DType::F32, &held.shape()?)?
            } else {
                held
            });
        }
        let before = Tensor::concat(b, &before.iter().collect::<Vec<_>>(), 0)?;
        let (y, after) = rule(&before, &self.map(b)?)?;
        let mut slots: Vec<Tensor> = (0..SLOTS)
            .map(|slot| pool.narrow(0, slot, 1))
            .collect::<Result<_>>()?;
        for (i, (_, _, target)) in sequences.iter().enumerate() {
            slots[*target as usize] = after.narrow(0, i as i64, 1)?;
        }
        let after = Tensor::concat(b, &slots.iter().collect::<Vec<_>>(), 0)?;
        Ok(vec![
            y.narrow(0, 0, self.rows())?,
            after.narrow(0, 1, SLOTS - 1)?,
        ])
    }
}

/// Taps, channels, bias, activation.
#[derive(Debug, Clone, Copy)]
struct Conv(i64, i64, bool, u32);

impl Conv {
    fn run(self, b: &Backend, scene: &Scene, fused: bool) -> Result<Vec<Tensor>> {
        let Self(taps, width, biased, activation) = self;
        let x = Array::usual(scene.dtype, &[scene.all_rows(), width], 1).on(b)?;
        let weight = Array::usual(scene.dtype, &[width, taps], 2).on(b)?;
        let bias = if biased {
            Some(Array::usual(scene.dtype, &[width], 3).on(b)?)
        } else {
            None
        };
        let pool = Array::usual(DType::F32, &[SLOTS, taps - 1, width], 4).on(b)?;
        let conv = ShortConv {
            weight: &weight,
            bias: bias.as_ref(),
            activation,
        };
        if fused {
            let made = scene.fused(b, &pool, |rows, out| {
                let args = ShortConvPoolArgs {
                    x: x.handle(),
                    weight: weight.handle(),
                    bias: Tensor::handle_of(bias.as_ref()),
                    pool: pool.handle(),
                    rows,
                    activation,
                    ..ShortConvPoolArgs::default()
                };
                command!(b.table(), short_conv, &args, out)
            })?;
            if let Some(made) = made {
                return Ok(made);
            }
        }
        scene.composed(b, &pool, |before, map| {
            compose::short_conv(&x, &conv, before, map)
        })
    }
}

/// Key heads, value heads, widths of keys and values, a decay for each key element.
#[derive(Debug, Clone, Copy)]
struct Delta(i64, i64, i64, i64, bool);

impl Delta {
    fn run(self, b: &Backend, scene: &Scene, fused: bool) -> Result<Vec<Tensor>> {
        let Self(key_heads, heads, key_width, width, per_key) = self;
        let (rows, dtype) = (scene.all_rows(), scene.dtype);
        // Keys of about unit length, as families give them: longer ones let states explode.
        let unit = (key_width as f64).sqrt().recip();
        let keys = |seed| Array::spread(dtype, &[rows, key_heads, key_width], -unit, unit, seed);
        let (q, k) = (keys(1).on(b)?, keys(2).on(b)?);
        let v = Array::usual(dtype, &[rows, heads, width], 3).on(b)?;
        let g_shape = [rows, heads, key_width];
        let g_shape = if per_key { &g_shape[..] } else { &g_shape[..2] };
        let g = Array::spread(dtype, g_shape, -1.5, 0.0, 4).on(b)?;
        let beta = Array::spread(dtype, &[rows, heads], 0.0, 1.0, 5).on(b)?;
        let pool = Array::usual(DType::F32, &[SLOTS, heads, key_width, width], 6).on(b)?;
        let inputs = GatedDelta {
            q: &q,
            k: &k,
            v: &v,
            g: &g,
            beta: &beta,
        };
        if fused {
            let made = scene.fused(b, &pool, |rows, out| {
                let args = GatedDeltaPoolArgs {
                    q: q.handle(),
                    k: k.handle(),
                    v: v.handle(),
                    g: g.handle(),
                    beta: beta.handle(),
                    pool: pool.handle(),
                    rows,
                    ..GatedDeltaPoolArgs::default()
                };
                command!(b.table(), gated_delta, &args, out)
            })?;
            if let Some(made) = made {
                return Ok(made);
            }
        }
        scene.composed(b, &pool, |before, map| {
            compose::gated_delta(&inputs, before, map)
        })
    }
}

pub(super) fn run(suite: &mut Suite<'_>) {
    let convs = [
        Conv(4, 12, false, unary::SILU),
        Conv(3, 5, true, 0),
        Conv(2, 33, true, unary::SILU),
    ];
    let deltas = [
        Delta(2, 4, 8, 6, false),
        Delta(1, 1, 3, 5, true),
        Delta(3, 3, 16, 16, false),
        Delta(2, 2, 32, 40, true),
    ];
    for dtype in FLOATS {
        for scene in Scene::all(dtype) {
            for conv in convs {
                let case = format!("{conv:?} {}", scene.name());
                suite.check_all("short_conv", case.clone(), NEAR, |b| {
                    conv.run(b, &scene, true)
                });
                suite.check_against(
                    "short_conv",
                    format!("{case}, composed"),
                    NEAR,
                    |b| conv.run(b, &scene, false),
                    |b| conv.run(b, &scene, true),
                );
            }
            for delta in deltas {
                let case = format!("{delta:?} {}", scene.name());
                suite.check_all("gated_delta", case.clone(), NEAR, |b| {
                    delta.run(b, &scene, true)
                });
                suite.check_against(
                    "gated_delta",
                    format!("{case}, composed"),
                    NEAR,
                    |b| delta.run(b, &scene, false),
                    |b| delta.run(b, &scene, true),
                );
            }
        }
    }
    let scene = Scene {
        dtype: DType::F32,
        parts: vec![(2, 1, 1)],
        padding_rows: 0,
    };
    suite.refuses(
        "gated_delta",
        "value heads that key heads do not divide",
        status::INVALID_ARGUMENT,
        |b| {
            Ok(Delta(2, 3, 8, 8, false)
                .run(b, &scene, true)?
                .swap_remove(0))
        },
    );
}
