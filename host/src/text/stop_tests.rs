//! The matcher against a direct search over the whole text.

use super::*;
use proptest::prelude::*;

fn run(stops: &[&str], mode: StopText, chunks: &[&str]) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()), mode).unwrap();
    let mut out = String::new();
    for chunk in chunks {
        let step = matcher.push(chunk);
        out.push_str(&step.text);
        if let Some(stop) = step.stopped {
            assert_eq!(matcher.push("more").text, "");
            return (out, Some(stop.index));
        }
    }
    out.push_str(&matcher.finish().text);
    (out, None)
}

/// First end wins, then first start: written out as a search.
fn expected(stops: &[String], mode: StopText, text: &str) -> (String, Option<usize>) {
    for end in 1..=text.len() {
        let best = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| {
                text.get(..end)
                    .is_some_and(|head| head.ends_with(stop.as_str()))
            })
            .max_by(|a, b| a.1.len().cmp(&b.1.len()).then(b.0.cmp(&a.0)));
        if let Some((index, stop)) = best {
            let cut = if mode == StopText::Include {
                end
            } else {
                end - stop.len()
            };
            return (text[..cut].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

#[test]
fn nothing_of_a_stop_string_leaks_at_any_split() {
    let text = "answer<|im_end|>tail";
    for first in 0..=text.len() {
        for second in first..=text.len() {
            let chunks = [&text[..first], &text[first..second], &text[second..]];
            assert_eq!(
                run(&["<|im_end|>"], StopText::Exclude, &chunks),
                ("answer".into(), Some(0))
            );
            assert_eq!(
                run(&["<|im_end|>"], StopText::Include, &chunks),
                ("answer<|im_end|>".into(), Some(0))
            );
        }
    }
}

#[test]
fn only_the_live_partial_match_is_held_back() {
    let mut matcher =
        StopMatcher::new(["abcabd".to_owned(), "xyz".to_owned()], StopText::Exclude).unwrap();
    assert_eq!(matcher.push("12").text, "12");
    assert_eq!(matcher.push("abcab").text, "");
    assert_eq!(matcher.held_bytes(), 5);
    assert_eq!(matcher.push("c").text, "abc");
    assert_eq!(matcher.push("x").text, "abc");
    assert_eq!(matcher.push("!").text, "x!");
    assert_eq!(matcher.push("xy").text, "");
    assert_eq!(matcher.finish().text, "xy");
}

#[test]
fn the_match_that_ends_first_wins_then_the_one_that_starts_first() {
    assert_eq!(
        run(&["abc", "b"], StopText::Exclude, &["xabc"]),
        ("xa".into(), Some(1))
    );
    assert_eq!(
        run(&["c", "abc"], StopText::Exclude, &["xabc"]),
        ("x".into(), Some(1))
    );
    assert_eq!(
        run(&["same", "same"], StopText::Exclude, &["same"]),
        (String::new(), Some(0))
    );
}

#[test]
fn bad_lists_are_refused_by_name() {
    let new = |stops: Vec<String>| StopMatcher::new(stops, StopText::Exclude).map(|_| ());
    assert_eq!(
        new(vec!["a".into(), String::new()]),
        Err(StopError::Empty { index: 1 })
    );
    assert_eq!(
        new(vec!["a".into(); 257]),
        Err(StopError::TooMany {
            count: 257,
            limit: 256
        })
    );
    assert!(matches!(
        new(vec!["a".repeat(70_000)]),
        Err(StopError::TooLong { .. })
    ));
    assert_eq!(
        run(&[], StopText::Exclude, &["all", " of it"]),
        ("all of it".into(), None)
    );
}

proptest! {
    #[test]
    fn any_split_gives_the_text_of_a_direct_search(
        stops in prop::collection::vec("[abé]{1,4}", 0..4),
        text in "[abéx]{0,24}",
        cuts in prop::collection::vec(0usize..48, 0..6),
        include in any::<bool>(),
    ) {
        let mode = if include { StopText::Include } else { StopText::Exclude };
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&c| text.is_char_boundary(c)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let chunks: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        let names: Vec<&str> = stops.iter().map(String::as_str).collect();
        prop_assert_eq!(run(&names, mode, &chunks), expected(&stops, mode, &text));
    }
}
