//! Weights that were used before: where their parts are and that these fit is found out once.
//!
//! A decode step uses every weight once, and what is known of a weight lies in memory that nothing else of
//! the step touches. What is remembered holds until one of the tensors ends, which the backend tells.

use core::cell::RefCell;

use mlxcel_abi::ops_args::QuantizedWeight;
use mlxcel_abi::{Result, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::QuantizedMatrix;

/// Handles count up from 1; weights of larger numbers are resolved each time.
const MOST: usize = 1 << 16;

struct Known {
    weight: QuantizedWeight,
    only_two: bool,
    /// None at its first use: rows of an embedding are a weight of their own that is used once, and what would be kept of it would
    /// end with the next step.
    matrix: Option<QuantizedMatrix<'static>>,
}

struct Weights {
    /// Backend and number of ends for which it holds.
    of: (usize, u64),
    /// In the order of their first use, which is that of a step: the processor fetches ahead.
    known: Vec<Known>,
    /// Where in `known`, 1 for the first, by the slot of the weight's handle.
    by_slot: Vec<u32>,
}

const NOTHING: Weights = Weights {
    of: (0, 0),
    known: Vec::new(),
    by_slot: Vec::new(),
};

thread_local! {
    static WEIGHTS: RefCell<Weights> = const { RefCell::new(NOTHING) };
}

impl Weights {
    fn index(&self, slot: usize) -> Option<usize> {
        let number = *self.by_slot.get(slot)?;
        (number as usize).checked_sub(1)
    }
}

/// Low half of a handle.
fn slot_of(t: Tensor) -> usize {
    (t.0 & 0xffff_ffff) as usize
}

fn is_same(a: &QuantizedWeight, b: &QuantizedWeight) -> bool {
    let spec = |w: &QuantizedWeight| (w.spec.mode, w.spec.bits, w.spec.group_size);
    [a.weight, a.scales, a.biases] == [b.weight, b.scales, b.biases] && spec(a) == spec(b)
}

/// What was kept of a weight. `only_two` as it was, or kept for two axes only.
///
/// # Safety
/// The tensors must live for `'a`.
pub(super) unsafe fn find<'a>(
    native: &Native<'_>,
    w: &QuantizedWeight,
    only_two: bool,
) -> Option<QuantizedMatrix<'a>> {
    WEIGHTS.with_borrow(|weights| {
        if weights.of != native.watched_ends() {
            return None;
        }
        let index = weights.index(slot_of(w.weight))?;
        let known = weights.known.get(index)?;
        let fits = is_same(&known.weight, w) && (known.only_two || !only_two);
        // A longer life is a shorter one; none of the tensors has ended.
        known.matrix.filter(|_| fits)
    })
}

/// Keeps what a weight is when it is used a second time.
///
/// # Safety
/// The matrix is that of the weight's tensors.
pub(super) unsafe fn keep(
    native: &Native<'_>,
    w: &QuantizedWeight,
    only_two: bool,
    matrix: &QuantizedMatrix<'_>,
) -> Result<()> {
    let slot = slot_of(w.weight);
    if slot >= MOST {
        return Ok(());
    }
    WEIGHTS.with_borrow_mut(|weights| {
        let of = native.watched_ends();
        if weights.of != of {
            weights.of = of;
            weights.known.clear();
            weights.by_slot.clear();
        }
        if weights.by_slot.len() <= slot {
            weights.by_slot.resize(slot + 1, 0);
        }
        let mut made = Known {
            weight: *w,
            only_two,
            matrix: None,
        };
        let index = weights.index(slot);
        let place = index.and_then(|index| weights.known.get_mut(index));
        let Some(place) = place else {
            weights.known.push(made);
            if let Some(number) = weights.by_slot.get_mut(slot) {
                *number = weights.known.len() as u32;
            }
            return Ok(());
        };
        if is_same(&place.weight, w) && watch(native, w)? {
            // SAFETY: only the lifetime is another; `find` gives it back as long as none of the tensors has ended.
            made.matrix = Some(unsafe {
                core::mem::transmute::<QuantizedMatrix<'_>, QuantizedMatrix<'static>>(*matrix)
            });
        }
        *place = made;
        Ok(())
    })
}

/// Has the ends of a weight's tensors be told. False where that of one is not.
fn watch(native: &Native<'_>, w: &QuantizedWeight) -> Result<bool> {
    for t in [w.weight, w.scales, w.biases] {
        if !t.is_none() && !native.watch(t)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Forgets everything, as a backend ends whose address another may get.
pub(super) fn forget() {
    WEIGHTS.set(NOTHING);
}
