//! How much is kept of programs, and what came of it.

/// Launches of the first segment after a border, so that the device has something to do early; each further one has twice as many.
const FIRST: usize = 16;
/// Most launches of a segment, unless it is set otherwise.
pub(crate) const LONGEST: usize = 64;
/// Programs that are kept, and launches of all of them.
const MOST_PROGRAMS: usize = 256;
const MOST_NODES: usize = 8192;
/// Segments that are remembered as seen once: those of some twenty steps of a decoder. What comes again later does so seldom.
pub(super) const MOST_SEEN: usize = 256;

/// What happened so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Figures {
    /// Launches that were asked for.
    pub(super) launches: u64,
    /// Those of them that a program submitted.
    pub(super) in_programs: u64,
    /// Programs that were submitted.
    pub(super) replays: u64,
    /// Programs that were made, let go of, and could not be made.
    pub(super) built: u64,
    pub(super) dropped: u64,
    pub(super) failed: u64,
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

    pub(super) fn first(&self) -> usize {
        FIRST.min(self.longest)
    }
}
