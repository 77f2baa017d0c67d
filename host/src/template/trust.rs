//! Which control tokens of a rendered prompt the template wrote, and which ones a request only spells.
//!
//! A template runs arbitrary string code on messages (`trim`, `split`, `==`, `+`), so request text cannot be wrapped
//! in brackets without changing what the template does. Instead, characters of request text that spell a control token
//! are replaced one for one by private-use twins before rendering and put back afterwards: lengths, positions, white
//! space and every other comparison stay the same, and a control token found between twins' neighbours was written by
//! the template.
//!
//! * **Whole spellings** are always marked.
//! * **Edges**: a text that ends in the beginning of a spelling, or begins with the end of one, is marked there too, so
//!   that two parts of a message cannot join into a token.
//! * **Fragments** in the middle matter only to templates that delete text (`split` and join) or put request text
//!   between halves of a token (`'<|' + x + '|>'`). If a request has any, the prompt is rendered a second time with
//!   all fragments marked. Same text: the second result is exact. Other text (the template looks at such fragments):
//!   both must agree on the control tokens, or the request is refused.
//!
//! Turn marks that a checkpoint does not declare special (DeepSeek's `<｜User｜>`) are guarded too, if the template prints
//! them and never looks for them in messages. In the assistant's own messages only control tokens are guarded: what a
//! model once wrote with such tokens (`<tool_call>`) is read back with them.
//!
//! Names that are part of the format and come from a fixed list (roles, part types) are never marked: templates do
//! build tokens such as `<|user|>` from them.

use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::text::{ControlTokens, Prompt};

use super::spellings::Spellings;
use super::value::Strings;

/// Roles and types with a fixed meaning, lower case. A request cannot smuggle a token through them because the list
/// holds no name of a turn's end.
const FIXED_NAMES: [&str; 31] = [
    "array",
    "assistant",
    "audio",
    "audio_url",
    "boolean",
    "critic",
    "developer",
    "document",
    "function",
    "image",
    "image_url",
    "input_audio",
    "input_image",
    "input_text",
    "input_video",
    "integer",
    "ipython",
    "json_object",
    "json_schema",
    "model",
    "null",
    "number",
    "object",
    "observation",
    "output_text",
    "string",
    "system",
    "text",
    "tool",
    "user",
    "video",
];

/// First code points of the private-use planes, where twins are taken from.
const PRIVATE_PLANES: [u32; 2] = [0xF_0000, 0x10_0000];
const PLANE_SIZE: u32 = 0xFFFE;

/// How much of request text is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    WholeAndEdges,
    Fragments,
}

/// The tokens that only a template may write, and what it looks for in messages.
#[derive(Debug)]
pub(super) struct Guard {
    /// Control tokens.
    control: Spellings,
    /// Control tokens and the ordinary ones that the template claims.
    all: Spellings,
    /// What the template compares request text with; fragments inside such places stay readable.
    sought: Vec<String>,
}

impl Guard {
    pub(super) fn new(control: &ControlTokens, source: &str, sought: Vec<String>) -> Self {
        let is_claimed = |token: &str| {
            !token.trim().is_empty()
                && source.contains(token)
                && !sought.iter().any(|literal| literal.contains(token))
        };
        let all = Spellings::new(control.extended(is_claimed));
        Guard {
            control: Spellings::new(control.clone()),
            all,
            sought,
        }
    }

    /// The tokens that only the template may write.
    pub(super) fn tokens(&self) -> &ControlTokens {
        self.all.control()
    }
}

/// Marks request text for one render.
#[derive(Clone)]
pub(super) struct Marker<'a> {
    guard: &'a Guard,
    twins: Twins,
    spellings: &'a Spellings,
    level: Level,
}

/// Characters and their private-use twins.
#[derive(Clone)]
struct Twins {
    base: u32,
    /// Sorted characters; the twin of the n-th is `base + n`.
    characters: Vec<char>,
}

