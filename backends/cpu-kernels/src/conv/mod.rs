//! Convolutions in one to three spatial dimensions, channels last, as products of patches.
//!
//! A plain convolution gathers for every output position the inputs that it sees (im2col), some
//! positions at a time, and multiplies them with the kernel, whose memory is that of a weight
//! `[outputs, taps * channels]`. A transposed one multiplies every input position with the kernel as
//! a weight `[outputs * taps, channels]` and adds the results where they belong. A depthwise one
//! has too little to multiply for either and is summed directly.

use std::sync::Mutex;

use crate::Isa;
use crate::gemm::{self, Product, Weight};
use crate::isa::dispatch;
use crate::pool::Pool;
use crate::simd::Simd;

/// Bytes of patches that are multiplied at a time: they stay in the last-level cache.
const PATCH_BYTES: usize = 4 << 20;

/// Output positions that one thread gathers at a time.
const POSITIONS: usize = 16;

/// Shape of a convolution. Axes that a one- or two-dimensional one does not have come first, with
/// size 1, stride 1 and no padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Pictures, clips and so on.
    pub batch: usize,
    /// Sizes of the input.
    pub input: [usize; 3],
    /// Channels of the input.
    pub channels: usize,
    /// Sizes of the kernel.
    pub kernel: [usize; 3],
    /// Sizes of the result.
    pub output: [usize; 3],
    /// Channels of the result.
    pub outputs: usize,
    /// Groups; divide both numbers of channels.
    pub groups: usize,
    /// Steps along the input (plain) or the result (transposed).
    pub stride: [usize; 3],
    /// Zeros before the input (plain), or what is cut off before the result (transposed).
    pub padding: [usize; 3],
    /// Distance of neighbouring taps.
    pub dilation: [usize; 3],
}

impl Shape {
    fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Input positions of all pictures.
    fn inputs_len(&self) -> usize {
        self.batch * self.input.iter().product::<usize>()
    }

    /// Output positions of all pictures.
    fn outputs_len(&self) -> usize {
        self.batch * self.output.iter().product::<usize>()
    }

    /// Channels of the input that a group sees.
    fn group_channels(&self) -> usize {
        self.channels / self.groups
    }

    /// Where a tap of the kernel meets the axis: `at * stride + tap * dilation - padding`, if inside.
    fn meet(&self, at: [usize; 3], tap: [usize; 3], size: [usize; 3]) -> Option<usize> {
        let mut index = 0;
        for axis in 0..3 {
            let place = at[axis] * self.stride[axis] + tap[axis] * self.dilation[axis];
            let place = place.checked_sub(self.padding[axis])?;
            if place >= size[axis] {
                return None;
            }
            index = index * size[axis] + place;
        }
        Some(index)
    }

    /// Whether patches are the input itself.
    fn is_pointwise(&self) -> bool {
        self.taps() == 1
            && self.stride == [1; 3]
            && self.padding == [0; 3]
            && self.input == self.output
    }

    /// Lengths of input, kernel and result, if the numbers go together.
    fn lengths(&self) -> Option<[usize; 3]> {
        let whole = self.groups > 0
            && self.channels.is_multiple_of(self.groups)
            && self.outputs.is_multiple_of(self.groups)
            && self.dilation.iter().chain(&self.stride).all(|n| *n > 0);
        whole.then(|| {
            [
                self.inputs_len() * self.channels,
                self.outputs * self.taps() * self.group_channels(),
                self.outputs_len() * self.outputs,
            ]
        })
    }
}

/// Index along three axes.
fn place(index: usize, size: [usize; 3]) -> [usize; 3] {
    [
        index / (size[1] * size[2]),
        index / size[2] % size[1],
        index % size[2],
    ]
}

/// Memory that is kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    patches: Vec<f32>,
    products: Vec<f32>,
}

/// What every convolution is given.
pub struct Operands<'a> {
    /// `[batch, input.., channels]`.
    pub x: &'a [f32],
    /// `[outputs, kernel.., channels / groups]`.
    pub w: &'a [f32],
    /// `[batch, output.., outputs]`.
    pub y: &'a mut [f32],
}

struct Rows(*mut f32);
// SAFETY: threads write disjoint rows.
unsafe impl Sync for Rows {}

impl Rows {
    /// # Safety
    /// Rows of different threads must not overlap, and the range must be inside.
    #[allow(clippy::mut_from_ref, reason = "exclusiveness is the caller's promise")]
    unsafe fn at(&self, first: usize, len: usize) -> &mut [f32] {
        // SAFETY: forwarded to the caller.
        unsafe { core::slice::from_raw_parts_mut(self.0.add(first), len) }
    }
}

