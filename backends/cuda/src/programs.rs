//! Step programs: launches that come again as they were are submitted as one.
//!
//! A step of a decoder is some hundred launches, and the driver takes two microseconds for each. Since everything that varies from
//! step to step is in arrays, and memory of results is found again at the same places, the launches of one step are mostly those of
//! the step before, argument by argument. They are cut into segments, at fixed lengths and wherever something else has to come
//! after them. A segment that is seen for the second time is made into a program; from then on launches are held back as long as
//! they go on as a program does, and submitted with it once it is whole. What goes on otherwise is submitted launch by launch,
//! in order, so the effects are those of the launches in either case.

use std::collections::VecDeque;

use mlxcel_abi::{AbiError, Result};

use crate::driver::{Launch, Shape};

/// Launches of the first segment after a border, so that the device has something to do early; each further one has twice as many.
const FIRST: usize = 16;
/// Most launches of a segment, unless it is set otherwise.
pub(crate) const LONGEST: usize = 64;
/// Launches below which a program does not pay.
const LEAST: usize = 4;
/// Programs that are kept, and launches of all of them.
const MOST_PROGRAMS: usize = 256;
const MOST_NODES: usize = 8192;
/// Segments that are remembered as seen once.
const MOST_SEEN: usize = 1024;
/// Programs that could not be made, one after another, after which it is not tried again.
const MOST_FAILURES: u32 = 3;

/// Who does what is asked for.
pub(crate) trait Submitter {
    /// Submits one kernel.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<()>;
    /// Makes a program, and gives its handle.
    fn build(&mut self, launches: &Tape) -> Result<usize>;
    /// Submits a program.
    fn replay(&mut self, program: usize) -> Result<()>;
    /// Ends a program.
    fn discard(&mut self, program: usize);
}

/// A launch without its arguments, which end where it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    function: usize,
    shape: Shape,
    starts_early: bool,
    words: usize,
    starts: usize,
}

/// Launches in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tape {
    /// First, because addresses differ sooner than shapes.
    words: Vec<u64>,
    entries: Vec<Entry>,
    starts: Vec<u8>,
}

impl Tape {
    fn push(&mut self, launch: &Launch<'_>) {
        self.words.extend_from_slice(launch.words);
        self.starts.extend_from_slice(launch.starts);
        self.entries.push(Entry {
            function: launch.function,
            shape: launch.shape,
            starts_early: launch.starts_early,
            words: self.words.len(),
            starts: self.starts.len(),
        });
    }

    fn len(&self) -> usize {
        self.entries.len()
    }

    fn clear(&mut self) {
        self.entries.clear();
        self.words.clear();
        self.starts.clear();
    }

    fn get(&self, i: usize) -> Option<Launch<'_>> {
        let entry = self.entries.get(i)?;
        let before = i.checked_sub(1).and_then(|i| self.entries.get(i));
        let (words, starts) = before.map_or((0, 0), |before| (before.words, before.starts));
        Some(Launch {
            function: entry.function,
            shape: entry.shape,
            starts_early: entry.starts_early,
            words: self.words.get(words..entry.words)?,
            starts: self.starts.get(starts..entry.starts)?,
        })
    }

    pub(crate) fn launches(&self) -> impl Iterator<Item = Launch<'_>> {
        (0..self.len()).filter_map(|i| self.get(i))
    }

    /// Whether launches `from..to` of both are the same; those before are.
    fn agrees(&self, other: &Self, from: usize, to: usize) -> bool {
        let (Some(a), Some(b)) = (self.entries.get(from..to), other.entries.get(from..to)) else {
            return false;
        };
        // Where arguments end is a part of the entries, so that these are equally long.
        let before = from.checked_sub(1).and_then(|i| self.entries.get(i));
        let (words, starts) = before.map_or((0, 0), |before| (before.words, before.starts));
        let (last_word, last_start) = a.last().map_or((words, starts), |e| (e.words, e.starts));
        self.words.get(words..last_word) == other.words.get(words..last_word)
            && a == b
            && self.starts.get(starts..last_start) == other.starts.get(starts..last_start)
    }

    /// A number that equal tapes share, and hardly any others.
    fn hash(&self) -> u64 {
        /// 2^64 divided by the golden ratio.
        const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
        let of_entries = self.entries.iter().flat_map(|entry| {
            let [x, y, z] = entry.shape.grid.map(u64::from);
            let block = u64::from(entry.shape.threads) << 32 | u64::from(entry.shape.shared_bytes);
            let early = u64::from(entry.starts_early);
            [entry.function as u64, x << 32 | y, z << 1 | early, block]
        });
        of_entries
            .chain(self.words.iter().copied())
            .fold(self.len() as u64, |hash, word| {
                (hash.rotate_left(29) ^ word).wrapping_mul(FACTOR)
            })
    }
}

