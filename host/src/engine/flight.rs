//! A step in flight: submitted to the device, its tokens not read yet.

use std::time::Instant;

use super::active::Progress;
use super::runner::Submitted;

/// Whether the next step is submitted before the tokens of the last one are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lookahead {
    /// Where the backend goes on working after a submission.
    #[default]
    Auto,
    /// Wherever tokens are chosen on the device.
    On,
    /// Never.
    Off,
}

/// A submitted step and whose rows it has.
pub struct Flight {
    /// What the device has.
    pub step: Submitted,
    /// In the order of its spans.
    pub rows: Vec<FlightRow>,
    /// When it was recorded.
    pub began_at: Instant,
    /// Rows of answers.
    pub answer_rows: usize,
    /// Rows of prompts.
    pub prompt_rows: usize,
}

/// The rows of one request in a step.
#[derive(Debug, Clone, Copy)]
pub struct FlightRow {
    /// Of the request.
    pub id: u64,
    /// Whether its last row gives something.
    pub wants: bool,
    /// What it is on the way of a prompt.
    pub progress: Option<Progress>,
}

impl Flight {
    /// Whether a step can follow before its tokens are read.
    pub fn is_followable(&self) -> bool {
        self.step.can_be_followed()
    }

    /// Which of the tokens that the device chooses is that of a request.
    pub fn token_of(&self, id: u64) -> Option<u32> {
        let mut wanting = self.rows.iter().filter(|row| row.wants);
        let row = wanting.position(|row| row.id == id)?;
        self.step.token_of(row)
    }
}
