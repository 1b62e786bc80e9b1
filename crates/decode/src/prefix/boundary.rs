//! Where a prompt is worth saving.
//!
//! A saved state helps a later prompt only if that prompt begins with the same tokens, and templates change
//! what they showed before: the reasoning of an earlier reply is dropped, a generation prompt becomes a whole
//! turn. What stays is everything before the beginning of a turn, so that is where states are saved: behind
//! the head (system text and tools), before the last turns, and now and then in between for edits.

use contract::TokenId;

/// When prompts are saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boundaries {
    /// Tokens that begin a turn. Without any, prompts are saved at `every` and at their end.
    pub turn_starts: Vec<TokenId>,
    /// How many of the last turns are saved at their beginning.
    pub turns: usize,
    /// A state is also saved each time so many tokens have been read; 0 for never.
    pub every: usize,
    /// Shorter beginnings are not worth their bytes.
    pub least: usize,
    /// Of two places closer than this, the later one is saved, and a prompt's end only if it is at least as
    /// far behind the last turn.
    pub apart: usize,
}

impl Default for Boundaries {
    fn default() -> Boundaries {
        Boundaries {
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
pub(crate) struct Stop {
    /// Tokens before it.
    pub(crate) at: usize,
    /// Whether it stands behind the head of the prompt, which other conversations share.
    pub(crate) head: bool,
}

impl Boundaries {
    /// The places to save of a prompt of which `read` tokens need not be read, rising. All are multiples of
    /// `align`, and at least one token is left to be read behind each.
    pub(crate) fn stops(&self, prompt: &[TokenId], read: usize, align: usize) -> Vec<Stop> {
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
        let step = self.every.next_multiple_of(align);
        if self.every > 0 {
            kept.extend((1..).map(|i| i * step).take_while(|at| *at <= end));
        }
        kept.sort_unstable();
        kept.dedup();
        let wanted = kept
            .into_iter()
            .filter(|at| *at > read && *at >= self.least.max(1));
        wanted
            .map(|at| Stop {
                at,
                head: Some(at) == head,
            })
            .collect()
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

    fn check(boundaries: &Boundaries, prompt: &[TokenId], read: usize, expected: &[usize]) {
        let stops = boundaries.stops(prompt, read, 64);
        let found: Vec<usize> = stops.iter().map(|stop| stop.at).collect();
        assert_eq!(found, expected, "{boundaries:?}, {read} read");
    }

    #[test]
    fn the_head_and_the_last_turns_are_saved_at_whole_chunks() {
        let boundaries = Boundaries {
            turn_starts: vec![TURN],
            ..Boundaries::default()
        };
        let long = prompt(3000, &[0, 700, 1000, 1500, 2000, 2990]);
        check(&boundaries, &long, 0, &[640, 1984, 2944]);
        assert!(boundaries.stops(&long, 0, 64)[0].head);
        // What is there already is not saved again.
        check(&boundaries, &long, 1984, &[2944]);
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
    fn a_prompt_without_turns_is_saved_at_its_end_and_on_the_way() {
        let boundaries = Boundaries::default();
        check(&boundaries, &prompt(9000, &[]), 0, &[4096, 8192, 8960]);
        check(&boundaries, &prompt(129, &[]), 0, &[128]);
        // One token is always left to be read.
        check(&boundaries, &prompt(128, &[]), 0, &[64]);
        check(&boundaries, &prompt(64, &[]), 0, &[]);
        let never = Boundaries {
            every: 0,
            ..boundaries
        };
        check(&never, &prompt(9000, &[]), 0, &[8960]);
    }
}
