//! Save points: the positions of a prompt at which its state is cached.
//!
//! A cached prefix serves only prompts with the same tokens. Chat templates re-render past turns,
//! for example without reasoning, so only what lies before a turn's start is stable. States are
//! saved behind the system prefix (system text and tools), before the last turns, and now and then
//! between for edits.

use contract::TokenId;

/// Settings of the save points.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePointConfig {
    /// Tokens that start a turn. Without any, prompts are saved at `interval` and at their end.
    pub turn_starts: Vec<TokenId>,
    /// Number of last turns saved at their start.
    pub last_turns: usize,
    /// Tokens between periodic save points, which are dropped near another; 0 disables them.
    pub interval: usize,
    /// Shortest prefix worth saving, in tokens.
    pub min_tokens: usize,
    /// Minimum distance of save points, in tokens. Of two that are closer, the later is kept. The
    /// end of a prompt is a save point only if it is this far behind the start of the last turn.
    /// The last save point may be closer than this to a restored prefix.
    pub min_distance: usize,
}

impl Default for SavePointConfig {
    fn default() -> SavePointConfig {
        SavePointConfig {
            turn_starts: Vec::new(),
            last_turns: 2,
            interval: 4096,
            min_tokens: 64,
            min_distance: 256,
        }
    }
}

/// A position whose state is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SavePoint {
    /// Tokens before it.
    pub(crate) at: usize,
    /// Whether it ends the system prefix, which other conversations share.
    pub(crate) system_prefix: bool,
}

impl SavePointConfig {
    /// The save points of a prompt whose first `prefilled` tokens are cached, ascending. All are
    /// multiples of `align`, and at least one token is left to prefill behind each.
    pub(crate) fn save_points(
        &self,
        prompt: &[TokenId],
        prefilled: usize,
        align: usize,
    ) -> Vec<SavePoint> {
        let align = align.max(1);
        let floor = |at: usize| at.min(prompt.len().saturating_sub(1)) / align * align;
        let begins =
            |(at, token): (usize, &TokenId)| self.turn_starts.contains(token).then_some(at);
        let turns: Vec<usize> = prompt.iter().enumerate().filter_map(begins).collect();
        let system_prefix = turns.get(1).map(|at| floor(*at));
        let mut positions: Vec<usize> = turns
            .iter()
            .skip(1)
            .rev()
            .take(self.last_turns)
            .map(|at| floor(*at))
            .collect();
        let last = positions.first().copied().unwrap_or(0);
        let end = floor(prompt.len());
        if end >= last + self.min_distance || turns.is_empty() {
            positions.push(end);
        }
        positions.sort_unstable();
        positions.dedup();
        // Of two that are close, a longer prompt can use the later.
        let close = |i: usize| {
            positions
                .get(i + 1)
                .is_some_and(|next| next - positions[i] < self.min_distance)
        };
        let mut kept: Vec<usize> = (0..positions.len())
            .filter(|i| !close(*i))
            .map(|i| positions[i])
            .collect();
        kept.extend(system_prefix);
        kept.sort_unstable();
        kept.dedup();
        // A point close behind the restored prefix gains little, and each costs a chunk of its own.
        // The last one is where the next turn resumes.
        let (deepest, beyond) = (
            kept.last().copied(),
            prefilled.saturating_add(self.min_distance),
        );
        let is_useful = |at: &usize| {
            let gains = prefilled == 0
                || *at >= beyond
                || Some(*at) == system_prefix
                || Some(*at) == deepest;
            *at > prefilled && *at >= self.min_tokens.max(1) && gains
        };
        kept.retain(is_useful);
        kept.extend(self.between(&kept, (prefilled, end), align));
        kept.sort_unstable();
        let stop = |at| SavePoint {
            at,
            system_prefix: Some(at) == system_prefix,
        };
        kept.into_iter().map(stop).collect()
    }

    /// Periodic points between `begin` and `end`, except near the start or near one of `kept`.
    fn between(&self, kept: &[usize], (begin, end): (usize, usize), align: usize) -> Vec<usize> {
        let step = self.interval.next_multiple_of(align);
        if self.interval == 0 {
            return Vec::new();
        }
        let positions = (begin / step + 1..).map(|i| i * step);
        let positions = positions.take_while(|at| *at <= end && *at >= self.min_tokens.max(1));
        let is_far = |at: &usize| {
            let near = |kept: &usize| kept.abs_diff(*at) < self.min_distance;
            (begin == 0 || *at >= begin + step / 2) && !kept.iter().any(near)
        };
        positions.filter(is_far).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: TokenId = TokenId(1);

    /// A prompt whose turns start at the given positions.
    fn prompt(len: usize, turns: &[usize]) -> Vec<TokenId> {
        let token = |at: usize| {
            if turns.contains(&at) {
                TURN
            } else {
                TokenId(9)
            }
        };
        (0..len).map(token).collect()
    }

    fn check(config: &SavePointConfig, prompt: &[TokenId], prefilled: usize, expected: &[usize]) {
        let save_points = config.save_points(prompt, prefilled, 64);
        let found: Vec<usize> = save_points.iter().map(|stop| stop.at).collect();
        assert_eq!(found, expected, "{config:?}, {prefilled} prefilled");
    }

    #[test]
    fn save_points_cover_system_prefix_and_last_turns() {
        let config = SavePointConfig {
            turn_starts: vec![TURN],
            ..SavePointConfig::default()
        };
        let long = prompt(3000, &[0, 700, 1000, 1500, 2000, 2990]);
        check(&config, &long, 0, &[640, 1984, 2944]);
        assert!(config.save_points(&long, 0, 64)[0].system_prefix);
        // Cached points are not saved again, nor points close behind the restored prefix.
        check(&config, &long, 1984, &[2944]);
        check(&config, &long, 1792, &[2944]);
        check(&config, &long, 1728, &[1984, 2944]);
        check(&config, &long, 2880, &[2944]);
        // A long last turn is also saved at its end, since the same prompt may return.
        check(
            &config,
            &prompt(3000, &[0, 700, 2000]),
            0,
            &[640, 1984, 2944],
        );
        // A short question before the reply is saved once, before the reply.
        check(
            &config,
            &prompt(1500, &[0, 700, 1400, 1490]),
            0,
            &[640, 1472],
        );
        check(&config, &prompt(60, &[0, 30, 50]), 0, &[]);
    }

    #[test]
    fn save_points_without_turns_are_periodic_and_at_the_end() {
        let config = SavePointConfig::default();
        check(&config, &prompt(9000, &[]), 0, &[4096, 8192, 8960]);
        check(&config, &prompt(129, &[]), 0, &[128]);
        // One token is always left to prefill.
        check(&config, &prompt(128, &[]), 0, &[64]);
        check(&config, &prompt(64, &[]), 0, &[]);
        // Not near the restored prefix, nor near another save point.
        check(&config, &prompt(9000, &[]), 3584, &[8192, 8960]);
        check(&config, &prompt(9000, &[]), 8128, &[8960]);
        check(&config, &prompt(4200, &[]), 0, &[4160]);
        let never = SavePointConfig {
            interval: 0,
            ..config
        };
        check(&never, &prompt(9000, &[]), 0, &[8960]);
    }
}
