//! Stop strings over streamed text.
//!
//! The matcher is an Aho-Corasick automaton over bytes. Its state after some text is the longest suffix of the text
//! that begins a stop string, so exactly that suffix is held back, never a fixed window, and the outcome does not
//! depend on how the text was cut.
//!
//! **Which match wins**: the one that ends first; of those that end together, the one that starts first. This is the
//! only rule that lets generation stop at once.

use std::collections::VecDeque;

/// Limits of a set of stop strings. OpenAI allows four; llama-server has no limit, so one that protects memory is ours.
const MAX_STOPS: usize = 256;
const MAX_STOP_BYTES: usize = 64 * 1024;

/// Stop strings that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty stop string would match everywhere.
    #[error("stop string {index} is empty")]
    Empty {
        /// Its position in the list.
        index: usize,
    },
    /// Too many strings.
    #[error("{count} stop strings, the limit is {limit}")]
    TooMany {
        /// How many there are.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// Too much text in all of them together.
    #[error("the stop strings have {bytes} bytes together, the limit is {limit_bytes}")]
    TooLong {
        /// Their size.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
}

/// Whether the stop string is part of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StopText {
    /// The answer ends before it.
    #[default]
    Exclude,
    /// The answer ends with it.
    Include,
}

/// The stop string that ended the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopMatch {
    /// Its position in the list given to [`StopMatcher::new`].
    pub index: usize,
    /// The string.
    pub text: String,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopOutput {
    /// Text to give out now.
    pub text: String,
    /// Set once, when a stop string was completed. Nothing follows it.
    pub stopped: Option<StopMatch>,
}

#[derive(Debug, Clone, Default)]
struct Node {
    /// Children by byte, sorted.
    next: Vec<(u8, u32)>,
    fail: u32,
    /// Length of the text from the root to here: how much is held back in this state.
    depth: usize,
    /// The longest stop string that ends here, own or through `fail`.
    matched: Option<usize>,
}

/// Finds the first stop string in a stream of text.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    nodes: Vec<Node>,
    mode: StopText,
    state: u32,
    /// Text that may become part of a stop string: always exactly `depth` of the state.
    held: String,
    stopped: bool,
}

impl StopMatcher {
    /// A matcher for `stops`. An empty list never stops and holds nothing back.
    pub fn new(stops: impl IntoIterator<Item = String>, mode: StopText) -> Result<Self, StopError> {
        let stops: Vec<String> = stops.into_iter().collect();
        if stops.len() > MAX_STOPS {
            return Err(StopError::TooMany {
                count: stops.len(),
                limit: MAX_STOPS,
            });
        }
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(StopError::Empty { index });
        }
        let bytes = stops.iter().map(String::len).sum();
        if bytes > MAX_STOP_BYTES {
            return Err(StopError::TooLong {
                bytes,
                limit_bytes: MAX_STOP_BYTES,
            });
        }
        let nodes = build(&stops);
        Ok(StopMatcher {
            stops,
            nodes,
            mode,
            state: 0,
            held: String::new(),
            stopped: false,
        })
    }

    /// Adds `text`. After a stop string was found, further text is ignored.
    pub fn push(&mut self, text: &str) -> StopOutput {
        if self.stopped || text.is_empty() {
            return StopOutput::default();
        }
        self.held.push_str(text);
        let scanned = self.held.len() - text.len();
        for (offset, byte) in text.bytes().enumerate() {
            self.state = self.step(self.state, byte);
            if let Some(index) = self.node(self.state).matched {
                return self.stop_at(index, scanned + offset + 1);
            }
        }
        let certain = self.held.len() - self.node(self.state).depth.min(self.held.len());
        StopOutput {
            text: self.take(certain),
            stopped: None,
        }
    }

    /// Ends the stream: text that only began a stop string belongs to the answer.
    pub fn finish(&mut self) -> StopOutput {
        self.state = 0;
        StopOutput {
            text: std::mem::take(&mut self.held),
            stopped: None,
        }
    }

    /// How many bytes are held back now.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    fn stop_at(&mut self, index: usize, end: usize) -> StopOutput {
        self.stopped = true;
        let stop = self.stops.get(index).cloned().unwrap_or_default();
        let cut = match self.mode {
            StopText::Exclude => end - stop.len(),
            StopText::Include => end,
        };
        let text = self.take(cut);
        self.held.clear();
        StopOutput {
            text,
            stopped: Some(StopMatch { index, text: stop }),
        }
    }

    /// Splits off the first `count` bytes of the held text. Stop strings are UTF-8 and so is the text, hence a match
    /// or a partial match always begins and ends between characters.
    fn take(&mut self, count: usize) -> String {
        let rest = self.held.split_off(count);
        std::mem::replace(&mut self.held, rest)
    }

    fn step(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            let node = self.node(state);
            if let Ok(at) = node.next.binary_search_by_key(&byte, |(key, _)| *key) {
                return node.next.get(at).map_or(0, |(_, child)| *child);
            }
            if state == 0 {
                return 0;
            }
            state = node.fail;
        }
    }

    fn node(&self, state: u32) -> &Node {
        const ROOT: &Node = &Node {
            next: Vec::new(),
            fail: 0,
            depth: 0,
            matched: None,
        };
        self.nodes.get(state as usize).unwrap_or(ROOT)
    }
}

fn build(stops: &[String]) -> Vec<Node> {
    let mut nodes = vec![Node::default()];
    for (index, stop) in stops.iter().enumerate() {
        let mut at = 0usize;
        for (depth, byte) in stop.bytes().enumerate() {
            at = child(&nodes, at, byte)
                .unwrap_or_else(|| add_child(&mut nodes, at, byte, depth + 1));
        }
        if let Some(node) = nodes.get_mut(at) {
            // The same string twice: the first one in the list is reported.
            node.matched.get_or_insert(index);
        }
    }
    // Breadth first, so that the failure target of a node is finished before the node.
    let mut queue: VecDeque<usize> = VecDeque::from([0]);
    while let Some(at) = queue.pop_front() {
        for (byte, next) in nodes
            .get(at)
            .map(|node| node.next.clone())
            .unwrap_or_default()
        {
            let next = next as usize;
            let fail = if at == 0 { 0 } else { follow(&nodes, at, byte) };
            let inherited = nodes.get(fail).and_then(|node| node.matched);
            if let Some(node) = nodes.get_mut(next) {
                node.fail = fail as u32;
                node.matched = node.matched.or(inherited);
            }
            queue.push_back(next);
        }
    }
    nodes
}

fn child(nodes: &[Node], at: usize, byte: u8) -> Option<usize> {
    let node = nodes.get(at)?;
    let found = node
        .next
        .binary_search_by_key(&byte, |(key, _)| *key)
        .ok()?;
    node.next.get(found).map(|(_, child)| *child as usize)
}

fn add_child(nodes: &mut Vec<Node>, at: usize, byte: u8, depth: usize) -> usize {
    let index = nodes.len();
    nodes.push(Node {
        depth,
        ..Node::default()
    });
    if let Some(node) = nodes.get_mut(at) {
        let place = node.next.partition_point(|(key, _)| *key < byte);
        node.next.insert(place, (byte, index as u32));
    }
    index
}

fn follow(nodes: &[Node], at: usize, byte: u8) -> usize {
    let mut state = nodes.get(at).map_or(0, |node| node.fail as usize);
    loop {
        if let Some(next) = child(nodes, state, byte) {
            return next;
        }
        if state == 0 {
            return 0;
        }
        state = nodes.get(state).map_or(0, |node| node.fail as usize);
    }
}

#[cfg(test)]
#[path = "stop_tests.rs"]
mod tests;
