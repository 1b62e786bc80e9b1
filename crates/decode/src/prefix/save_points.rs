//! Where a prompt is class saving.
//!
//! A saved state helps a later prompt only if that prompt begins with the same tokens, and templates change
//! what they showed before: the reasoning of an earlier reply is dropped, a generation prompt becomes a whole
//! turn. What stays is everything before the beginning of a turn, so that is where states are saved: behind
//! the head (system text and tools), before the last turns, and now and then in between for edits.

use contract::TokenId;

/// When prompts are saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePointConfig {
    /// Tokens that begin a turn. Without any, prompts are saved at `every` and at their end.
    pub turn_starts: Vec<TokenId>,
    /// How many of the last turns are saved at their beginning.
    pub turns: usize,
    /// A state is also saved each time so many tokens have been read, unless another is near; 0 for never.
    pub every: usize,
    /// Shorter beginnings are not class their bytes.
    pub least: usize,
    /// Of two places closer than this, the later one is saved, and a prompt's end only if it is at least as
    /// far behind the last turn. Behind a state that was found, the same holds for all places but the last.
    pub apart: usize,
}

impl Default for SavePointConfig {
    fn default() -> SavePointConfig {
        SavePointConfig {
            turn_starts: Vec::new(),
            turns: 2,
            every: 4096,
            least: 64,
            apart: 256,
        }
    }
}

/// A place to save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SavePoint {
    /// Tokens before it.
    pub(crate) at: usize,
    /// Whether it stands behind the head of the prompt, which other conversations share.
    pub(crate) head: bool,
}

impl SavePointConfig {
    /// The places to save of a prompt of which `read` tokens need not be read, rising. All are multiples of
    /// `align`, and at least one token is left to be read behind each.
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
        let head = turns.get(1).map(|at| floor(*at));
        let mut places: Vec<usize> = turns
            .iter()
            .skip(1)
            .rev()
            .take(self.turns)
            .map(|at| floor(*at))
            .collect();
        let last = places.first().copied().unwrap_or(0);
        let end = floor(prompt.len());
        if end >= last + self.apart || turns.is_empty() {
            places.push(end);
        }
        places.sort_unstable();
        places.dedup();
        // The later of two that stand close is the one a longer prompt can use.
        let close = |i: usize| {
            places
                .get(i + 1)
                .is_some_and(|next| next - places[i] < self.apart)
        };
        let mut kept: Vec<usize> = (0..places.len())
            .filter(|i| !close(*i))
            .map(|i| places[i])
            .collect();
        kept.extend(head);
        kept.sort_unstable();
        kept.dedup();
        // What stands so close behind a state that is there already is hardly better than that, and each place costs
        // a chunk of its own. The last one is where the next turn goes on.
        let (deepest, beyond) = (kept.last().copied(), read.saturating_add(self.apart));
        let behind = |at: &usize| {
            let dear = read == 0 || *at >= beyond || Some(*at) == head || Some(*at) == deepest;
            *at > read && *at >= self.least.max(1) && dear
        };
        kept.retain(behind);
        kept.extend(self.between(&kept, (read, end), align));
        kept.sort_unstable();
        let stop = |at| SavePoint {
            at,
            head: Some(at) == head,
        };
        kept.into_iter().map(stop).collect()
    }

    /// The places on a long way between `begin` and `end`: every so often, but not near the beginning or one of `kept`.
    fn between(&self, kept: &[usize], (begin, end): (usize, usize), align: usize) -> Vec<usize> {
        let step = self.every.next_multiple_of(align);
        if self.every == 0 {
            return Vec::new();
        }
        let places = (begin / step + 1..).map(|i| i * step);
        let places = places.take_while(|at| *at <= end && *at >= self.least.max(1));
        let far = |at: &usize| {
            let near = |kept: &usize| kept.abs_diff(*at) < self.apart;
            (begin == 0 || *at >= begin + step / 2) && !kept.iter().any(near)
        };
        places.filter(far).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: TokenId = TokenId(1);

    /// A prompt whose turns begin at the given places.
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
        assert!(boundaries.save_points(&long, 0, 64)[0].head);
        // What is there already is not saved again, nor what stands close behind it.
        check(&boundaries, &long, 1984, &[2944]);
        check(&boundaries, &long, 1792, &[2944]);
        check(&boundaries, &long, 1728, &[1984, 2944]);
        check(&boundaries, &long, 2880, &[2944]);
        // A long last turn is saved at its end too: the same prompt may come again.
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
        // One token is always left to be read.
        check(&boundaries, &prompt(128, &[]), 0, &[64]);
        check(&boundaries, &prompt(64, &[]), 0, &[]);
        // Not near a state that is there, nor near a place that is saved anyway.
        check(&boundaries, &prompt(9000, &[]), 3584, &[8192, 8960]);
        check(&boundaries, &prompt(9000, &[]), 8128, &[8960]);
        check(&boundaries, &prompt(4200, &[]), 0, &[4160]);
        let never = SavePointConfig {
            every: 0,
            ..boundaries
        };
        check(&never, &prompt(9000, &[]), 0, &[8960]);
    }
}
