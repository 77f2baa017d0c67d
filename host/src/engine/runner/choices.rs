//! Tokens that every rank of a split model chooses for itself, so that the next step need not wait until rank 0 has read them.
//!
//! Logits are the same bits on all ranks, and so are draws; what rank 0 has read it tells the others later, which compare.

use crate::engine::error::EngineError;
use crate::engine::ranks::{StepOrder, Told};

use super::Runner;
use super::step::{Outcome, Submitted};

/// What a rank knows of steps whose tokens all ranks choose. They are numbered in the order of their orders.
#[derive(Default)]
pub(super) struct Choices {
    /// How many there were.
    count: u64,
    /// Rank 0: those of which nothing was read yet, first to last. Others: the last one, until it is read.
    unread: Vec<(u64, Option<Submitted>)>,
    /// The last one that was read.
    told: Option<Told>,
}

impl Choices {
    /// Numbers a step: on rank 0, which keeps it elsewhere until it is read.
    pub(super) fn ordered(&mut self) {
        self.count += 1;
        self.unread.push((self.count, None));
    }

    /// Whether there is a step that was not read yet.
    pub(super) fn is_any_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// What the first step that was not read has given.
    pub(super) fn read(&mut self, outcomes: &[Outcome]) {
        if !self.unread.is_empty() {
            let (number, _) = self.unread.remove(0);
            self.told = Some(told(number, outcomes));
        }
    }

    /// What was read last, once.
    pub(super) fn tell(&mut self) -> Option<Told> {
        self.told.take()
    }
}

fn told(number: u64, outcomes: &[Outcome]) -> Told {
    let token = |outcome: &Outcome| match outcome {
        Outcome::Token(token) => Some(*token),
        Outcome::Logits(_) => None,
    };
    Told {
        number,
        tokens: outcomes.iter().map(token).collect(),
    }
}

impl Runner {
    /// Runs a step that rank 0 ordered, on another rank. Its tokens stay here: they are rank 0's to tell.
    pub fn follow(&mut self, order: &StepOrder) -> Result<(), EngineError> {
        if let Some(theirs) = &order.told {
            self.compare(theirs)?;
        }
        let previous = self.choices.unread.pop();
        let before = previous.as_ref().and_then(|(_, step)| step.as_ref());
        let step = &order.step;
        let tokens = self.tokens(step, before)?;
        let logits = self.forward_within(step, &tokens, order.capacity)?;
        if order.draws.is_empty() {
            self.computed(step, logits)?;
        } else {
            let wants: Vec<_> = order.draws.iter().map(|draw| draw.wants()).collect();
            let submitted = self.choose(step, &wants, logits, false)?;
            self.choices.count += 1;
            let number = self.choices.count;
            self.choices.unread.push((number, Some(submitted)));
        }
        // After the step is under way, so that the device has something to do meanwhile.
        self.settle(previous)
    }

    /// Reads the tokens of a step.
    fn settle(&mut self, step: Option<(u64, Option<Submitted>)>) -> Result<(), EngineError> {
        if let Some((number, Some(step))) = step {
            let outcomes = self.finish(step)?;
            self.choices.told = Some(told(number, &outcomes));
        }
        Ok(())
    }

    /// Compares tokens of rank 0 with those of this one.
    fn compare(&mut self, theirs: &Told) -> Result<(), EngineError> {
        let is_unread = |(number, _): &(u64, _)| *number == theirs.number;
        if self.choices.unread.last().is_some_and(is_unread) {
            // Rank 0 has read them before it ordered this step, so that nothing follows them.
            let step = self.choices.unread.pop();
            self.settle(step)?;
        }
        match &self.choices.told {
            Some(ours) if ours != theirs => Err(EngineError::Internal {
                message: format!(
                    "the ranks do not compute the same: tokens of step {} are {:?} on rank 0, those of step {} are {:?} here",
                    theirs.number, theirs.tokens, ours.number, ours.tokens
                ),
            }),
            _ => Ok(()),
        }
    }
}
