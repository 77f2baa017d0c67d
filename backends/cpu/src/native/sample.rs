//! One token for every row of logits. There is no slot of MLX behind this one, so it refuses what it
//! does not take.

use core::ffi::c_void;
use std::cmp::Ordering;

use mlxcel_abi::fused_args::{MAX_TOP_K, NO_TOKEN, SampleArgs};
use mlxcel_abi::guard::guard;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::{Native, View};

pub(super) fn install(table: &mut BackendOps) {
    table.sample = sample;
}

unsafe extern "C" fn sample(
    ctx: *mut c_void,
    args: *const SampleArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        if out.is_null() {
            return Err(AbiError::invalid("sample: out is null"));
        }
        // SAFETY: the slot's contract: a live argument struct, and the table's own context.
        let (args, native) = unsafe { (SampleArgs::read(args)?, Native::from_raw(ctx)?) };
        let t = tokens(native, &args)?;
        // SAFETY: not null, and the caller's to write.
        unsafe { out.write(t) };
        Ok(())
    };
    // SAFETY: `err` is null or the caller's.
    unsafe { guard(err, body) }
}

/// Numbers of one row.
#[derive(Debug, Clone, Copy)]
struct Draw {
    top_k: usize,
    top_p: f64,
    min_p: f64,
    temperature: f64,
    uniform: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    logit: f32,
    token: u32,
}

/// Likelier first, lower id first among equals.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

fn tokens(native: Native<'_>, args: &SampleArgs) -> Result<Tensor> {
    let logits = native.view(args.logits)?;
    let &[rows, vocabulary] = logits.shape() else {
        return Err(AbiError::invalid(format!(
            "sample: logits have the shape {:?}, expected [rows, vocabulary]",
            logits.shape()
        )));
    };
    if vocabulary == 0 {
        return Err(AbiError::invalid("sample: the vocabulary is empty"));
    }
    let top_k: Vec<i32> = column(native, "top_k", args.top_k, DType::I32, rows)?;
    let real = |name, t| column::<f32>(native, name, t, DType::F32, rows);
    let (top_p, min_p) = (real("top_p", args.top_p)?, real("min_p", args.min_p)?);
    let temperature = real("temperature", args.temperature)?;
    let uniform = real("uniform", args.uniform)?;
    let mut draws = Vec::with_capacity(top_k.len());
    for (row, &k) in top_k.iter().enumerate() {
        let at = |column: &[f32]| column.get(row).copied().map_or(f64::NAN, f64::from);
        let draw = Draw {
            top_k: usize::try_from(k).unwrap_or(0),
            top_p: at(&top_p),
            min_p: at(&min_p),
            temperature: at(&temperature),
            uniform: at(&uniform),
        };
        draw.check(row)?;
        draws.push(draw);
    }
    let kind = match logits.dtype {
        DType::F32 | DType::F16 | DType::BF16 => logits.dtype,
        other => {
            return Err(AbiError::invalid(format!(
                "sample: logits are {}, expected f32, f16 or bf16",
                other.name()
            )));
        }
    };
    let (t, out) = native.allocate(DType::U32, &[rows])?;
    // SAFETY: freshly allocated with this type; nobody else knows it.
    let out = unsafe { out.as_mut_slice::<u32>() };
    let (mut row, mut list) = (Vec::new(), Vec::new());
    for ((index, draw), out) in draws.iter().enumerate().zip(out) {
        // SAFETY: the element type was matched; the caller holds the tensor during the call.
        let row = unsafe { widened(&logits, kind, index, vocabulary as usize, &mut row) };
        *out = draw.token(row, &mut list);
    }
    Ok(t)
}

/// One value for every row.
fn column<T: Copy>(
    native: Native<'_>,
    name: &str,
    t: Tensor,
    dtype: DType,
    rows: i64,
) -> Result<Vec<T>> {
    let view = native.view(t)?;
    if view.shape() != [rows] || view.dtype != dtype || !view.is_contiguous {
        return Err(AbiError::invalid(format!(
            "sample: {name} is {} {:?}, expected {} [{rows}] in one piece",
            view.dtype.name(),
            view.shape(),
            dtype.name()
        )));
    }
    // SAFETY: a contiguous view of the checked type of a tensor that the caller holds.
    Ok(unsafe { view.as_slice::<T>() }.to_vec())
}

