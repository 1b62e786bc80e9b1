//! How deep the sequences of a step are, as far as it selects tiles.

use crate::step::ROWS;

/// The deepest that [`Depth::Shallow`] is, in tokens.
pub(crate) const SHALLOW_TOKENS: usize = 1024;
/// Steps of so many rows take the same tiles at any depth: their rows fill one narrow tile.
const SAME_TILE_ROWS: usize = 8;

/// How many tokens precede the trees of a step. Attention of many rows takes narrow tiles where
/// there are few keys and wide tiles where there are many; a row's bits are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Depth {
    /// Any number.
    Any,
    /// At most [`SHALLOW_TOKENS`] each.
    Shallow,
}

impl Depth {
    /// Of a step in the bucket `rows` whose deepest tree follows `committed` tokens.
    pub(crate) fn of(rows: usize, committed: usize) -> Depth {
        if rows > SAME_TILE_ROWS && committed <= SHALLOW_TOKENS {
            Depth::Shallow
        } else {
            Depth::Any
        }
    }

    /// Tokens that a sequence has at most, nodes included, where the context holds `capacity`.
    pub(crate) fn tokens(self, capacity: usize) -> usize {
        match self {
            Depth::Any => capacity,
            Depth::Shallow => capacity.min(SHALLOW_TOKENS + ROWS),
        }
    }
}
