//! Buckets: the few sizes that steps come in, so that a backend sees few different graphs.

/// Row counts of a step. Padding costs compute, so the grid is fine where prefill chunks lie.
const ROWS: [usize; 16] = [
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512,
];

/// Smallest bucket that holds `rows`.
pub fn rows(rows: usize) -> usize {
    match ROWS.iter().copied().find(|bucket| *bucket >= rows) {
        Some(bucket) => bucket,
        None => rows.next_multiple_of(512),
    }
}

/// Largest bucket that `rows` fill; `rows` where they fill none.
pub fn rows_within(rows: usize) -> usize {
    let largest = ROWS.iter().rev().copied().find(|bucket| *bucket <= rows);
    match rows {
        512.. => rows / 512 * 512,
        _ => largest.unwrap_or(rows),
    }
}

/// Smallest bucket that holds `pages` entries of a page table: powers of two and their halves
/// between, so that at most a third of the entries is padding.
pub fn pages(pages: usize) -> usize {
    let power = pages.max(1).next_power_of_two();
    let between = power / 4 * 3;
    if between >= pages.max(1) && power >= 4 {
        between
    } else {
        power
    }
}

/// Sequences of a step, the one that owns the padding rows included.
pub fn sequences(sequences: usize) -> usize {
    sequences.max(1).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn buckets_hold_their_load_and_are_fixed_points(n in 1usize..5000) {
            for bucket in [rows, pages, sequences] {
                let size = bucket(n);
                prop_assert!(size >= n);
                prop_assert_eq!(bucket(size), size);
                prop_assert!(size <= 2 * n || size <= 16);
            }
            let filled = rows_within(n);
            prop_assert!(filled <= n && rows(filled) == filled && rows_within(rows(n)) == rows(n));
        }
    }

    #[test]
    fn a_decode_step_is_not_padded() {
        assert_eq!((rows(1), rows(9), rows(513)), (1, 16, 1024));
        assert_eq!((pages(1), pages(3), pages(5), pages(9)), (1, 3, 6, 12));
    }
}
