//! How much room there is for keys and values, in bytes and in tokens, and whether it is of any use.

use crate::plugin::{DType, SelectedBackend};

use super::desc::ModelDesc;
use super::detect::OpenedModel;
use super::error::EngineError;
use super::kv_types::KvType;
use super::load::{LoadOptions, context_tokens, preferred_dtype};
use super::ranks::Split;
use super::runner::{PAGE_SIZE, cross_dtype};

/// Share of the free memory that keys and values may take when nobody says otherwise; the rest is for
/// activations and for others.
const KV_SHARE: f64 = 0.8;

/// Share of the budget that states left for later requests may take when nobody says otherwise, and
/// most of them: they are looked through one by one.
const CHECKPOINT_SHARE: u64 = 8;
const MOST_CHECKPOINTS: u64 = 256;

/// Among how many processes weights and the device are.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    weights: usize,
    device: usize,
}

impl Shared {
    pub fn of(split: Option<&Split<'_>>) -> Self {
        Self {
            weights: split.map_or(1, Split::size),
            device: split.map_or(1, Split::sharing),
        }
    }
}

/// What a budget holds.
pub(super) struct Room {
    /// Bytes for everything that requests keep.
    pub budget_bytes: u64,
    /// Positions whose keys and values may be held at a time.
    pub tokens: usize,
    /// States that may be kept for later requests.
    pub checkpoints: usize,
    /// Bytes of the keys and values of one position.
    per_token_bytes: u64,
    /// Bytes that running requests take whatever their length.
    fixed_bytes: u64,
    /// Bytes of the states for later requests.
    checkpoint_bytes: u64,
}

impl Room {
    fn page_bytes(&self) -> u64 {
        self.per_token_bytes.saturating_mul(PAGE_SIZE as u64)
    }

    /// A budget that holds a page. `checkpoints_are_a_share` where they take a part of whatever it is.
    fn least_bytes(&self, checkpoints_are_a_share: bool) -> u64 {
        let needed = self.page_bytes().saturating_add(self.fixed_bytes);
        match (checkpoints_are_a_share, self.fixed_bytes) {
            (true, 0) => needed,
            (true, _) => needed
                .saturating_mul(CHECKPOINT_SHARE)
                .div_ceil(CHECKPOINT_SHARE - 1),
            (false, _) => needed.saturating_add(self.checkpoint_bytes),
        }
    }
}

/// The room for keys and values. Recurrent states and what encoders give come first, since a request without them
/// cannot run.
pub(super) fn room(
    desc: &ModelDesc,
    selected: &SelectedBackend,
    options: &LoadOptions,
    (kv_type, dtype): (KvType, DType),
    (weights_bytes, shared): (u64, Shared),
) -> Room {
    let free_bytes = selected
        .report
        .devices
        .first()
        .map_or(0, |device| device.free_bytes / shared.device as u64);
    let left_bytes = free_bytes.saturating_sub(weights_bytes / shared.weights as u64);
    let budget_bytes = match options.kv_budget_bytes {
        Some(bytes) => bytes,
        // The device does not tell: the requests' own bound is all there is.
        None if free_bytes == 0 => u64::MAX,
        None => (left_bytes as f64 * KV_SHARE) as u64,
    };
    let parallel = options.limits.parallel.max(1) as u64;
    let state_bytes = desc.state_bytes_per_sequence() as u64;
    let most_bytes = options
        .prefix
        .max_bytes
        .unwrap_or(budget_bytes / CHECKPOINT_SHARE);
    let checkpoints = (most_bytes.checked_div(state_bytes).unwrap_or(0)).min(MOST_CHECKPOINTS);
    let cross_element_bytes = cross_dtype(kv_type, dtype).size_bytes();
    let cross_bytes = desc.cross_bytes_per_sequence(cross_element_bytes) as u64;
    // Two for every request, one that a step reads and one that it writes.
    let fixed_bytes = state_bytes
        .saturating_mul(2)
        .saturating_add(cross_bytes)
        .saturating_mul(parallel);
    let checkpoint_bytes = state_bytes.saturating_mul(checkpoints);
    let per_token_bytes = desc.kv_bytes_per_token(kv_type).max(1) as u64;
    let kv_bytes = budget_bytes
        .saturating_sub(fixed_bytes)
        .saturating_sub(checkpoint_bytes);
    Room {
        budget_bytes,
        tokens: usize::try_from(kv_bytes / per_token_bytes).unwrap_or(usize::MAX),
        checkpoints: checkpoints as usize,
        per_token_bytes,
        fixed_bytes,
        checkpoint_bytes,
    }
}