impl<'a> Marker<'a> {
    /// A marker whose twins occur in none of `texts` (all that goes into the render), or `None` if no block of private
    /// characters is free.
    pub(super) fn new<'t>(guard: &'a Guard, texts: impl Iterator<Item = &'t str>) -> Option<Self> {
        let characters = guard.all.markable();
        // One more than needed: the block's first character marks where a message is continued.
        let base = free_block(texts, characters.len() as u32 + 1)?;
        let twins = Twins {
            base: base + 1,
            characters,
        };
        Some(Marker {
            guard,
            twins,
            spellings: &guard.all,
            level: Level::WholeAndEdges,
        })
    }

    pub(super) fn at(&self, level: Level) -> Marker<'a> {
        Marker {
            level,
            ..self.clone()
        }
    }

    /// The marker for a message of this role.
    pub(super) fn for_role(&self, role: Option<&str>) -> Marker<'a> {
        match role {
            Some("assistant" | "model") => Marker {
                spellings: &self.guard.control,
                ..self.clone()
            },
            _ => self.clone(),
        }
    }

    /// A character that occurs nowhere in the render's input.
    pub(super) fn unused(&self) -> char {
        char::from_u32(self.twins.base - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    /// Whether marking fragments would mark more of `text` than marking whole spellings and edges.
    pub(super) fn has_fragments(&self, text: &str) -> bool {
        let count = |level| {
            self.at(level)
                .places(text)
                .into_iter()
                .filter(|&marked| marked)
                .count()
        };
        count(Level::Fragments) > count(Level::WholeAndEdges)
    }

    /// Puts the original characters back and records the spellings that touch a marked one.
    pub(super) fn unmark(&self, rendered: &str) -> Prompt {
        let mut text = String::with_capacity(rendered.len());
        let mut marked: Vec<(usize, usize)> = Vec::new();
        for character in rendered.chars() {
            match self.twins.original(character) {
                Some(original) => {
                    let start = text.len();
                    text.push(original);
                    match marked.last_mut() {
                        Some(last) if last.1 == start => last.1 = text.len(),
                        _ => marked.push((start, text.len())),
                    }
                }
                None => text.push(character),
            }
        }
        let touched = |start: usize, end: usize| {
            let next = marked.partition_point(|&(_, marked_end)| marked_end <= start);
            marked
                .get(next)
                .is_some_and(|&(marked_start, _)| marked_start < end)
        };
        let literal: Vec<_> = self
            .guard
            .tokens()
            .find_in(&text)
            .into_iter()
            .map(|spelling| spelling.range)
            .filter(|range| touched(range.start, range.end))
            .collect();
        Prompt::with_literal(text, literal)
    }

    fn mark<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let places = self.places(text);
        if !places.contains(&true) {
            return Cow::Borrowed(text);
        }
        let twin = |(character, marked): (char, bool)| {
            if marked {
                self.twins.twin(character).unwrap_or(character)
            } else {
                character
            }
        };
        Cow::Owned(text.chars().zip(places).map(twin).collect())
    }

    /// For each character of `text`, whether it is to be marked. Empty if none is.
    fn places(&self, text: &str) -> Vec<bool> {
        // Nearly every text is done here. Only a short one could be the middle of a spelling.
        let is_short = self.level == Level::Fragments && text.len() <= 4 * self.spellings.longest();
        if !is_short && !text.contains(|c| self.spellings.is_end(c)) {
            return Vec::new();
        }
        let characters: Vec<char> = text.chars().collect();
        let mut marked = vec![false; characters.len()];
        self.mark_fragments(&characters, &mut marked);
        if marked.contains(&true) {
            self.protect_literals(text, &mut marked);
        }
        let whole = self.spellings.control().find_overlapping(text);
        set_ranges(
            text,
            whole
                .into_iter()
                .map(|spelling| (spelling.range.start, spelling.range.end)),
            true,
            &mut marked,
        );
        marked
    }

    fn mark_fragments(&self, characters: &[char], marked: &mut [bool]) {
        let first = characters
            .iter()
            .position(|c| !c.is_whitespace())
            .unwrap_or(0);
        let last = characters
            .iter()
            .rposition(|c| !c.is_whitespace())
            .map_or(0, |last| last + 1);
        let anywhere = self.level == Level::Fragments;
        let reach = if anywhere {
            usize::MAX
        } else {
            self.spellings.longest()
        };
        for at in last.saturating_sub(reach).max(first)..last {
            let rest = characters.get(at..last).unwrap_or_default();
            if !rest.first().is_some_and(|&c| self.spellings.is_end(c)) {
                continue;
            }
            let length = self.spellings.prefix_length(rest);
            if length == rest.len() || (anywhere && length >= 2) {
                set(marked, at, at + length);
            }
        }
        for end in first + 1..=first.saturating_add(reach).min(last) {
            let before = characters.get(first..end).unwrap_or_default();
            if !before.last().is_some_and(|&c| self.spellings.is_end(c)) {
                continue;
            }
            let length = self.spellings.suffix_length(before);
            if length == before.len() || (anywhere && length >= 2) {
                set(marked, end - length, end);
            }
        }
        if anywhere && (1..=self.spellings.longest()).contains(&(last - first)) {
            let inside = characters.get(first..last).unwrap_or_default();
            if self.spellings.is_inside(inside) {
                set(marked, first, last);
            }
        }
    }

    /// Takes the marks off places that the template looks for, so that it still finds them.
    fn protect_literals(&self, text: &str, marked: &mut [bool]) {
        for literal in self
            .guard
            .sought
            .iter()
            .filter(|literal| literal.chars().count() >= 2)
        {
            if self.spellings.is_whole(literal) {
                continue;
            }
            let places = text
                .match_indices(literal.as_str())
                .map(|(at, found)| (at, at + found.len()));
            set_ranges(text, places, false, marked);
        }
    }
}