/// A row of logits as f32.
///
/// # Safety
/// `kind` is the view's own type, `index` is below its rows and `width` its last dimension, and the tensor
/// lives for `'a`.
unsafe fn widened<'a>(
    logits: &View,
    kind: DType,
    index: usize,
    width: usize,
    scratch: &'a mut Vec<f32>,
) -> &'a [f32] {
    let &[row_stride, stride] = logits.strides() else {
        return &[];
    };
    let first = index as i64 * row_stride;
    if kind == DType::F32 && stride == 1 {
        // SAFETY: the row is inside the tensor, whose last axis is in one piece.
        return unsafe {
            core::slice::from_raw_parts(logits.data.cast::<f32>().offset(first as isize), width)
        };
    }
    scratch.clear();
    scratch.extend((0..width as i64).map(|column| {
        let at = (first + column * stride) as isize;
        // SAFETY: the element is inside the tensor, which has elements of this type.
        unsafe {
            match kind {
                DType::F32 => *logits.data.cast::<f32>().offset(at),
                DType::F16 => (*logits.data.cast::<half::f16>().offset(at)).to_f32(),
                _ => (*logits.data.cast::<half::bf16>().offset(at)).to_f32(),
            }
        }
    }));
    scratch
}

impl Draw {
    fn check(&self, row: usize) -> Result<()> {
        let fits = (1..=MAX_TOP_K as usize).contains(&self.top_k)
            && (0.0..=1.0).contains(&self.top_p)
            && (0.0..=1.0).contains(&self.min_p)
            && self.temperature > 0.0
            && (0.0..1.0).contains(&self.uniform);
        if fits {
            return Ok(());
        }
        Err(AbiError::invalid(format!(
            "sample: row {row} has a number out of its range: {self:?}"
        )))
    }

    fn token(&self, logits: &[f32], list: &mut Vec<Candidate>) -> u32 {
        if !largest(logits, self.top_k, list) {
            return NO_TOKEN;
        }
        list.sort_unstable_by(by_rank);
        let Some(max) = list.first().map(|best| f64::from(best.logit)) else {
            return NO_TOKEN;
        };
        if self.top_k > 1 {
            self.keep_head(max, list);
            let floor = max + self.min_p.ln();
            let kept = list.partition_point(|c| f64::from(c.logit) >= floor);
            list.truncate(kept.max(1));
        }
        let weight = |c: &Candidate| ((f64::from(c.logit) - max) / self.temperature).exp();
        let limit = self.uniform * list.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        let found = list.iter().find(|candidate| {
            sum += weight(candidate);
            sum > limit
        });
        found.map_or(NO_TOKEN, |candidate| candidate.token)
    }

    /// Keeps the fewest of the likeliest whose probability reaches `top_p`.
    fn keep_head(&self, max: f64, list: &mut Vec<Candidate>) {
        if self.top_p >= 1.0 {
            return;
        }
        let weight = |c: &Candidate| (f64::from(c.logit) - max).exp();
        let enough = self.top_p * list.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        let last = list.iter().position(|candidate| {
            sum += weight(candidate);
            sum >= enough
        });
        list.truncate(last.map_or(list.len(), |last| last + 1));
    }
}

/// Logits looked at together: one comparison passes a block by in which nothing is of interest.
const BLOCK: usize = 32;

/// Fills `list` with the `count` largest of a row. False when one of them is no number.
fn largest(logits: &[f32], count: usize, list: &mut Vec<Candidate>) -> bool {
    list.clear();
    let most = count * 4 + BLOCK;
    let mut floor = f32::NEG_INFINITY;
    for (block, start) in logits.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
        let (mut max, mut is_clean) = (f32::NEG_INFINITY, true);
        for &logit in block {
            max = if logit > max { logit } else { max };
            is_clean &= logit < f32::INFINITY;
        }
        if !is_clean {
            return false;
        }
        if max <= floor {
            continue;
        }
        for (&logit, token) in block.iter().zip(start..) {
            // Among equals the lower id, which came first, stays.
            if logit > floor {
                list.push(Candidate { logit, token });
            }
        }
        if list.len() >= most {
            list.select_nth_unstable_by(count - 1, by_rank);
            list.truncate(count);
            floor = list.last().map_or(floor, |last| last.logit);
        }
    }
    if count < list.len() {
        list.select_nth_unstable_by(count - 1, by_rank);
        list.truncate(count);
    }
    true
}
