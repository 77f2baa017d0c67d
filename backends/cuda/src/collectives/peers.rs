//! Windows of all ranks, as one process has them.

use std::fmt::Write;
use std::sync::atomic::AtomicU32;

use mlxcel_abi::{AbiError, Result, status};

use super::layout::{Layout, MOST_RANKS};
use super::meeting::Gone;
use crate::driver::{Driver, Handle};

type Reason = String;

/// What this rank has before it knows of the others. Nothing of it is ever freed: others may write to it as long as they live.
pub(super) struct Own {
    driver: &'static Driver,
    layout: Layout,
    window: usize,
    handle: Handle,
    device: String,
}

/// What a rank says of itself: where its window is and on which device, or nothing.
pub(super) fn offer(own: &core::result::Result<Own, Reason>) -> String {
    own.as_ref().map_or_else(
        |_| String::new(),
        |own| format!("{} {}", own.device, hex(own.handle.bytes())),
    )
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // A text takes everything.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok())
        .collect()
}

/// The other ranks, through their windows.
#[derive(Debug)]
pub(crate) struct Peers {
    layout: Layout,
    rank: usize,
    /// From this rank's on.
    windows: [usize; MOST_RANKS],
    gone: Gone,
    /// Where devices find that.
    word: usize,
}

impl Own {
    /// A window on `device`, the current one.
    pub(super) fn new(
        driver: &'static Driver,
        device: i32,
        ranks: usize,
    ) -> core::result::Result<Self, Reason> {
        if ranks > MOST_RANKS {
            return Err(format!(
                "{ranks} ranks are more than {MOST_RANKS} that a sum of ours takes"
            ));
        }
        let layout = Layout { ranks };
        let text = |error: AbiError| error.message;
        let device = hex(&driver.identifier(device).map_err(text)?);
        let window = driver.window(layout.bytes()).map_err(text)?;
        let handle = driver.handle_of(window).map_err(text)?;
        Ok(Self {
            driver,
            layout,
            window,
            handle,
            device,
        })
    }

    /// Opens the windows that the others offer.
    pub(super) fn open(
        self,
        rank: usize,
        offers: &[String],
    ) -> core::result::Result<Peers, Reason> {
        let text = |error: AbiError| error.message;
        let mut devices: Vec<&str> = Vec::new();
        let mut windows = [0; MOST_RANKS];
        for (other, offer) in offers.iter().enumerate() {
            let (device, handle) = offer
                .split_once(' ')
                .ok_or_else(|| format!("rank {other} offers no window"))?;
            if devices.contains(&device) {
                return Err(format!("rank {other} shares a device with another one"));
            }
            devices.push(device);
            let place = (other + self.layout.ranks - rank) % self.layout.ranks;
            let Some(place) = windows.get_mut(place) else {
                return Err(format!("rank {other} is not one of {}", self.layout.ranks));
            };
            *place = if other == rank {
                self.window
            } else {
                let handle = bytes_of(handle).and_then(|bytes| Handle::new(&bytes));
                let handle =
                    handle.ok_or_else(|| format!("rank {other} offers no handle of a window"))?;
                self.driver.open_window(handle).map_err(|error| {
                    format!(
                        "the window of rank {other} cannot be opened: {}",
                        error.message
                    )
                })?
            };
        }
        let word = self.driver.host_word().map_err(text)?;
        // SAFETY: four zeroed bytes of pinned memory that are aligned and never freed; the device only reads them.
        let gone = Gone::new(unsafe { AtomicU32::from_ptr(word as *mut u32) });
        Ok(Peers {
            layout: self.layout,
            rank,
            windows,
            gone,
            word,
        })
    }
}

impl Peers {
    pub(super) fn gone(&self) -> &Gone {
        &self.gone
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// An error once one of them is gone: what was added since may be anything.
    pub(crate) fn check(&self) -> Result<()> {
        if self.gone.is_set() {
            return Err(AbiError::new(
                status::UNAVAILABLE,
                "another rank is gone, sums over the ranks are not known any more",
            ));
        }
        Ok(())
    }

    /// As the kernels' struct `Ranks` lies in memory.
    pub(crate) fn record(&self) -> [u64; MOST_RANKS + 2] {
        let mut words = [0; MOST_RANKS + 2];
        let last = [self.word, self.rank];
        for (to, from) in words.iter_mut().zip(self.windows.iter().chain(&last)) {
            *to = *from as u64;
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_from_their_text() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes_of(&hex(&bytes)), Some(bytes));
        assert_eq!(bytes_of("0"), None);
        assert_eq!(bytes_of("zz"), None);
        assert_eq!(offer(&Err("no device".to_owned())), "");
    }
}
