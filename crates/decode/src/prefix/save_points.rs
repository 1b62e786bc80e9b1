//! Save points: the positions of a prompt at which its state is cached.
//!
//! A cached prefix serves only prompts with the same tokens. Chat templates re-render past turns,
//! for example without reasoning, so only what lies before a turn's start is stable. States are
//! saved behind the system prefix (system text and tools), before the last turns, and now and then
//! between for edits.

use contract::TokenId;

/// Where prompts are saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePointConfig {
    /// Tokens that start a turn. Without any, prompts are saved at `interval` and at their end.
    pub turn_starts: Vec<TokenId>,
    /// Number of last turns saved at their start.
    pub last_turns: usize,
    /// A state is also saved every so many tokens, unless another is near; 0 disables this.
    pub interval: usize,
    /// Shortest prefix worth saving, in tokens.
    pub min_tokens: usize,
    /// Least distance of save points, in tokens. Of two that are closer, the later is kept. A
    /// prompt's end must be as far behind the last turn. Behind a restored prefix this holds for
    /// all but the last.
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

/// A position to save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SavePoint {
    /// Tokens before it.
    pub(crate) at: usize,
    /// Whether it ends the system prefix, which other conversations share.
    pub(crate) system_prefix: bool,
}

impl SavePointConfig {
    /// The save points of a prompt whose first `read` tokens are cached, ascending. All are
    /// multiples of `align`, and at least one token is left to read behind each.
    pub(crate) fn save_points(
        &self,
        prompt: &[TokenId],
        read: usize,
        align: usize,
    ) -> Vec<SavePoint> {
        let align = align.max(1);
        let floor = |at: usize| at.min(prompt.len().saturating_sub(1)) / align * align;
        let begins =
            |(at, token): (usize, &TokenId)| self.turn_starts.contains(token).then_some(at);
        let turns: Vec<usize> = prompt.iter().enumerate().filter_map(begins).collect();
        let system_prefix = turns.get(1).map(|at| floor(*at));
        let mut places: Vec<usize> = turns
            .iter()
            .skip(1)
            .rev()
            .take(self.last_turns)
            .map(|at| floor(*at))
            .collect();
        let last = places.first().copied().unwrap_or(0);
        let end = floor(prompt.len());
        if end >= last + self.min_distance || turns.is_empty() {
            places.push(end);
        }
        places.sort_unstable();
        places.dedup();
        // Of two that are close, a longer prompt can use the later.
        let close = |i: usize| {
            places
                .get(i + 1)
                .is_some_and(|next| next - places[i] < self.min_distance)
        };
        let mut kept: Vec<usize> = (0..places.len())
            .filter(|i| !close(*i))
            .map(|i| places[i])
            .collect();
        kept.extend(system_prefix);
        kept.sort_unstable();
        kept.dedup();
        // A point close behind the restored prefix gains little, and each costs a chunk of its own.
        // The last one is where the next turn resumes.
        let (deepest, beyond) = (kept.last().copied(), read.saturating_add(self.min_distance));
        let behind = |at: &usize| {
            let dear =
                read == 0 || *at >= beyond || Some(*at) == system_prefix || Some(*at) == deepest;
            *at > read && *at >= self.min_tokens.max(1) && dear
        };
        kept.retain(behind);
        kept.extend(self.between(&kept, (read, end), align));
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
        let places = (begin / step + 1..).map(|i| i * step);
        let places = places.take_while(|at| *at <= end && *at >= self.min_tokens.max(1));
        let far = |at: &usize| {
            let near = |kept: &usize| kept.abs_diff(*at) < self.min_distance;
            (begin == 0 || *at >= begin + step / 2) && !kept.iter().any(near)
        };
        places.filter(far).collect()
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

    fn check(boundaries: &SavePointConfig, prompt: &[TokenId], read: usize, expected: &[usize]) {
        let save_points = boundaries.save_points(prompt, read, 64);
        let found: Vec<usize> = save_points.iter().map(|stop| stop.at).collect();
        assert_eq!(found, expected, "{boundaries:?}, {read} read");
    }

    #[test]
    fn save_points_cover_system_prefix_and_last_turns() {
        let boundaries = SavePointConfig {
            turn_starts: vec![TURN],
            ..SavePointConfig::default()
        };
        let long = prompt(3000, &[0, 700, 1000, 1500, 2000, 2990]);
        check(&boundaries, &long, 0, &[640, 1984, 2944]);
        assert!(boundaries.save_points(&long, 0, 64)[0].system_prefix);
        // Cached points are not saved again, nor points close behind the restored prefix.
        check(&boundaries, &long, 1984, &[2944]);
        check(&boundaries, &long, 1792, &[2944]);
        check(&boundaries, &long, 1728, &[1984, 2944]);
        check(&boundaries, &long, 2880, &[2944]);
        // A long last turn is also saved at its end, since the same prompt may return.
        check(
            &boundaries,
            &prompt(3000, &[0, 700, 2000]),
            0,
            &[640, 1984, 2944],
        );
        // A short question before the reply is saved once, before the reply.
        check(
            &boundaries,
            &prompt(1500, &[0, 700, 1400, 1490]),
            0,
            &[640, 1472],
        );
        check(&boundaries, &prompt(60, &[0, 30, 50]), 0, &[]);
    }

    #[test]
    fn save_points_without_turns_are_periodic_and_at_the_end() {
        let boundaries = SavePointConfig::default();
        check(&boundaries, &prompt(9000, &[]), 0, &[4096, 8192, 8960]);
        check(&boundaries, &prompt(129, &[]), 0, &[128]);
        // One token is always left to read.
        check(&boundaries, &prompt(128, &[]), 0, &[64]);
        check(&boundaries, &prompt(64, &[]), 0, &[]);
        // Not near the restored prefix, nor near another save point.
        check(&boundaries, &prompt(9000, &[]), 3584, &[8192, 8960]);
        check(&boundaries, &prompt(9000, &[]), 8128, &[8960]);
        check(&boundaries, &prompt(4200, &[]), 0, &[4160]);
        let never = SavePointConfig {
            interval: 0,
            ..boundaries
        };
        check(&never, &prompt(9000, &[]), 0, &[8960]);
    }
}
