//! Which rows of a source make the rows of a tensor, in which order.
//!
//! Owns the composition of row selections. Must not know what a row holds.

use std::ops::Range;

/// A selection of the rows `0..total` of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowMap {
    /// Rows one after the other, from a first to a last.
    Span(Range<usize>),
    /// Rows one by one.
    Each(Vec<usize>),
}

impl RowMap {
    /// All rows in their order.
    pub(super) fn all(total: usize) -> Self {
        RowMap::Span(0..total)
    }

    /// Number of selected rows.
    pub(super) fn len(&self) -> usize {
        match self {
            RowMap::Span(range) => range.len(),
            RowMap::Each(rows) => rows.len(),
        }
    }

    /// The selection of this selection's rows from `start`, `len` of them.
    pub(super) fn slice(&self, start: usize, len: usize) -> Self {
        match self {
            RowMap::Span(range) => {
                let first = range.start + start.min(range.len());
                RowMap::Span(first..(first + len).min(range.end))
            }
            RowMap::Each(rows) => {
                RowMap::Each(rows.iter().skip(start).take(len).copied().collect())
            }
        }
    }

    /// Undoes the reordering of rows for interleaved rotary embedding: the rows of each of `heads`
    /// heads lie as `[dim / 2, 2]` and are wanted as `[2, dim / 2]`.
    ///
    /// The number of rows must be a multiple of `2 * heads`.
    pub(super) fn unpermute_rope(&self, heads: usize) -> Self {
        let dim = self.len() / heads.max(1);
        let half = dim / 2;
        let wanted = (0..heads).flat_map(move |head| {
            (0..2).flat_map(move |part| (0..half).map(move |i| head * dim + 2 * i + part))
        });
        RowMap::Each(match self {
            RowMap::Span(range) => wanted.map(|row| range.start + row).collect(),
            RowMap::Each(rows) => wanted.filter_map(|row| rows.get(row).copied()).collect(),
        })
    }

    /// Calls `visit` with runs of source rows in the order of the selection.
    pub(super) fn for_each_span(&self, mut visit: impl FnMut(Range<usize>)) {
        match self {
            RowMap::Span(range) => visit(range.clone()),
            RowMap::Each(rows) => rows.iter().for_each(|row| visit(*row..row + 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(map: &RowMap) -> Vec<usize> {
        let mut rows = Vec::new();
        map.for_each_span(|span| rows.extend(span));
        rows
    }

    #[test]
    fn rope_rows_are_taken_apart() {
        // Two heads of four rows: 0 1 2 3 are (x0 y0 x1 y1) and become x0 x1 y0 y1.
        let map = RowMap::all(8).unpermute_rope(2);
        assert_eq!(rows(&map), [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn selections_compose() {
        let map = RowMap::all(12).slice(4, 8);
        assert_eq!(map, RowMap::Span(4..12));
        let map = map.unpermute_rope(2);
        assert_eq!(rows(&map), [4, 6, 5, 7, 8, 10, 9, 11]);
        let map = map.slice(1, 4);
        assert_eq!(rows(&map), [6, 5, 7, 8]);
        assert_eq!(rows(&map.unpermute_rope(1)), [6, 7, 5, 8]);
        assert_eq!(map.len(), 4);
    }
}
