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

/// The numbers of a tensor of floats; none where there are no elements, for other types, and for f32 with gaps unless the call closes
/// them. They live until the end of the call under way, and as long as the tensor.
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
    // SAFETY: the runs of a view are elements of its tensor, which the caller holds, and of its type.
    unsafe {
        match half {
            Some(half) => in_order::<u16>(
                &view,
                numbers,
                |run, to| half.widen(run, to),
                |bits| half.value(bits),
            ),
            None => in_order::<f32>(&view, numbers, |run, to| to.copy_from_slice(run), |x| x),
        }
    }
    Ok(Some(Floats { view: to, given }))
}

/// Elements of a view in their order: runs of neighbours at once, others one by one.
///
/// # Safety
/// The view's elements have type `T`, and its tensor is held during the call.
unsafe fn in_order<T: Copy>(
    view: &View,
    to: &mut [f32],
    run: impl Fn(&[T], &mut [f32]),
    one: impl Fn(T) -> f32,
) {
    let first = view.data.cast::<T>();
    if view.is_contiguous {
        // SAFETY: all elements are neighbours; the rest is the caller's promise.
        run(unsafe { view.as_slice() }, to);
        return;
    }
    let (Some((width, leading)), Some((step, strides))) =
        (view.shape().split_last(), view.strides().split_last())
    else {
        return;
    };
    let (width, step) = (*width as usize, *step as isize);
    let mut at = vec![0_i64; leading.len()];
    for to in to.chunks_exact_mut(width) {
        let offset: i64 = at.iter().zip(strides).map(|(i, s)| i * s).sum();
        // SAFETY: strides lead to elements of the view's tensor.
        unsafe {
            let first = first.offset(offset as isize);
            if step == 1 {
                run(core::slice::from_raw_parts(first, width), to);
            } else {
                let elements = to.iter_mut().enumerate();
                elements.for_each(|(i, to)| *to = one(first.offset(i as isize * step).read()));
            }
        }
        for (i, dim) in at.iter_mut().zip(leading).rev() {
            *i += 1;
            if *i < *dim {
                break;
            }
            *i = 0;
        }
    }
}

/// A contiguous view of whole numbers.
pub(super) fn integers(native: &Native<'_>, t: Tensor) -> Result<Option<View>> {
    let view = native.view(t)?;
    Ok((view.is_contiguous && view.dtype == DType::I32).then_some(view))
}
