//! Columns and sizes for people.

/// Rows under a heading, in columns as wide as their longest cell; the last column is not padded.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this heading.
    pub fn new(heading: &[&str]) -> Self {
        Self {
            rows: vec![heading.iter().map(|cell| (*cell).to_owned()).collect()],
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(
            cells
                .into_iter()
                .map(|cell| printable(&cell.into()))
                .collect(),
        );
    }

    /// The whole table, each line ended by a line break.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}  "));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Cells may hold names of files.
fn printable(cell: &str) -> String {
    cell.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// A size in the largest binary unit of which there is at least one.
pub fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = "KiB";
    for larger in UNITS.iter().skip(1) {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    format!("{value:.1} {unit}")
}

/// A number with its noun.
pub fn counted(number: usize, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_that_fits() {
        let texts: Vec<String> = [0, 1023, 1024, 98_000_000, 1 << 30, u64::MAX]
            .map(bytes_text)
            .into();
        insta::assert_snapshot!(texts.join(" | "), @"0 B | 1023 B | 1.0 KiB | 93.5 MiB | 1.0 GiB | 16777216.0 TiB");
    }

    #[test]
    fn columns_line_up_and_cells_cannot_break_them() {
        let mut table = Table::new(&["NAME", "SIZE", "PATH"]);
        table.row(["a/b", "1 B", "/x"]);
        table.row(["owner/longer", "12 B", "/y\n\x1b[2J"]);
        insta::assert_snapshot!(table.render(), @r"
        NAME          SIZE  PATH
        a/b           1 B   /x
        owner/longer  12 B  /y��[2J
        ");
    }
}
