//! Reading what a slot was given: pointers with lengths, dimensions, flags. Refuses here what would
//! crash MLX instead of making it throw.

use mlxcel_abi::types::MAX_DIMS;

use crate::fault::Fault;

pub(crate) type Result<T> = core::result::Result<T, Fault>;

/// The `n` values at `ptr`; null is allowed for none.
///
/// # Safety
/// `ptr` must have `n` readable values for `'a` unless it is null.
pub(crate) unsafe fn values<'a, T>(ptr: *const T, n: usize, what: &str) -> Result<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    if ptr.is_null() || !ptr.is_aligned() {
        return Err(Fault::invalid(format!(
            "{what}: {n} values are at a null or misaligned pointer"
        )));
    }
    if n > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Fault::invalid(format!(
            "{what}: {n} values are more than memory can hold"
        )));
    }
    // SAFETY: not null, aligned, and the caller vouches for the range.
    Ok(unsafe { core::slice::from_raw_parts(ptr, n) })
}

/// As [`values`], one per axis.
///
/// # Safety
/// As for [`values`].
pub(crate) unsafe fn per_axis<'a, T>(ptr: *const T, n: u32, what: &str) -> Result<&'a [T]> {
    if n as usize > MAX_DIMS {
        return Err(Fault::invalid(format!(
            "{what}: {n} axes are given, at most {MAX_DIMS} are possible"
        )));
    }
    // SAFETY: forwarded to the caller.
    unsafe { values(ptr, n as usize, what) }
}

/// A shape: dimensions that MLX can express.
///
/// # Safety
/// As for [`values`].
pub(crate) unsafe fn shape<'a>(ptr: *const i64, n: u32) -> Result<&'a [i64]> {
    // SAFETY: forwarded to the caller.
    let dims = unsafe { per_axis(ptr, n, "dims") }?;
    check_dims(dims, 0)?;
    Ok(dims)
}

/// A shape in which one dimension may be -1.
///
/// # Safety
/// As for [`values`].
pub(crate) unsafe fn open_shape<'a>(ptr: *const i64, n: u32) -> Result<&'a [i64]> {
    // SAFETY: forwarded to the caller.
    let dims = unsafe { per_axis(ptr, n, "dims") }?;
    check_dims(dims, -1)?;
    if dims.iter().filter(|&&dim| dim == -1).count() > 1 {
        return Err(Fault::invalid(format!(
            "only one dimension of {dims:?} can be left open"
        )));
    }
    Ok(dims)
}

/// The same for dimensions that are already a slice.
pub(crate) fn check_dims(dims: &[i64], least: i64) -> Result<()> {
    if let Some(dim) = dims
        .iter()
        .find(|&&dim| dim < least || dim > i64::from(i32::MAX))
    {
        return Err(Fault::invalid(format!(
            "dimension {dim} of {dims:?} is outside {least} to {}",
            i32::MAX
        )));
    }
    Ok(())
}

/// A flag that is 0 or 1.
pub(crate) fn flag(value: u32, what: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Fault::invalid(format!("{what} is 0 or 1, found {other}"))),
    }
}

/// A count that MLX keeps in 32 signed bits.
pub(crate) fn small(value: u32, what: &str) -> Result<i32> {
    i32::try_from(value)
        .map_err(|_| Fault::invalid(format!("{what} is at most {}, found {value}", i32::MAX)))
}

/// Axes that the table has as unsigned numbers.
pub(crate) fn axes(values: &[u32]) -> Result<Vec<i32>> {
    values.iter().map(|&axis| small(axis, "axis")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(result: Result<&[i64]>) -> String {
        result.map_or_else(
            |fault| fault.named("op").message,
            |dims| format!("{dims:?}"),
        )
    }

    #[test]
    fn shapes_are_checked() {
        let dims = [2, -1, i64::from(i32::MAX) + 1];
        // SAFETY: every length is at most the array's.
        unsafe {
            assert_eq!(text(shape(dims.as_ptr(), 1)), "[2]");
            assert!(text(shape(dims.as_ptr(), 2)).contains("dimension -1"));
            assert_eq!(text(open_shape(dims.as_ptr(), 2)), "[2, -1]");
            assert!(text(open_shape(dims.as_ptr(), 3)).contains("2147483648"));
            assert_eq!(text(shape(core::ptr::null(), 0)), "[]");
            assert!(text(shape(core::ptr::null(), 1)).contains("null"));
            assert!(text(shape(dims.as_ptr(), 9)).contains("at most 8"));
        }
    }

    #[test]
    fn two_open_dimensions_are_refused() {
        let dims = [-1, -1];
        // SAFETY: two values are there.
        assert!(text(unsafe { open_shape(dims.as_ptr(), 2) }).contains("only one"));
    }

    #[test]
    fn flags_are_0_or_1() {
        assert!(flag(1, "x").is_ok() && flag(2, "x").is_err());
    }
}
