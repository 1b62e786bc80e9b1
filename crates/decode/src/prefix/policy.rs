//! Which saved state goes first when there are too many.
//!
//! Costs are told by what a state would be wanted for. One that another continues is only wanted by an edit of
//! the past, and then the one before it costs but the tokens between. One that nothing continues is where a
//! conversation goes on. One that several continue, or that stands behind a head, is what new conversations
//! begin with.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Entry;
use super::radix::{Key, Radix};

/// How dear a state is; the least goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Worth {
    /// Exactly one continues it: as dear as the tokens between it and the one before.
    Passed(usize),
    /// Nothing continues it.
    Tip,
    /// The longest of its session, or the head of a conversation.
    Kept,
    /// Several continue it.
    Shared,
}

/// How dear each state is.
pub(crate) fn worths(radix: &Radix<Entry>) -> BTreeMap<Key, Worth> {
    let mut worths = BTreeMap::new();
    let mut longest = BTreeMap::new();
    for (key, depth, entry) in radix.entries() {
        let after = radix.after(key).len();
        let worth = match after {
            0 | 1 if entry.head => Worth::Kept,
            0 => Worth::Tip,
            1 => Worth::Passed(depth - radix.before(key).map_or(0, |before| radix.depth(before))),
            _ => Worth::Shared,
        };
        worths.insert(key, worth);
        if let (Some(session), Worth::Tip) = (&entry.session, worth) {
            let best = longest
                .entry(session.clone())
                .or_insert((depth, entry.used, key));
            *best = (*best).max((depth, entry.used, key));
        }
    }
    for (_, _, key) in longest.into_values() {
        worths.insert(key, Worth::Kept);
    }
    worths
}

/// The state to give up: the least dear, among equals the one longest unused.
pub(crate) fn victim(radix: &Radix<Entry>) -> Option<Key> {
    let worths = worths(radix);
    let used = |key: &Key| radix.get(*key).map_or(0, |entry| entry.used);
    worths
        .into_iter()
        .min_by_key(|(key, worth)| (*worth, used(key)))
        .map(|(key, _)| key)
}

/// States worth keeping when the process ends, the latest used first.
pub(crate) fn lasting(radix: &Radix<Entry>) -> Vec<Key> {
    let mut keys: Vec<(Key, u64)> = Vec::new();
    for (key, worth) in worths(radix) {
        if !matches!(worth, Worth::Passed(_)) {
            keys.push((key, radix.get(key).map_or(0, |entry| entry.used)));
        }
    }
    keys.sort_by_key(|(_, used)| Reverse(*used));
    keys.into_iter().map(|(key, _)| key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::{SnapshotId, TokenId};

    /// Entries as `(tokens, last use, session, head)`.
    fn tree(entries: &[(&str, u64, Option<&str>, bool)]) -> Radix<Entry> {
        let mut radix = Radix::default();
        for (text, used, session, head) in entries {
            let tokens: Vec<TokenId> = text.bytes().map(|b| TokenId(u32::from(b))).collect();
            let entry = Entry {
                snapshot: SnapshotId(*used),
                used: *used,
                session: session.map(Into::into),
                head: *head,
                offered: false,
            };
            radix.insert(&tokens, entry);
        }
        radix
    }

    /// The order in which entries go, by the tick of their last use.
    fn order(entries: &[(&str, u64, Option<&str>, bool)]) -> Vec<u64> {
        let mut radix = tree(entries);
        let gone = std::iter::from_fn(|| {
            let key = victim(&radix)?;
            radix.remove(key).map(|entry| entry.used)
        });
        gone.collect()
    }

    #[test]
    fn the_past_of_a_conversation_thins_out_before_its_end_goes() {
        // Passed states 2 (2 tokens behind 1), 3 (4 behind) and 1 (8), then the tip.
        let line = [
            ("aaaaaaaa", 1, None, false),
            ("aaaaaaaabb", 2, None, false),
            ("aaaaaaaabbcccc", 3, None, false),
            ("aaaaaaaabbccccd", 4, None, false),
        ];
        assert_eq!(order(&line), [2, 3, 1, 4]);
    }

    #[test]
    fn a_conversation_nobody_uses_goes_before_one_in_use_and_heads_last() {
        let talks = [
            ("hhaa", 5, None, false),
            ("hhbb", 3, None, false),
            ("hh", 1, None, false),
        ];
        assert_eq!(order(&talks), [3, 1, 5]);
        let with_head = [
            ("hhaa", 5, None, false),
            ("hhbb", 3, None, false),
            ("hh", 4, None, true),
        ];
        assert_eq!(order(&with_head), [3, 5, 4]);
    }

    #[test]
    fn a_side_request_of_a_session_goes_before_its_conversation() {
        let session = Some("s");
        let talks = [
            ("abcdef", 1, session, false),
            ("xy", 9, session, false),
            ("q", 5, None, false),
        ];
        assert_eq!(order(&talks), [5, 9, 1]);
    }

    #[test]
    fn what_another_continues_need_not_outlive_the_process() {
        let radix = tree(&[
            ("ab", 1, None, false),
            ("abcd", 2, None, false),
            ("x", 3, None, true),
            ("xyz", 4, None, false),
        ]);
        let kept: Vec<u64> = lasting(&radix)
            .iter()
            .map(|key| radix.get(*key).unwrap().used)
            .collect();
        assert_eq!(kept, [4, 3, 2]);
    }
}
