//! Conversations for tests of the prefix cache: prompts of turns, and save points between them.

use conformance::fake::FakeSpec;
use contract::{Limits, TokenId};
use decode::{PrefixConfig, SavePointConfig};

use crate::fixture::{ENDLESS, spec};

/// Starts a turn in these prompts.
const TURN: TokenId = TokenId(1);

pub(crate) fn long_spec() -> FakeSpec {
    let short = spec(ENDLESS);
    FakeSpec {
        limits: Limits {
            context: 512,
            ..short.limits
        },
        pool_tokens: 8 * (512 + 24),
        ..short
    }
}

/// Save points at the last turns and at regular distances, for prompts as short as these.
pub(crate) fn by_turns(max_entries: usize) -> PrefixConfig {
    PrefixConfig {
        max_entries,
        save_points: SavePointConfig {
            turn_starts: vec![TURN],
            last_turns: 2,
            interval: 64,
            min_tokens: 4,
            min_distance: 8,
        },
        min_store_tokens: 8,
        ..PrefixConfig::default()
    }
}

pub(crate) fn turn(len: usize, salt: usize) -> Vec<TokenId> {
    let vocab = ENDLESS.vocab - 3;
    let word = |i: usize| TokenId((3 + (i * 7 + salt * 13) % vocab) as u32);
    std::iter::once(TURN).chain((0..len).map(word)).collect()
}
