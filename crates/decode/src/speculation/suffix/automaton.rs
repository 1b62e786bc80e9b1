//! A suffix automaton over tokens, extended one token at a time.
//!
//! A state stands for all substrings with the same end positions. It has one edge per token that
//! followed one of them. Its suffix link leads to the state of the longest shorter suffix with more
//! end positions. So the link of the last state is the longest end of the text that has occurred
//! before: a search needs no scan.
//!
//! A text of `n` tokens has at most `2 n` states and `3 n` edges, and an extension takes amortised
//! constant time. Occurrences are counted along the nearest [`COUNTED_LINKS`] links only. Without
//! this limit a text of one repeated token would cost quadratic time.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use contract::TokenId;

/// Links along which a new token's occurrences are counted. Shorter suffixes keep older counts.
pub(super) const COUNTED_LINKS: usize = 32;
/// Edges of a state that are searched one by one; a state with more has an index.
const LISTED_EDGES: u32 = 8;
/// Edges of a state that [`SuffixAutomaton::continuations`] considers, the newest first.
pub(super) const CONSIDERED_EDGES: usize = 32;

const ROOT: u32 = 0;
/// No state, or no edge.
const NONE: u32 = u32::MAX;

/// A suffix automaton. It holds at most 180 bytes per token, and 70 to 110 for usual texts.
#[derive(Debug, Clone)]
pub struct SuffixAutomaton {
    states: Vec<SuffixState>,
    edges: Vec<Edge>,
    /// The edges of states with more than [`LISTED_EDGES`], by state and token.
    indexed: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
    last: u32,
}

#[derive(Debug, Clone, Copy)]
struct SuffixState {
    /// Tokens of its longest substring.
    len: u32,
    link: u32,
    /// Its newest edge; the others follow in [`Edge::next`].
    newest_edge: u32,
    n_edges: u32,
    /// Occurrences.
    count: u32,
    /// End position of the latest occurrence.
    latest: u32,
}

#[derive(Debug, Clone, Copy)]
struct Edge {
    token: TokenId,
    target: u32,
    /// The next older edge of the same state.
    next: u32,
}

/// An occurrence of the end of a text earlier in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuffixMatch {
    state: u32,
    len: u32,
}

impl SuffixMatch {
    /// Number of tokens that match.
    pub fn len(self) -> usize {
        self.len as usize
    }

    /// Whether nothing matches.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

/// A token that has followed a match before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continuation {
    /// The token.
    pub token: TokenId,
    /// How often it followed.
    pub count: u32,
    /// Where it last followed: its position in the text.
    pub latest: u32,
}

/// Multiplicative hashing of a state and a token.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, key: u64) {
        // The golden ratio as a fixed-point fraction spreads consecutive keys.
        let product = (self.0 ^ key).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

impl Default for SuffixAutomaton {
    fn default() -> SuffixAutomaton {
        let root = SuffixState {
            len: 0,
            link: NONE,
            newest_edge: NONE,
            n_edges: 0,
            count: 0,
            latest: 0,
        };
        SuffixAutomaton {
            states: vec![root],
            edges: Vec::new(),
            indexed: HashMap::default(),
            last: ROOT,
        }
    }
}

impl SuffixAutomaton {
    /// Tokens of the text.
    pub fn len(&self) -> usize {
        self.states[self.last as usize].len as usize
    }

