//! Step programs: launches that come again as they were are submitted as one.
//!
//! A step of a decoder is some hundred launches, and the driver takes two microseconds for each. Since everything that varies from
//! step to step is in arrays, and memory of results is found again at the same places, the launches of one step are mostly those of
//! the step before, argument by argument. They are cut into segments, at fixed lengths and wherever something else has to come
//! after them. A segment that is seen for the second time is made into a program; from then on launches are held back as long as
//! they go on as a program does, and submitted with it once it is whole. What goes on otherwise is submitted launch by launch,
//! in order, so the effects are those of the launches in either case.

mod bounds;
mod tape;

use std::collections::VecDeque;

use mlxcel_abi::{AbiError, Result, status};

use crate::driver::Launch;
use bounds::Figures;
pub(crate) use bounds::{Bounds, LONGEST};
pub(crate) use tape::Tape;

/// Launches below which a program does not pay.
const LEAST: usize = 4;
/// Programs that could not be made, one after another, after which it is not tried again.
const MOST_FAILURES: u32 = 3;
/// Segments for which no program is made after memory was short.
const PAUSE: u32 = 1024;
/// Programs that wait for their first use at most. With that many, what comes again does so by chance, and it is not worth making more
/// of it for some time: twice as long whenever fewer of them were used than not, up to the longest.
const MOST_UNUSED: usize = 48;
const LONGEST_PAUSE: u32 = 8 * PAUSE;

/// Who does what is asked for.
pub(crate) trait Submitter {
    /// Submits one kernel.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<()>;
    /// Makes a program.
    fn build(&mut self, launches: &Tape) -> Result<Built>;
    /// Submits a program.
    fn replay(&mut self, program: usize) -> Result<()>;
    /// Ends a program.
    fn discard(&mut self, program: usize);
}

/// A program that was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Built {
    pub(crate) handle: usize,
    /// Memory of the device that it took.
    pub(crate) bytes: u64,
}

#[derive(Debug)]
struct Program {
    tape: Tape,
    built: Built,
    used: u64,
    /// It was submitted at least once.
    is_proven: bool,
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
    /// Segments that are not made into programs, because memory was short or programs were not used.
    pause: u32,
    /// The next pause for the latter.
    patience: u32,
    /// Programs that were made since the last of these, and those of them that were used.
    tried: u32,
    proven: u32,
    /// Why the last program could not be made.
    refusal: Option<AbiError>,
    /// An error that the call it came up in could not report.
    unreported: Option<AbiError>,
    /// The device has more to do than the host: launches are submitted as they come, and not remembered.
    is_busy: bool,
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
            pause: 0,
            patience: PAUSE,
            tried: 0,
            proven: 0,
            refusal: None,
            unreported: None,
            is_busy: false,
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
        if self.bounds.longest == 0 || self.is_busy {
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

    /// Says whether what follows keeps the device busy for longer than the host takes to submit it, as prompts do. They
    /// hardly ever come again, and programs of them would only take the place of those of answers.
    pub(crate) fn set_busy(&mut self, is_busy: bool) -> Result<()> {
        if is_busy == self.is_busy {
            return Ok(());
        }
        if self.tape.len() > 0 && !self.at_once {
            self.launch_held()?;
        }
        self.restart();
        self.is_busy = is_busy;
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
        self.forget();
        self.bounds.longest = 0;
    }

    /// Memory of the device that programs have.
    pub(crate) fn bytes(&self) -> u64 {
        self.programs
            .iter()
            .map(|program| program.built.bytes)
            .sum()
    }

    /// Ends all programs; those that come again are made again.
    pub(crate) fn forget(&mut self) {
        self.submit_silently();
        for program in core::mem::take(&mut self.programs) {
            self.figures.dropped += 1;
            self.submitter.discard(program.built.handle);
        }
        self.nodes = 0;
        self.seen.clear();
    }

    /// The same because memory is short: none are made for a while.
    pub(crate) fn make_room(&mut self) {
        self.forget();
        self.pause = PAUSE;
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
        if !core::mem::replace(&mut program.is_proven, true) {
            self.proven += 1;
        }
        let Err(error) = self.submitter.replay(program.built.handle) else {
            self.figures.replays += 1;
            self.figures.in_programs += program.tape.len() as u64;
            return Ok(());
        };
        self.discard(i);
        if error.code == status::RESOURCE_EXHAUSTED {
            // The driver had no memory for the whole and took none of it; one by one they need less.
            self.pause = PAUSE;
            return self.launch_held();
        }
        self.whole(Err(error))
    }

    fn discard(&mut self, i: usize) {
        let program = self.programs.swap_remove(i);
        self.nodes -= program.tape.len();
        self.figures.dropped += 1;
        self.submitter.discard(program.built.handle);
    }

    /// Whether too many programs wait for their first use. Ends them, and has none made for a while.
    fn gives_up(&mut self) -> bool {
        let unused = |program: &Program| !program.is_proven;
        if self.programs.iter().filter(|p| unused(p)).count() < MOST_UNUSED {
            return false;
        }
        while let Some(i) = self.programs.iter().position(unused) {
            self.discard(i);
        }
        self.patience = if 2 * self.proven < self.tried {
            (2 * self.patience).min(LONGEST_PAUSE)
        } else {
            PAUSE
        };
        (self.tried, self.proven) = (0, 0);
        self.pause = self.patience;
        true
    }

    /// Notes a segment that was submitted launch by launch; the second time it becomes a program.
    fn learn(&mut self) {
        let n = self.tape.len();
        if n < LEAST || n > self.bounds.nodes || self.failures >= MOST_FAILURES {
            return;
        }
        if self.pause > 0 {
            self.pause -= 1;
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
        if self.gives_up() {
            return;
        }
        while self.programs.len() >= self.bounds.programs || self.nodes + n > self.bounds.nodes {
            let oldest = (self.programs.iter().enumerate()).min_by_key(|(_, p)| p.used);
            let Some((i, _)) = oldest else { return };
            self.discard(i);
        }
        match self.submitter.build(&self.tape) {
            Ok(built) => {
                self.failures = 0;
                self.figures.built += 1;
                self.nodes += n;
                self.clock += 1;
                self.tried += 1;
                self.programs.push(Program {
                    tape: core::mem::take(&mut self.tape),
                    built,
                    used: self.clock,
                    is_proven: false,
                });
            }
            // The launches themselves were submitted, and will be again.
            Err(error) => {
                if error.code == status::RESOURCE_EXHAUSTED {
                    self.pause = PAUSE;
                } else {
                    self.failures += 1;
                }
                self.figures.failed += 1;
                self.refusal = Some(error);
            }
        }
    }
}

#[cfg(test)]
mod tests;
