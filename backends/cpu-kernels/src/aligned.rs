//! Buffers of numbers that start at a cache line: a load of 64 bytes across two lines takes as long as
//! three inside one.

/// A number whose every bit pattern is one, and all zeros 0.
///
/// # Safety
/// Implementors are plain numbers of at most 64 bytes whose size divides 64.
pub(crate) unsafe trait Number: Copy + Default {}
// SAFETY: integers and floats.
unsafe impl Number for i8 {}
// SAFETY: as above.
unsafe impl Number for i16 {}
// SAFETY: as above.
unsafe impl Number for i32 {}
// SAFETY: as above.
unsafe impl Number for u32 {}
// SAFETY: as above.
unsafe impl Number for f32 {}

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A slice of numbers that starts at a cache line.
#[derive(Debug)]
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    len: usize,
    kind: core::marker::PhantomData<T>,
}

impl<T> Default for Aligned<T> {
    fn default() -> Self {
        Self {
            lines: Vec::new(),
            len: 0,
            kind: core::marker::PhantomData,
        }
    }
}

impl<T: Number> Aligned<T> {
    /// Makes the slice `len` numbers long. What they are is unspecified.
    pub(crate) fn set_len(&mut self, len: usize) {
        let lines = len.div_ceil(64 / size_of::<T>());
        self.lines.resize(lines, Line([0; 64]));
        self.len = len;
    }
}

impl<T: Number> core::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the lines hold `len` numbers or more, and are initialised.
        unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Number> core::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { core::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_start_at_a_line_and_are_as_long_as_asked() {
        let mut numbers = Aligned::<f32>::default();
        assert!(numbers.is_empty());
        for len in [1, 16, 17, 1000, 3] {
            numbers.set_len(len);
            numbers.fill(1.5);
            assert_eq!(numbers.len(), len);
            assert_eq!(numbers.as_ptr() as usize % 64, 0);
            assert!(numbers.iter().all(|x| *x == 1.5));
        }
    }
}