    /// Whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.last == ROOT
    }

    /// Bytes of memory that it holds.
    pub fn bytes(&self) -> usize {
        // An entry of the index and its control byte.
        let entry = size_of::<(u64, u32)>() + 1;
        self.states.capacity() * size_of::<SuffixState>()
            + self.edges.capacity() * size_of::<Edge>()
            + self.indexed.capacity() * entry * 8 / 7
    }

    /// Appends a token to the text.
    ///
    /// # Panics
    /// Behind `u32::MAX / 3` tokens, which no context reaches.
    pub fn push(&mut self, token: TokenId) {
        let position = self.states[self.last as usize].len;
        assert!(position < NONE / 3, "the text is too long for its indices");
        let new = self.add_state(SuffixState {
            len: position + 1,
            link: ROOT,
            newest_edge: NONE,
            n_edges: 0,
            count: 0,
            latest: position,
        });
        let mut at = self.last;
        while at != NONE && self.edge(at, token).is_none() {
            self.add_edge(at, token, new);
            at = self.states[at as usize].link;
        }
        if at != NONE
            && let Some(edge) = self.edge(at, token)
        {
            let target = self.edges[edge as usize].target;
            let one_longer = self.states[at as usize].len + 1;
            let link = if self.states[target as usize].len == one_longer {
                target
            } else {
                self.split(at, token, (target, one_longer))
            };
            self.states[new as usize].link = link;
        }
        self.last = new;
        let mut at = new;
        for _ in 0..COUNTED_LINKS {
            if at == ROOT {
                break;
            }
            let state = &mut self.states[at as usize];
            state.count += 1;
            state.latest = position;
            at = state.link;
        }
    }

    /// The longest end of the text that has occurred before.
    pub fn longest_match(&self) -> SuffixMatch {
        match self.states[self.last as usize].link {
            NONE => SuffixMatch {
                state: ROOT,
                len: 0,
            },
            state => SuffixMatch {
                state,
                len: self.states[state as usize].len,
            },
        }
    }

    /// The longest end of `found` and `token` together that occurs in the text.
    pub fn follow(&self, found: SuffixMatch, token: TokenId) -> SuffixMatch {
        let SuffixMatch { mut state, mut len } = found;
        loop {
            if let Some(edge) = self.edge(state, token) {
                return SuffixMatch {
                    state: self.edges[edge as usize].target,
                    len: len + 1,
                };
            }
            state = self.states[state as usize].link;
            if state == NONE {
                return SuffixMatch {
                    state: ROOT,
                    len: 0,
                };
            }
            len = self.states[state as usize].len;
        }
    }

    /// The tokens that followed a match before, at most `most`: frequent ones first, then recent
    /// ones. Only the newest 32 are considered.
    pub fn continuations(&self, found: SuffixMatch, most: usize) -> Vec<Continuation> {
        let state = &self.states[found.state as usize];
        let mut all = Vec::with_capacity(CONSIDERED_EDGES.min(state.n_edges as usize));
        let mut at = state.newest_edge;
        while at != NONE && all.len() < CONSIDERED_EDGES {
            let Edge {
                token,
                target,
                next,
            } = self.edges[at as usize];
            let target = &self.states[target as usize];
            all.push(Continuation {
                token,
                count: target.count,
                latest: target.latest,
            });
            at = next;
        }
        all.sort_unstable_by(|a, b| b.count.cmp(&a.count).then(b.latest.cmp(&a.latest)));
        all.truncate(most);
        all
    }

    /// Splits from `target` its substrings of at most `len` tokens, which end in `token` behind
    /// `at`. Returns their state.
    fn split(&mut self, at: u32, token: TokenId, (target, len): (u32, u32)) -> u32 {
        let clone = self.add_state(SuffixState {
            len,
            newest_edge: NONE,
            n_edges: 0,
            ..self.states[target as usize]
        });
        let mut edges = Vec::with_capacity(self.states[target as usize].n_edges as usize);
        let mut next = self.states[target as usize].newest_edge;
        while next != NONE {
            let edge = self.edges[next as usize];
            edges.push((edge.token, edge.target));
            next = edge.next;
        }
        // The oldest first, so that the newest is at the front again.
        for (token, target) in edges.into_iter().rev() {
            self.add_edge(clone, token, target);
        }
        let mut at = at;
        while at != NONE
            && let Some(edge) = self.edge(at, token)
            && self.edges[edge as usize].target == target
        {
            self.edges[edge as usize].target = clone;
            at = self.states[at as usize].link;
        }
        self.states[target as usize].link = clone;
        clone
    }

    fn add_state(&mut self, state: SuffixState) -> u32 {
        let index = self.states.len() as u32;
        self.states.push(state);
        index
    }

    /// The edge of a state with this token.
    fn edge(&self, state: u32, token: TokenId) -> Option<u32> {
        let SuffixState {
            newest_edge,
            n_edges,
            ..
        } = self.states[state as usize];
        if n_edges > LISTED_EDGES {
            return self.indexed.get(&key(state, token)).copied();
        }
        let mut at = newest_edge;
        while at != NONE {
            let edge = &self.edges[at as usize];
            if edge.token == token {
                return Some(at);
            }
            at = edge.next;
        }
        None
    }

    fn add_edge(&mut self, from: u32, token: TokenId, target: u32) {
        let new = self.edges.len() as u32;
        let state = &mut self.states[from as usize];
        self.edges.push(Edge {
            token,
            target,
            next: state.newest_edge,
        });
        state.newest_edge = new;
        state.n_edges += 1;
        if state.n_edges > LISTED_EDGES + 1 {
            self.indexed.insert(key(from, token), new);
        } else if state.n_edges == LISTED_EDGES + 1 {
            let mut at = new;
            while at != NONE {
                let Edge { token, next, .. } = self.edges[at as usize];
                self.indexed.insert(key(from, token), at);
                at = next;
            }
        }
    }
}

/// The index key of an edge.
fn key(state: u32, token: TokenId) -> u64 {
    u64::from(state) << 32 | u64::from(token.0)
}