#[derive(Debug)]
struct Program {
    tape: Tape,
    handle: usize,
    used: u64,
}

/// What happened so far.
#[derive(Debug, Clone, Copy, Default)]
struct Figures {
    /// Launches that were asked for.
    launches: u64,
    /// Those of them that a program submitted.
    in_programs: u64,
    /// Programs that were submitted.
    replays: u64,
    /// Programs that were made, let go of, and could not be made.
    built: u64,
    dropped: u64,
    failed: u64,
}

impl core::fmt::Display for Figures {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self {
            launches,
            in_programs,
            replays,
            built,
            dropped,
            failed,
        } = self;
        write!(
            f,
            "step programs: {in_programs} of {launches} launches by {replays} replays; {built} made, {dropped} dropped, {failed} not possible"
        )
    }
}

/// Bounds of what is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Most launches of a segment; 0 submits every launch at once.
    pub(crate) longest: usize,
    pub(crate) programs: usize,
    pub(crate) nodes: usize,
    pub(crate) seen: usize,
}

impl Bounds {
    pub(crate) fn new(longest: usize) -> Self {
        Self {
            longest,
            programs: MOST_PROGRAMS,
            nodes: MOST_NODES,
            seen: MOST_SEEN,
        }
    }

    fn first(&self) -> usize {
        FIRST.min(self.longest)
    }
}

/// Takes launches in order and submits them, one by one or as programs.
#[derive(Debug)]
pub(crate) struct Recorder<S> {
    submitter: S,
    bounds: Bounds,
    /// Launches of the segment under way.
    tape: Tape,
    /// The program that the segment goes on like so far; its launches are held back.
    expected: Option<usize>,
    /// Whether the segment's launches are submitted as they come.
    at_once: bool,
    /// Launches at which the segment ends.
    length: usize,
    programs: Vec<Program>,
    nodes: usize,
    seen: VecDeque<u64>,
    clock: u64,
    failures: u32,
    /// Why the last program could not be made.
    refusal: Option<AbiError>,
    /// An error that the call it came up in could not report.
    unreported: Option<AbiError>,
    figures: Figures,
}

impl<S: Submitter> Recorder<S> {
    pub(crate) fn new(submitter: S, bounds: Bounds) -> Self {
        Self {
            submitter,
            bounds,
            tape: Tape::default(),
            expected: None,
            at_once: false,
            length: bounds.first(),
            programs: Vec::new(),
            nodes: 0,
            seen: VecDeque::new(),
            clock: 0,
            failures: 0,
            refusal: None,
            unreported: None,
            figures: Figures::default(),
        }
    }

    /// What happened so far, for the log.
    pub(crate) fn summary(&self) -> String {
        match &self.refusal {
            None => self.figures.to_string(),
            Some(error) => format!("{}: {}", self.figures, error.message),
        }
    }

    /// Takes a launch; it and those before it are submitted at the latest by [`Recorder::submit`].
    pub(crate) fn push(&mut self, launch: &Launch<'_>) -> Result<()> {
        self.report()?;
        self.figures.launches += 1;
        if self.bounds.longest == 0 {
            return self.submitter.launch(launch);
        }
        self.tape.push(launch);
        if self.at_once {
            let launched = self.submitter.launch(launch);
            self.whole(launched)?;
        } else if let Some(i) = self.continuation() {
            self.expected = Some(i);
            let whole = self.programs.get(i).map(|program| program.tape.len());
            if whole == Some(self.tape.len()) {
                self.replay(i)?;
                self.next_segment();
            }
            return Ok(());
        } else {
            self.expected = None;
            self.launch_held()?;
            self.at_once = true;
        }
        if self.tape.len() >= self.length {
            self.learn();
            self.next_segment();
        }
        Ok(())
    }

    /// Submits what is held back: something else has to come after it.
    pub(crate) fn submit(&mut self) -> Result<()> {
        self.report()?;
        if self.tape.len() > 0 {
            match self.exact().filter(|_| !self.at_once) {
                Some(i) => self.replay(i)?,
                None => {
                    if !self.at_once {
                        self.launch_held()?;
                    }
                    self.learn();
                }
            }
        }
        self.restart();
        Ok(())
    }

