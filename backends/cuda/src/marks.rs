//! Marks behind the steps that were submitted last: who reads what such a step computed waits for its mark, and not for the step
//! that was submitted after it.

use std::collections::VecDeque;

use mlxcel_abi::{Result, Tensor};

use crate::driver::{Driver, Event, Stream};

/// Steps that may still be read of. One is under way while the one before it is read.
const MOST: usize = 4;

/// Which results are behind which events: the last few.
#[derive(Debug, Default)]
struct Recent(VecDeque<(usize, Vec<Tensor>)>);

impl Recent {
    /// An event that is not needed any more.
    fn free(&mut self) -> Option<usize> {
        if self.0.len() < MOST {
            return None;
        }
        self.0.pop_front().map(|(event, _)| event)
    }

    fn note(&mut self, event: usize, results: &[Tensor]) {
        self.0.push_back((event, results.to_vec()));
    }

    /// The event after which a result is there.
    fn of(&self, result: Tensor) -> Option<usize> {
        let mut newest_first = self.0.iter().rev();
        let found = newest_first.find(|(_, results)| results.contains(&result));
        found.map(|(event, _)| *event)
    }
}

/// Marks of one stream.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    recent: Recent,
    /// Where results are read, once there is something to read.
    side: usize,
}

impl Marks {
    /// Marks what was submitted so far as that which gives `results`.
    pub(crate) fn note(
        &mut self,
        driver: &Driver,
        stream: Stream,
        results: &[Tensor],
    ) -> Result<()> {
        let event = match self.recent.free() {
            Some(event) => event,
            None => driver.event()? as usize,
        };
        // SAFETY: an event that nothing is behind any more, and that lives until `end`.
        let recorded = unsafe { driver.record(event as Event, stream) };
        // It stays in the list in any case; results are behind it where it is behind them.
        let behind = if recorded.is_ok() { results } else { &[] };
        self.recent.note(event, behind);
        recorded
    }

    /// Copies bytes of a result from the device, and waits for them. Says whether it is behind a mark; nothing is done where it is not.
    ///
    /// # Safety
    /// `bytes` writable bytes at `to`, and as many of `result` on the device at `from`.
    pub(crate) unsafe fn read(
        &mut self,
        driver: &Driver,
        result: Tensor,
        to: *mut u8,
        from: usize,
        bytes: usize,
    ) -> Result<bool> {
        let Some(event) = self.recent.of(result) else {
            return Ok(false);
        };
        if self.side == 0 {
            self.side = driver.side_stream()? as usize;
        }
        let side = self.side as Stream;
        // SAFETY: an event of this list; the rest is forwarded to the caller.
        unsafe {
            driver.await_event(event as Event, side)?;
            driver.download(to, from, bytes, side)?;
        }
        Ok(true)
    }

    /// Ends all events.
    pub(crate) fn end(&mut self, driver: &Driver) {
        for (event, _) in self.recent.0.drain(..) {
            // An error has nobody to be told to.
            // SAFETY: an event of this list, which is forgotten.
            let _ = unsafe { driver.end_event(event as Event) };
        }
        let side = core::mem::take(&mut self.side);
        if side != 0 {
            // SAFETY: nothing is read any more.
            let _ = unsafe { driver.end_side_stream(side as Stream) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_steps_are_known_by_their_results() {
        let mut recent = Recent::default();
        for step in 0..10_u64 {
            let event = recent.free().unwrap_or(step as usize + 1);
            // One result of each step, and one of all.
            recent.note(event, &[Tensor(100 + step), Tensor(7)]);
        }
        assert_eq!(recent.0.len(), MOST);
        let last = recent.0.back().map(|(event, _)| *event);
        assert_eq!(recent.of(Tensor(7)), last);
        assert_eq!(recent.of(Tensor(109)), last);
        let before: Vec<usize> = (106..110).filter_map(|t| recent.of(Tensor(t))).collect();
        assert_eq!(before, [3, 4, 1, 2]);
        assert_eq!(recent.of(Tensor(105)), None);
    }
}
