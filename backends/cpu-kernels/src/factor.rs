//! Storage types of scales, biases, keys and values.

use crate::simd::{Simd, up_to_four};

/// A stored number.
pub(crate) trait Factor: Copy {
    /// Whether nibbles beside it are numbers of e2m1.
    const IS_OF_FLOATS: bool = false;
    /// Spreads the first `n` (at most four) elements over the lanes, see [`Simd::spread`].
    unsafe fn spread<S: Simd>(of: *const Self, n: usize, places: S::Places) -> S;
    /// Loads the first `n` lanes, the rest is 0.
    unsafe fn load<S: Simd>(from: *const Self, n: usize) -> S;
}

/// Bits of f16.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(u16);

/// Bits of bf16.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

/// Exponents of mxfp4, from 2 to 254: `2^(e - 128)`.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct E8m0(u8);

impl Factor for E8m0 {
    const IS_OF_FLOATS: bool = true;
    #[inline(always)]
    unsafe fn spread<S: Simd>(of: *const E8m0, n: usize, places: S::Places) -> S {
        // SAFETY: n elements are read.
        unsafe {
            let mut bytes = [2; 4];
            if n >= 4 {
                bytes = of.cast::<[u8; 4]>().read();
            } else {
                core::ptr::copy_nonoverlapping(of.cast(), bytes.as_mut_ptr(), n);
            }
            // An exponent in place is a bf16; no byte borrows from the next.
            let exponents = u64::from(u32::from_le_bytes(bytes) - 0x0101_0101);
            S::spread_bf16(S::deposit(exponents, 0x7f80_7f80_7f80_7f80), places)
        }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const E8m0, n: usize) -> S {
        // SAFETY: n elements are read.
        unsafe {
            // 1 becomes 0.
            let mut bytes = [1u8; 16];
            let mut from = from.cast();
            if n < S::LANES {
                core::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), n);
                from = bytes.as_ptr();
            }
            S::load_u8(from).sub(S::splat(128.0)).exp2_int()
        }
    }
}

impl Factor for f32 {
    #[inline(always)]
    unsafe fn spread<S: Simd>(of: *const f32, n: usize, places: S::Places) -> S {
        // SAFETY: n elements are read, and four of the buffer.
        unsafe {
            if n >= 4 {
                return S::spread(of, places);
            }
            let mut four = [0.0; 4];
            S::load_first(of, n).store_first(four.as_mut_ptr(), 4);
            S::spread(four.as_ptr(), places)
        }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32, n: usize) -> S {
        // SAFETY: forwarded to the caller, here and below.
        unsafe {
            if n >= S::LANES {
                S::load(from)
            } else {
                S::load_first(from, n)
            }
        }
    }
}

impl Factor for F16 {
    #[inline(always)]
    unsafe fn spread<S: Simd>(of: *const F16, n: usize, places: S::Places) -> S {
        // SAFETY: as above.
        unsafe { S::spread_f16(up_to_four(of.cast(), n), places) }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const F16, n: usize) -> S {
        // SAFETY: as above.
        unsafe {
            if n >= S::LANES {
                S::load_f16(from.cast())
            } else {
                S::load_first_f16(from.cast(), n)
            }
        }
    }
}

impl Factor for Bf16 {
    #[inline(always)]
    unsafe fn spread<S: Simd>(of: *const Bf16, n: usize, places: S::Places) -> S {
        // SAFETY: as above.
        unsafe { S::spread_bf16(up_to_four(of.cast(), n), places) }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Bf16, n: usize) -> S {
        // SAFETY: as above.
        unsafe {
            if n >= S::LANES {
                S::load_bf16(from.cast())
            } else {
                S::load_first_bf16(from.cast(), n)
            }
        }
    }
}

/// Spreads factors `at..` of a row of `n`. With `WHOLE` the caller vouches for four of them.
#[inline(always)]
pub(crate) unsafe fn spread<S: Simd, K: Factor, const WHOLE: bool>(
    row: *const K,
    at: usize,
    n: usize,
    places: S::Places,
) -> S {
    // SAFETY: the caller vouches for n elements, and `at < n`.
    unsafe { K::spread(row.add(at), if WHOLE { 4 } else { (n - at).min(4) }, places) }
}