/// A plain convolution. False when a kernel panicked.
///
/// # Panics
/// When the operands do not have the lengths of the shape.
#[must_use]
pub fn conv(
    isa: Isa,
    pool: &mut Pool,
    shape: &Shape,
    operands: Operands<'_>,
    scratch: &mut Scratch,
    panels: &[Mutex<gemm::Scratch>],
) -> bool {
    let Operands { x, w, y } = operands;
    assert!(shape.lengths() == Some([x.len(), w.len(), y.len()]));
    if shape.group_channels() == 1 && shape.outputs == shape.channels {
        return depthwise(isa, pool, shape, x, w, y);
    }
    let (columns, rows) = (
        shape.taps() * shape.group_channels(),
        shape.outputs / shape.groups,
    );
    let positions = shape.outputs_len();
    let at_a_time = (PATCH_BYTES / (4 * columns.max(1))).clamp(POSITIONS, positions.max(POSITIONS));
    for group in 0..shape.groups {
        let weight = &w[group * rows * columns..(group + 1) * rows * columns];
        let mut first = 0;
        while first < positions {
            let n = at_a_time.min(positions - first);
            let patches = if shape.is_pointwise() && shape.groups == 1 {
                &x[first * columns..(first + n) * columns]
            } else {
                scratch.patches.resize(n * columns, 0.0);
                if !gather(pool, shape, group, first, x, &mut scratch.patches) {
                    return false;
                }
                &scratch.patches
            };
            let product = Product {
                x: patches,
                weight: Weight::F32(weight),
                rows,
                columns,
            };
            let out = &mut y[first * shape.outputs..(first + n) * shape.outputs];
            let done = if shape.groups == 1 {
                gemm::matmul(isa, pool, &product, out, panels)
            } else {
                scratch.products.resize(n * rows, 0.0);
                let done = gemm::matmul(isa, pool, &product, &mut scratch.products, panels);
                let parts = scratch.products.chunks_exact(rows);
                for (to, from) in out.chunks_exact_mut(shape.outputs).zip(parts) {
                    to[group * rows..(group + 1) * rows].copy_from_slice(from);
                }
                done
            };
            if !done {
                return false;
            }
            first += n;
        }
    }
    true
}

/// Patches of output positions `first..`, `[positions, taps, group channels]`.
fn gather(
    pool: &mut Pool,
    shape: &Shape,
    group: usize,
    first: usize,
    x: &[f32],
    patches: &mut [f32],
) -> bool {
    let width = shape.group_channels();
    let columns = shape.taps() * width;
    let n = patches.len() / columns;
    let out_len: usize = shape.output.iter().product();
    let in_len: usize = shape.input.iter().product();
    let rows = Rows(patches.as_mut_ptr());
    let rows = &rows;
    pool.share(n.div_ceil(POSITIONS), &|_, block| {
        for row in block * POSITIONS..((block + 1) * POSITIONS).min(n) {
            let (picture, at) = (
                (first + row) / out_len,
                place((first + row) % out_len, shape.output),
            );
            // SAFETY: blocks are disjoint and inside.
            let patch = unsafe { rows.at(row * columns, columns) };
            for (tap, to) in patch.chunks_exact_mut(width).enumerate() {
                match shape.meet(at, place(tap, shape.kernel), shape.input) {
                    None => to.fill(0.0),
                    Some(index) => {
                        let from = (picture * in_len + index) * shape.channels + group * width;
                        to.copy_from_slice(&x[from..from + width]);
                    }
                }
            }
        }
    })
}

/// One output position of a depthwise convolution.
#[derive(Clone, Copy)]
struct Sum<'a> {
    /// For every tap that meets the input: its first element of `x`, and the tap.
    met: &'a [(usize, usize)],
    x: *const f32,
    /// `[taps, channels]`.
    w: *const f32,
    channels: usize,
    y: *mut f32,
}

#[inline(always)]
unsafe fn depthwise_sum<S: Simd>(sum: &Sum<'_>) {
    let mut channel = 0;
    // SAFETY: the caller vouches for `channels` elements at each place.
    unsafe {
        while channel < sum.channels {
            let n = (sum.channels - channel).min(S::LANES);
            let mut acc = S::zero();
            for (from, tap) in sum.met {
                let (x, w) = (
                    sum.x.add(from + channel),
                    sum.w.add(tap * sum.channels + channel),
                );
                acc = S::load_first(x, n).mul_add(S::load_first(w, n), acc);
            }
            acc.store_first(sum.y.add(channel), n);
            channel += S::LANES;
        }
    }
}