    /// The same where an error cannot be reported: the next call reports it.
    pub(crate) fn submit_silently(&mut self) -> bool {
        let error = self.submit().err();
        let is_done = error.is_none();
        if self.unreported.is_none() {
            self.unreported = error;
        }
        is_done
    }

    /// Ends all programs, and holds nothing back from now on.
    pub(crate) fn close(&mut self) {
        self.submit_silently();
        self.bounds.longest = 0;
        for program in core::mem::take(&mut self.programs) {
            self.submitter.discard(program.handle);
        }
        self.nodes = 0;
        self.seen.clear();
    }

    fn report(&mut self) -> Result<()> {
        self.unreported.take().map_or(Ok(()), Err)
    }

    /// Forgets the segment under way after an error: what was submitted of it is not known.
    fn whole(&mut self, done: Result<()>) -> Result<()> {
        if done.is_err() {
            self.restart();
        }
        done
    }

    /// Begins a segment after a border.
    fn restart(&mut self) {
        self.next_segment();
        self.length = self.bounds.first();
    }

    fn next_segment(&mut self) {
        self.tape.clear();
        self.expected = None;
        self.at_once = false;
        self.length = (2 * self.length).min(self.bounds.longest);
    }

    /// A program that the segment goes on like, the longest if there are several.
    fn continuation(&self) -> Option<usize> {
        let n = self.tape.len();
        let goes_on = |program: &Program, from| program.tape.agrees(&self.tape, from, n);
        if let Some(i) = self.expected
            && self.programs.get(i).is_some_and(|p| goes_on(p, n - 1))
        {
            return Some(i);
        }
        (self.programs.iter().enumerate())
            .filter(|(_, program)| goes_on(program, 0))
            .max_by_key(|(_, program)| program.tape.len())
            .map(|(i, _)| i)
    }

    /// The program of just this segment.
    fn exact(&self) -> Option<usize> {
        self.programs.iter().position(|p| p.tape == self.tape)
    }

    fn launch_held(&mut self) -> Result<()> {
        let Self {
            tape, submitter, ..
        } = self;
        let launched = tape
            .launches()
            .try_for_each(|launch| submitter.launch(&launch));
        self.whole(launched)
    }

    fn replay(&mut self, i: usize) -> Result<()> {
        let Some(program) = self.programs.get_mut(i) else {
            return Ok(());
        };
        self.clock += 1;
        program.used = self.clock;
        self.figures.replays += 1;
        self.figures.in_programs += program.tape.len() as u64;
        let replayed = self.submitter.replay(program.handle);
        if replayed.is_err() {
            self.discard(i);
        }
        self.whole(replayed)
    }

    fn discard(&mut self, i: usize) {
        let program = self.programs.swap_remove(i);
        self.nodes -= program.tape.len();
        self.figures.dropped += 1;
        self.submitter.discard(program.handle);
    }

    /// Notes a segment that was submitted launch by launch; the second time it becomes a program.
    fn learn(&mut self) {
        let n = self.tape.len();
        if n < LEAST || n > self.bounds.nodes || self.failures >= MOST_FAILURES {
            return;
        }
        let hash = self.tape.hash();
        let Some(place) = self.seen.iter().position(|seen| *seen == hash) else {
            if self.seen.len() >= self.bounds.seen {
                self.seen.pop_front();
            }
            self.seen.push_back(hash);
            return;
        };
        self.seen.remove(place);
        while self.programs.len() >= self.bounds.programs || self.nodes + n > self.bounds.nodes {
            let oldest = (self.programs.iter().enumerate()).min_by_key(|(_, p)| p.used);
            let Some((i, _)) = oldest else { return };
            self.discard(i);
        }
        match self.submitter.build(&self.tape) {
            Ok(handle) => {
                self.failures = 0;
                self.figures.built += 1;
                self.nodes += n;
                self.clock += 1;
                self.programs.push(Program {
                    tape: core::mem::take(&mut self.tape),
                    handle,
                    used: self.clock,
                });
            }
            // The launches themselves were submitted, and will be again.
            Err(error) => {
                self.failures += 1;
                self.figures.failed += 1;
                self.refusal = Some(error);
            }
        }
    }
}

#[cfg(test)]
#[path = "programs_tests.rs"]
mod tests;
