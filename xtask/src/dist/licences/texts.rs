//! Texts of licences, for parts that name theirs without bringing it.

/// Name of a licence as SPDX spells it, and its text; `{holders}` is where the copyright holders are named.
const BY_NAME: [(&str, &str); 8] = [
    ("Apache-2.0", include_str!("../../../../LICENSE")),
    ("BSD-3-Clause", include_str!("texts/BSD-3-Clause.txt")),
    (
        "GCC-exception-3.1",
        include_str!("texts/GCC-exception-3.1.txt"),
    ),
    ("GPL-3.0-or-later", include_str!("texts/GPL-3.0.txt")),
    ("LGPL-2.0-or-later", include_str!("texts/LGPL-2.1.txt")),
    ("LLVM-exception", include_str!("texts/LLVM-exception.txt")),
    ("MIT", include_str!("texts/MIT.txt")),
    ("Zlib", include_str!("texts/Zlib.txt")),
];

/// LAPACK's and BLAS's own: three clauses, and one about patents.
const LAPACK: (&str, &str) = ("BSD-3-Clause-Open-MPI", include_str!("texts/LAPACK.txt"));

/// The texts that an expression asks for: of alternatives those that are known, of what holds together all or nothing.
pub fn of_expression(expression: &str, holders: &str) -> Vec<(&'static str, String)> {
    // Old manifests write "MIT/Apache-2.0" for an alternative.
    let alternatives = expression.replace('/', " OR ").replace(['(', ')'], " ");
    let mut found: Vec<(&'static str, String)> = Vec::new();
    for alternative in alternatives.split(" OR ") {
        let parts: Vec<Option<(&'static str, String)>> = alternative
            .split_whitespace()
            .filter(|word| !matches!(*word, "AND" | "WITH"))
            .map(|name| of_name(name, holders))
            .collect();
        if let Some(texts) = parts.into_iter().collect::<Option<Vec<_>>>() {
            for text in texts {
                if found.iter().all(|(name, _)| *name != text.0) {
                    found.push(text);
                }
            }
        }
    }
    found
}

/// Whether the text of a licence differs by who holds the rights.
pub fn names_holders(licence: &str) -> bool {
    BY_NAME
        .iter()
        .any(|(name, text)| *name == licence && text.contains("{holders}"))
}

fn of_name(name: &str, holders: &str) -> Option<(&'static str, String)> {
    if name == LAPACK.0 {
        return Some((LAPACK.0, LAPACK.1.to_owned()));
    }
    let (name, text) = BY_NAME.iter().find(|(known, _)| *known == name)?;
    Some((name, text.replace("{holders}", holders)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(expression: &str) -> Vec<&'static str> {
        of_expression(expression, "A and B")
            .into_iter()
            .map(|(name, _)| name)
            .collect()
    }

    #[test]
    fn an_expression_gives_its_texts() {
        assert_eq!(names("MIT"), ["MIT"]);
        assert_eq!(names("MIT/Apache-2.0"), ["MIT", "Apache-2.0"]);
        assert_eq!(names("(MIT OR Apache-2.0)"), ["MIT", "Apache-2.0"]);
        assert_eq!(
            names("GPL-3.0-or-later WITH GCC-exception-3.1"),
            ["GPL-3.0-or-later", "GCC-exception-3.1"]
        );
        assert_eq!(names("Unknown OR MIT"), ["MIT"]);
        assert!(names("MIT AND Unknown").is_empty());
        assert!(names("").is_empty());
    }

    #[test]
    fn holders_are_named_where_a_text_asks_for_them() {
        for name in ["MIT", "Zlib", "BSD-3-Clause"] {
            let (_, text) = of_name(name, "A and B").expect("is known");
            assert!(text.contains("Copyright (c) A and B"), "{name}");
            assert!(!text.contains("{holders}"), "{name}");
        }
    }
}