/// Refuses, before the weights are read, a budget in which no page has room, and a folder that cannot be one.
/// `weights_bytes` are those that headers tell. Forced is what the device seems to have no room for; a budget that was
/// given is never.
pub fn check_room(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    options: &LoadOptions,
    weights_bytes: u64,
    is_forced: bool,
) -> Result<(), EngineError> {
    let dtype = options
        .dtype
        .unwrap_or_else(|| preferred_dtype(opened, selected));
    let kv_type = options
        .kv_types
        .resolve(dtype, options.precision, selected, &opened.desc)?;
    let split = match &options.ranks {
        None => None,
        Some(plan) => Some(Split::new(plan, opened, selected, options)?),
    };
    let desc = split.as_ref().map_or(&opened.desc, |split| &split.desc);
    let weights = (weights_bytes, Shared::of(split.as_ref()));
    let room = room(desc, selected, options, (kv_type, dtype), weights);
    let context = context_tokens(opened.desc.context_length, options.ctx_size)?;
    check(&room, options, context, is_forced)?;
    match &options.prefix.disk {
        None => Ok(()),
        Some(disk) => disk.check().map_err(|source| EngineError::PrefixDir {
            dir: disk.dir.clone(),
            source,
        }),
    }
}

fn check(
    room: &Room,
    options: &LoadOptions,
    context_tokens: usize,
    is_forced: bool,
) -> Result<(), EngineError> {
    let least_bytes = room.least_bytes(options.prefix.max_bytes.is_none());
    let (page_tokens, page_bytes) = (PAGE_SIZE, room.page_bytes());
    let fixed_bytes = room.fixed_bytes;
    match options.kv_budget_bytes {
        Some(budget_bytes) if room.tokens < PAGE_SIZE.min(context_tokens) => {
            Err(EngineError::KvBudgetTooSmall {
                budget_bytes,
                page_tokens,
                page_bytes,
                fixed_bytes,
                least_bytes,
            })
        }
        None if room.tokens == 0 && !is_forced => Err(EngineError::NoRoomForKv {
            room_bytes: room.budget_bytes,
            page_tokens,
            page_bytes,
            fixed_bytes,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::PrefixOptions;

    fn holding(budget_bytes: u64, fixed_bytes: u64, checkpoint_bytes: u64) -> Room {
        let left = budget_bytes.saturating_sub(fixed_bytes + checkpoint_bytes);
        Room {
            budget_bytes,
            tokens: (left / 100) as usize,
            checkpoints: 0,
            per_token_bytes: 100,
            fixed_bytes,
            checkpoint_bytes,
        }
    }

    fn outcome(budget_bytes: u64, fixed_bytes: u64) -> Result<(), String> {
        let options = LoadOptions {
            kv_budget_bytes: Some(budget_bytes),
            ..LoadOptions::default()
        };
        let checkpoint_bytes = match fixed_bytes {
            0 => 0,
            _ => budget_bytes / CHECKPOINT_SHARE,
        };
        let room = holding(budget_bytes, fixed_bytes, checkpoint_bytes);
        check(&room, &options, 4096, true).map_err(|error| error.to_string())
    }

    #[test]
    fn a_budget_holds_a_page_or_is_refused_with_what_would_do() {
        assert!(outcome(3200, 0).is_ok());
        insta::assert_snapshot!(outcome(3199, 0).unwrap_err(), @"--kv-cache-budget of 3199 bytes holds no page of 32 tokens, which takes 3200: give at least 3200, or auto");
        insta::assert_snapshot!(outcome(5000, 3000).unwrap_err(), @"--kv-cache-budget of 5000 bytes holds no page of 32 tokens, which takes 3200 beside 3000 of the states of all answers: give at least 7086, or auto");
        assert!(outcome(7086, 3000).is_ok());
    }

    #[test]
    fn a_short_context_needs_no_whole_page() {
        let options = LoadOptions {
            kv_budget_bytes: Some(900),
            ..LoadOptions::default()
        };
        assert!(check(&holding(900, 0, 0), &options, 8, true).is_ok());
        assert!(check(&holding(900, 0, 0), &options, 10, true).is_err());
    }

    #[test]
    fn without_a_budget_one_token_will_do() {
        let options = LoadOptions {
            prefix: PrefixOptions {
                max_bytes: Some(0),
                ..PrefixOptions::default()
            },
            ..LoadOptions::default()
        };
        assert!(check(&holding(100, 0, 0), &options, 4096, false).is_ok());
        assert!(check(&holding(99, 0, 0), &options, 4096, true).is_ok());
        let text = check(&holding(99, 0, 0), &options, 4096, false)
            .unwrap_err()
            .to_string();
        insta::assert_snapshot!(text, @"the device has 99 bytes left for keys and values beside the weights, and a page of 32 tokens takes 3200: free memory of the device, take a smaller quantisation, or give caches a smaller type with --cache-type-k and --cache-type-v");
    }
}
