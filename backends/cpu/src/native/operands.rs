//! Operands as kernels read them: f32, one element after the other.
//!
//! What comes in f16 or bf16 is widened, which loses nothing; what a kernel makes of it is rounded once, at the end
//! ([`super::made`]). Copies live as long as the call that needs them.

use core::cell::RefCell;
use core::ops::Deref;

use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_cpu_kernels::halves::Half;

/// What the call under way needs beside its operands.
#[derive(Default)]
struct Copies {
    made: Vec<Tensor>,
    /// Whether f32 with gaps is copied too.
    closes_gaps: bool,
}

thread_local! {
    static COPIES: RefCell<Copies> = RefCell::default();
}

/// A call, at whose end its copies go away.
pub(super) struct Call<'a> {
    native: Native<'a>,
}

impl<'a> Call<'a> {
    /// Of several rows there may be gaps where of one there are none, which must not decide who computes a row where rows are
    /// kept apart: `closes_gaps` copies what has gaps.
    pub(super) fn begin(native: Native<'a>, closes_gaps: bool) -> Self {
        COPIES.with_borrow_mut(|copies| copies.closes_gaps = closes_gaps);
        Self { native }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let made = COPIES.with_borrow_mut(|copies| core::mem::take(&mut copies.made));
        for copy in made {
            // Handles of our own are live; there is nobody to tell otherwise.
            let _ = self.native.release(copy);
        }
    }
}

/// A contiguous view of f32.
#[derive(Clone, Copy)]
pub(super) struct Floats {
    view: View,
    /// The type in which the operand came.
    pub(super) given: DType,
}

impl Deref for Floats {
    type Target = View;

    fn deref(&self) -> &View {
        &self.view
    }
}

/// The type of 16 bits, if it is one.
pub(super) fn half_of(dtype: DType) -> Option<Half> {
    match dtype {
        DType::F16 => Some(Half::F16),
        DType::BF16 => Some(Half::Bf16),
        _ => None,
    }
}

/// The type of what is made of operands of both: f32 where they do not agree.
pub(super) fn joint(a: DType, b: DType) -> DType {
    if a == b { a } else { DType::F32 }
}

/// The numbers of a tensor of floats, or none where there are no elements or other types. They live until the end of the call.
pub(super) fn floats(native: &Native<'_>, t: Tensor) -> Result<Option<Floats>> {
    let view = native.view(t)?;
    let (given, half) = (view.dtype, half_of(view.dtype));
    if (half.is_none() && given != DType::F32) || view.is_empty() {
        return Ok(None);
    }
    if half.is_none() {
        if view.is_contiguous {
            return Ok(Some(Floats { view, given }));
        }
        if !COPIES.with_borrow(|copies| copies.closes_gaps) {
            return Ok(None);
        }
    }
    let (copy, to) = native.allocate(DType::F32, view.shape())?;
    COPIES.with_borrow_mut(|copies| copies.made.push(copy));
    // SAFETY: freshly allocated with this type; nobody else knows it.
    let numbers = unsafe { to.as_mut_slice::<f32>() };
    match half {
        // SAFETY: a contiguous view of 16-bit elements of a tensor that the caller holds.
        Some(half) if view.is_contiguous => half.widen(unsafe { view.as_slice::<u16>() }, numbers),
        Some(half) => in_order(&view, numbers, |at| {
            // SAFETY: the offset of an element of 16 bits, of a tensor that the caller holds.
            half.value(unsafe { view.data.cast::<u16>().offset(at).read() })
        }),
        None => in_order(&view, numbers, |at| {
            // SAFETY: the offset of an element of 32 bits, of a tensor that the caller holds.
            unsafe { view.data.cast::<f32>().offset(at).read() }
        }),
    }
    Ok(Some(Floats { view: to, given }))
}

/// Elements of a view with gaps, whose offsets `read` is given: strides lead to elements of the view's tensor.
fn in_order(view: &View, to: &mut [f32], read: impl Fn(isize) -> f32) {
    let mut at = vec![0_i64; view.shape().len()];
    for element in to {
        let offset: i64 = at.iter().zip(view.strides()).map(|(i, s)| i * s).sum();
        *element = read(offset as isize);
        for (i, dim) in at.iter_mut().zip(view.shape()).rev() {
            *i += 1;
            if *i < *dim {
                break;
            }
            *i = 0;
        }
    }
}
