//! What the engine has done and holds, for those who watch it.

use super::prefix::PrefixStats;
use super::prefix_disk::DiskStats;

/// Counters since the start, and what is held now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineFigures {
    /// Steps that ran.
    pub steps: u64,
    /// Of them, those with rows of prompts and of answers at once.
    pub mixed_steps: u64,
    /// Rows of prompts, recomputed ones included.
    pub prefill_rows: u64,
    /// Rows of answers.
    pub decode_rows: u64,
    /// Requests in all steps together: over `steps` it is the mean batch.
    pub busy_sequences: u64,
    /// Requests that began.
    pub started: u64,
    /// Requests that ended, however they did.
    pub ended: u64,
    /// Times that a request stepped back because there was no room.
    pub preemptions: u64,
    /// Requests whose time was over.
    pub expired: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Of them, since the last step that did not.
    pub failed_in_a_row: u64,
    /// Whether the model panicked, after which it refuses every step.
    pub is_poisoned: bool,
    /// Longest sequence so far, in tokens.
    pub longest_tokens: u64,
    /// Pages in use, those of the prefix cache included.
    pub pages_in_use: usize,
    /// Pages there may be.
    pub pages_total: usize,
    /// Positions in a page.
    pub page_tokens: usize,
    /// Pages of encoders' output in use, those of running requests alone.
    pub encoder_pages_in_use: usize,
    /// Bytes of keys and values on the device.
    pub kv_bytes: usize,
    /// Pages of the prefix cache.
    pub prefix_pages: usize,
    /// Most pages it may have; 0 when it is off.
    pub prefix_max_pages: usize,
    /// Counters of the prefix cache.
    pub prefix: PrefixStats,
    /// Counters of its disk.
    pub disk: DiskStats,
    /// Tensors that the backend holds; 0 where it does not count them.
    pub live_tensors: u64,
}
