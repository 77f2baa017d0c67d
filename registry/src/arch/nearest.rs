//! Names close to one that is not known, for messages.

/// Most suggestions given.
const SUGGESTIONS: usize = 3;

/// The known names nearest to `wanted`, best first; only ones that could be a slip of the pen.
pub(super) fn nearest<'a>(wanted: &str, known: impl Iterator<Item = &'a str>) -> Vec<String> {
    let wanted = normal(wanted);
    let limit = (wanted.chars().count() / 3).clamp(1, 4);
    let mut scored: Vec<(usize, &str)> = known
        .filter_map(|name| {
            let distance = distance(&wanted, &normal(name));
            (distance <= limit).then_some((distance, name))
        })
        .collect();
    scored.sort();
    scored.dedup();
    scored
        .into_iter()
        .take(SUGGESTIONS)
        .map(|(_, name)| name.to_owned())
        .collect()
}

fn normal(name: &str) -> String {
    name.chars()
        .take(64)
        .filter(|c| c.is_alphanumeric())
        .flat_map(char::to_lowercase)
        .collect()
}

/// Levenshtein distance, one row at a time.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        if let Some(first) = row.first_mut() {
            *first = left;
        }
        for (cell, y) in row.iter_mut().skip(1).zip(&b) {
            let replace = diagonal + usize::from(x != *y);
            diagonal = *cell;
            left = replace.min(*cell + 1).min(left + 1);
            *cell = left;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_textbook() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("same", "same"), 0);
    }

    #[test]
    fn slips_are_found_and_strangers_are_not() {
        let known = ["llama", "llama4", "qwen3", "gemma3"];
        assert_eq!(nearest("lama", known.into_iter()), ["llama"]);
        assert_eq!(nearest("Qwen-3", known.into_iter()), ["qwen3"]);
        assert!(nearest("mamba2", known.into_iter()).is_empty());
    }
}