dispatch! {
    unsafe fn run_depthwise(sum: &Sum<'_>) = depthwise_sum
}

fn depthwise(
    isa: Isa,
    pool: &mut Pool,
    shape: &Shape,
    x: &[f32],
    w: &[f32],
    y: &mut [f32],
) -> bool {
    let (taps, channels) = (shape.taps(), shape.channels);
    let mut by_tap = vec![0.0; w.len()];
    for (channel, row) in w.chunks_exact(taps).enumerate() {
        for (tap, value) in row.iter().enumerate() {
            by_tap[tap * channels + channel] = *value;
        }
    }
    let out_len: usize = shape.output.iter().product();
    let in_len: usize = shape.input.iter().product();
    let positions = shape.outputs_len();
    let rows = Rows(y.as_mut_ptr());
    let (rows, by_tap) = (&rows, &by_tap);
    pool.share(positions.div_ceil(POSITIONS), &|_, block| {
        let mut met = Vec::with_capacity(taps);
        for position in block * POSITIONS..((block + 1) * POSITIONS).min(positions) {
            let (picture, at) = (position / out_len, place(position % out_len, shape.output));
            met.clear();
            met.extend((0..taps).filter_map(|tap| {
                let index = shape.meet(at, place(tap, shape.kernel), shape.input)?;
                Some(((picture * in_len + index) * channels, tap))
            }));
            // SAFETY: `isa` was detected; lengths were checked; blocks are disjoint.
            unsafe {
                let y = rows.at(position * channels, channels).as_mut_ptr();
                run_depthwise(
                    isa,
                    &Sum {
                        met: &met,
                        x: x.as_ptr(),
                        w: by_tap.as_ptr(),
                        channels,
                        y,
                    },
                );
            }
        }
    })
}

/// A transposed convolution. False when a kernel panicked.
///
/// # Panics
/// When the operands do not have the lengths of the shape.
#[must_use]
pub fn transposed(
    isa: Isa,
    pool: &mut Pool,
    shape: &Shape,
    operands: Operands<'_>,
    scratch: &mut Scratch,
    panels: &[Mutex<gemm::Scratch>],
) -> bool {
    let Operands { x, w, y } = operands;
    assert!(shape.lengths() == Some([x.len(), w.len(), y.len()]));
    y.fill(0.0);
    let (taps, columns, outputs) = (
        shape.taps(),
        shape.group_channels(),
        shape.outputs / shape.groups,
    );
    let rows = outputs * taps;
    let positions = shape.inputs_len();
    let out_len: usize = shape.output.iter().product();
    let in_len: usize = shape.input.iter().product();
    let at_a_time = (PATCH_BYTES / (4 * rows.max(1))).clamp(1, positions.max(1));
    for group in 0..shape.groups {
        let weight = &w[group * rows * columns..(group + 1) * rows * columns];
        let mut first = 0;
        while first < positions {
            let n = at_a_time.min(positions - first);
            let input = if shape.groups == 1 {
                &x[first * columns..(first + n) * columns]
            } else {
                scratch.patches.clear();
                for row in x.chunks_exact(shape.channels).skip(first).take(n) {
                    let part = &row[group * columns..(group + 1) * columns];
                    scratch.patches.extend_from_slice(part);
                }
                &scratch.patches
            };
            scratch.products.resize(n * rows, 0.0);
            let product = Product {
                x: input,
                weight: Weight::F32(weight),
                rows,
                columns,
            };
            if !gemm::matmul(isa, pool, &product, &mut scratch.products, panels) {
                return false;
            }
            // One thread adds for each range of output channels: positions meet in the result.
            let (sums, parts) = (Rows(y.as_mut_ptr()), &scratch.products);
            let sums = &sums;
            let done = pool.split(outputs, 1, 4, &|range| {
                for (row, part) in parts.chunks_exact(rows).enumerate() {
                    let (picture, at) = (
                        (first + row) / in_len,
                        place((first + row) % in_len, shape.input),
                    );
                    for tap in 0..taps {
                        let Some(index) = shape.meet(at, place(tap, shape.kernel), shape.output)
                        else {
                            continue;
                        };
                        let to = (picture * out_len + index) * shape.outputs + group * outputs;
                        // SAFETY: inside the result; ranges of output channels are disjoint.
                        let to = unsafe { sums.at(to + range.start, range.len()) };
                        for (y, output) in to.iter_mut().zip(range.clone()) {
                            *y += part[output * taps + tap];
                        }
                    }
                }
            });
            if !done {
                return false;
            }
            first += n;
        }
    }
    true
}

#[cfg(test)]
mod tests;
