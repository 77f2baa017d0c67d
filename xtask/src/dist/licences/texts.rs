//! Texts of licences, for parts that name theirs without bringing it.

use std::iter::Peekable;

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

/// Where "or later" is taken at its word, the file is called after the version that it has.
const LATER: [(&str, &str); 1] = [("LGPL-2.0-or-later", "LGPL-2.1")];

/// LAPACK's and BLAS's own: three clauses, and one about patents.
const LAPACK: (&str, &str) = ("BSD-3-Clause-Open-MPI", include_str!("texts/LAPACK.txt"));

/// Text and name of the file that it is written into.
type Text = (&'static str, String);

/// The texts that an expression asks for: of alternatives those that are known, of what holds together all or nothing.
pub fn of_expression(expression: &str, holders: &str) -> Vec<Text> {
    // Old manifests write "MIT/Apache-2.0" for an alternative.
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let texts = alternatives(&mut words, holders);
    // What is left behind a bracket too many was not understood.
    if words.next().is_some() {
        return Vec::new();
    }
    texts.unwrap_or_default()
}

/// Joined by OR, which binds least; None where not one is known.
fn alternatives<'a>(
    words: &mut Peekable<impl Iterator<Item = &'a str>>,
    holders: &str,
) -> Option<Vec<Text>> {
    let mut found: Option<Vec<Text>> = None;
    loop {
        if let Some(texts) = together(words, holders) {
            add(found.get_or_insert_default(), texts);
        }
        if words.next_if_eq(&"OR").is_none() {
            return found;
        }
    }
}

/// Joined by AND or WITH; None where one is not known. All of it is read in any case.
fn together<'a>(
    words: &mut Peekable<impl Iterator<Item = &'a str>>,
    holders: &str,
) -> Option<Vec<Text>> {
    let mut found = Some(Vec::new());
    loop {
        let texts = one(words, holders);
        found = found.zip(texts).map(|(mut found, texts)| {
            add(&mut found, texts);
            found
        });
        if words
            .next_if(|word| matches!(*word, "AND" | "WITH"))
            .is_none()
        {
            return found;
        }
    }
}

/// A name, or an expression in brackets.
fn one<'a>(
    words: &mut Peekable<impl Iterator<Item = &'a str>>,
    holders: &str,
) -> Option<Vec<Text>> {
    if words.next_if_eq(&"(").is_none() {
        let name = words.next_if(|word| *word != ")")?;
        return of_name(name, holders).map(|text| vec![text]);
    }
    let inside = alternatives(words, holders);
    words.next_if_eq(&")")?;
    inside
}

fn add(found: &mut Vec<Text>, texts: Vec<Text>) {
    for text in texts {
        if found.iter().all(|(name, _)| *name != text.0) {
            found.push(text);
        }
    }
}

/// Whether the text of a licence differs by who holds the rights.
pub fn names_holders(licence: &str) -> bool {
    BY_NAME
        .iter()
        .any(|(name, text)| *name == licence && text.contains("{holders}"))
}

fn of_name(name: &str, holders: &str) -> Option<Text> {
    if name == LAPACK.0 {
        return Some((LAPACK.0, LAPACK.1.to_owned()));
    }
    let (name, text) = BY_NAME.iter().find(|(known, _)| *known == name)?;
    let later = LATER.iter().find(|(asked, _)| asked == name);
    let name = later.map_or(name, |(_, taken)| taken);
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
        assert_eq!(names("LGPL-2.0-or-later"), ["LGPL-2.1"]);
    }

    #[test]
    fn what_holds_together_with_brackets_needs_each_of_its_texts() {
        assert!(names("(MIT OR Apache-2.0) AND Unicode-3.0").is_empty());
        assert!(names("Unicode-3.0 AND (MIT OR Apache-2.0)").is_empty());
        assert_eq!(names("(MIT OR Unknown) AND Zlib"), ["MIT", "Zlib"]);
        assert_eq!(names("(MIT AND Unknown) OR Zlib"), ["Zlib"]);
        assert_eq!(
            names("Apache-2.0 AND (MIT OR (Zlib AND BSD-3-Clause))"),
            ["Apache-2.0", "MIT", "Zlib", "BSD-3-Clause"]
        );
        assert_eq!(
            names("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT"),
            ["Apache-2.0", "LLVM-exception", "MIT"]
        );
        for broken in ["(MIT", "MIT)", "()", "MIT AND", "AND", "MIT Zlib"] {
            assert!(names(broken).is_empty(), "{broken}");
        }
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