impl Strings for Marker<'_> {
    fn text<'t>(&self, key: Option<&str>, text: &'t str) -> Cow<'t, str> {
        let fixed =
            matches!(key, Some("role" | "type")) && FIXED_NAMES.binary_search(&text).is_ok();
        if fixed {
            Cow::Borrowed(text)
        } else {
            self.mark(text)
        }
    }

    fn key<'t>(&self, key: &'t str) -> Cow<'t, str> {
        // Templates look keys up by name, so fragments in them are left alone.
        self.at(Level::WholeAndEdges).mark(key)
    }
}

impl Twins {
    fn twin(&self, character: char) -> Option<char> {
        let index = self.characters.binary_search(&character).ok()?;
        char::from_u32(self.base + index as u32)
    }

    fn original(&self, character: char) -> Option<char> {
        let index = u32::from(character).checked_sub(self.base)?;
        self.characters.get(index as usize).copied()
    }
}

fn set(marked: &mut [bool], start: usize, end: usize) {
    marked.get_mut(start..end).unwrap_or_default().fill(true);
}

/// Sets the characters of ascending byte ranges, in one pass over `text`.
fn set_ranges(
    text: &str,
    ranges: impl Iterator<Item = (usize, usize)>,
    value: bool,
    marked: &mut [bool],
) {
    let mut ranges = ranges.peekable();
    // Ranges that began at or before the current character; only the furthest end counts.
    let mut until = 0;
    for ((at, _), place) in text.char_indices().zip(marked) {
        while let Some((_, end)) = ranges.next_if(|(start, _)| *start <= at) {
            until = until.max(end);
        }
        if at < until {
            *place = value;
        }
    }
}

/// The first of `count` consecutive private-use characters that occur in none of `texts`.
fn free_block<'t>(texts: impl Iterator<Item = &'t str>, count: u32) -> Option<u32> {
    let used: BTreeSet<u32> = texts
        .flat_map(str::chars)
        .map(u32::from)
        .filter(|&code| code >= PRIVATE_PLANES[0])
        .collect();
    PRIVATE_PLANES.into_iter().find_map(|plane| {
        let mut start = plane;
        while start + count <= plane + PLANE_SIZE {
            match used.range(start..start + count).next_back() {
                None => return Some(start),
                Some(&taken) => start = taken + 1,
            }
        }
        None
    })
}
