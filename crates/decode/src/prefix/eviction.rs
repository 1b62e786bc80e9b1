//! Eviction order of cached prefixes.
//!
//! An entry that exactly one other continues serves only edits of the past, and its parent can
//! replace it at the cost of the tokens between. An entry that none continues is where a
//! conversation resumes. An entry that several continue is where new conversations start.
//!
//! Conversations are protected from side requests, such as titles and summaries. Those come once,
//! so a conversation is recognised by its session or by its return. At most half of the entries are
//! pinned this way, the most recently used. The other half stays free for new conversations.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::entry::PrefixEntry;
use super::radix::{Key, RadixTree};

/// Eviction class of an entry; the lowest is evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EvictionClass {
    /// Exactly one entry continues it, or only warm-up led to it. Ranked by the tokens behind its
    /// parent.
    Interior(usize),
    /// No entry continues it, or it is a system prefix that one prompt used.
    Leaf,
    /// The end of a conversation with a session or a return, or a system prefix that several
    /// prompts used.
    Pinned,
    /// Several entries continue it.
    Shared,
}

/// The eviction class of each entry.
pub(crate) fn classes(radix: &RadixTree<PrefixEntry>) -> BTreeMap<Key, EvictionClass> {
    let mut classes = BTreeMap::new();
    for (key, depth, entry) in radix.entries() {
        let passed = || {
            EvictionClass::Interior(
                depth
                    - radix
                        .parent_entry(key)
                        .map_or(0, |before| radix.depth(before)),
            )
        };
        let class = match radix.child_entries(key, PrefixEntry::is_from_prompt).len() {
            _ if entry.from_warmup => passed(),
            0 => EvictionClass::Leaf,
            1 if entry.system_prefix => EvictionClass::Leaf,
            1 => passed(),
            _ => EvictionClass::Shared,
        };
        classes.insert(key, class);
    }
    let used = |key: &Key| radix.get(*key).map_or(0, |entry| entry.used);
    let mut kept: Vec<Key> = pinned_leaves(radix, &classes).into_iter().collect();
    kept.sort_by_key(|key| Reverse(used(key)));
    kept.truncate((radix.len() / 2).max(1));
    for key in kept {
        classes.insert(key, EvictionClass::Pinned);
    }
    classes
}

/// Leaves to protect from side requests.
///
/// Per session these are two: the longest leaf, and the leaf that returned last. The second is the
/// conversation after it was restarted or cut short under the same session.
fn pinned_leaves(
    radix: &RadixTree<PrefixEntry>,
    classes: &BTreeMap<Key, EvictionClass>,
) -> BTreeSet<Key> {
    let mut kept = BTreeSet::new();
    let mut longest: BTreeMap<Arc<str>, (usize, u64, Key)> = BTreeMap::new();
    let mut latest: BTreeMap<Arc<str>, (u64, Key)> = BTreeMap::new();
    for (key, depth, entry) in radix.entries() {
        if classes.get(&key) != Some(&EvictionClass::Leaf) {
            continue;
        }
        if entry.system_prefix && entry.hit {
            kept.insert(key);
            continue;
        }
        // The entries behind a system prefix are longer and of the same conversation.
        if !radix
            .child_entries(key, PrefixEntry::is_from_prompt)
            .is_empty()
        {
            continue;
        }
        let Some(session) = &entry.session else {
            if entry.multi_turn {
                kept.insert(key);
            }
            continue;
        };
        let long = (depth, entry.used, key);
        let best = longest.entry(Arc::clone(session)).or_insert(long);
        *best = (*best).max(long);
        if entry.multi_turn {
            let late = (entry.used, key);
            let best = latest.entry(Arc::clone(session)).or_insert(late);
            *best = (*best).max(late);
        }
    }
    kept.extend(longest.into_values().map(|(.., key)| key));
    kept.extend(latest.into_values().map(|(_, key)| key));
    kept
}

/// The entry to evict: the lowest class, then the least recently used.
pub(crate) fn choose_evictee(radix: &RadixTree<PrefixEntry>) -> Option<Key> {
    let classes = classes(radix);
    let used = |key: &Key| radix.get(*key).map_or(0, |entry| entry.used);
    classes
        .into_iter()
        .min_by_key(|(key, class)| (*class, used(key)))
        .map(|(key, _)| key)
}

/// Entries worth persisting, the most recently used first. Of entries used at the same time the
/// longest comes first, since it saves the most.
pub(crate) fn worth_persisting(radix: &RadixTree<PrefixEntry>) -> Vec<Key> {
    let classes = classes(radix);
    let kept = radix
        .entries()
        .filter(|(key, ..)| !matches!(classes.get(key), Some(EvictionClass::Interior(_))));
    let mut keys: Vec<(Key, (u64, usize))> = kept
        .map(|(key, depth, entry)| (key, (entry.used, depth)))
        .collect();
    keys.sort_by_key(|(_, used)| Reverse(*used));
    keys.into_iter().map(|(key, _)| key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::{SnapshotId, TokenId};

    /// An entry of a text.
    #[derive(Clone, Copy, Default)]
    struct Saved {
        text: &'static str,
        used: u64,
        session: Option<&'static str>,
        system_prefix: bool,
        hit: bool,
        multi_turn: bool,
        from_warmup: bool,
    }

    const fn saved(text: &'static str, used: u64) -> Saved {
        Saved {
            text,
            used,
            session: None,
            system_prefix: false,
            hit: false,
            multi_turn: false,
            from_warmup: false,
        }
    }

    impl Saved {
        const fn of(self, session: &'static str) -> Saved {
            Saved {
                session: Some(session),
                ..self
            }
        }

        const fn system_prefix(self) -> Saved {
            Saved {
                system_prefix: true,
                ..self
            }
        }

        const fn hit(self) -> Saved {
            Saved { hit: true, ..self }
        }

        const fn multi_turn(self) -> Saved {
            Saved {
                multi_turn: true,
                ..self
            }
        }

        const fn ahead(self) -> Saved {
            Saved {
                from_warmup: true,
                ..self
            }
        }
    }

    fn tree(entries: &[Saved]) -> RadixTree<PrefixEntry> {
        let mut radix = RadixTree::default();
        for saved in entries {
            let tokens: Vec<TokenId> = saved.text.bytes().map(|b| TokenId(b.into())).collect();
            let entry = PrefixEntry {
                snapshot: SnapshotId(saved.used),
                used: saved.used,
                session: saved.session.map(Into::into),
                system_prefix: saved.system_prefix,
                hit: saved.hit,
                multi_turn: saved.multi_turn,
                offered_to_store: false,
                from_warmup: saved.from_warmup,
            };
            radix.insert(&tokens, entry);
        }
        radix
    }

    /// The eviction order, by logical time of last use.
    fn order(entries: &[Saved]) -> Vec<u64> {
        let mut radix = tree(entries);
        let gone = std::iter::from_fn(|| {
            let key = choose_evictee(&radix)?;
            radix.remove(key).map(|entry| entry.used)
        });
        gone.collect()
    }

    /// The first entry evicted, by logical time of last use.
    fn first(entries: &[Saved]) -> u64 {
        order(entries)[0]
    }

    #[test]
    fn interior_entries_are_evicted_before_leaves() {
        // Interior entries 2 (2 tokens behind 1), 3 (4 behind) and 1 (8), then the leaf.
        let line = [
            saved("aaaaaaaa", 1),
            saved("aaaaaaaabb", 2),
            saved("aaaaaaaabbcccc", 3),
            saved("aaaaaaaabbccccd", 4),
        ];
        assert_eq!(order(&line), [2, 3, 1, 4]);
    }

    #[test]
    fn unused_leaf_goes_first_and_shared_prefix_last() {
        let entries = [saved("hhaa", 5), saved("hhbb", 3), saved("hh", 1)];
        assert_eq!(order(&entries), [3, 1, 5]);
        let with_head = [
            saved("hhaa", 5),
            saved("hhbb", 3),
            saved("hh", 4).system_prefix().hit(),
        ];
        assert_eq!(order(&with_head), [3, 5, 4]);
    }

    #[test]
    fn system_prefix_used_once_ranks_as_a_leaf() {
        let once = [
            saved("hhaa", 4),
            saved("hh", 3).system_prefix(),
            saved("gg", 1).system_prefix(),
            saved("ggbb", 2),
        ];
        assert_eq!(order(&once), [1, 2, 3, 4]);
    }

    #[test]
    fn side_request_is_evicted_before_its_session() {
        let entries = [
            saved("abcdef", 1).of("s"),
            saved("xy", 9).of("s"),
            saved("q", 5),
        ];
        assert_eq!(order(&entries), [5, 9, 1]);
    }

    #[test]
    fn side_requests_are_evicted_first_with_or_without_session() {
        for name in [None, Some("s")] {
            let side = |text, used| Saved {
                session: name,
                ..saved(text, used)
            };
            let entries = [
                saved("abcdef", 1).of("s"),
                side("x", 6).system_prefix(),
                side("xy", 7),
                side("z", 8).system_prefix(),
                side("zz", 9),
            ];
            assert_eq!(*order(&entries).last().unwrap(), 1, "{name:?}");
        }
    }

    #[test]
    fn returning_conversation_is_pinned_without_session() {
        let entries = [
            saved("abcdef", 1).multi_turn(),
            saved("x", 2),
            saved("y", 3),
            saved("z", 4),
        ];
        assert_eq!(order(&entries), [2, 3, 4, 1]);
    }

    #[test]
    fn restarted_session_is_pinned_once_it_returns() {
        let anew = |multi_turn| Saved {
            multi_turn,
            ..saved("pq", 5).of("s")
        };
        let others = [
            saved("abcdef", 4).of("s").multi_turn(),
            saved("x", 6),
            saved("y", 7),
        ];
        let [old, x, y] = others;
        assert_eq!(first(&[old, x, y, anew(false)]), 5);
        assert_eq!(first(&[old, x, y, anew(true)]), 6);
    }

    #[test]
    fn pinned_entries_take_at_most_half_of_the_slots() {
        let names = ["a", "b", "c", "d", "e"];
        let texts = ["aa", "bb", "cc", "dd", "ee"];
        let mut entries: Vec<Saved> = (names.iter().zip(texts).zip(1..))
            .map(|((name, text), used)| saved(text, used).of(name).multi_turn())
            .collect();
        entries.push(saved("new", 9));
        // Entries 5, 4 and 3 are kept.
        assert_eq!(first(&entries), 1);
        assert_eq!(first(&entries[1..]), 2);
    }

    #[test]
    fn interior_entries_are_not_persisted() {
        let radix = tree(&[
            saved("ab", 1),
            saved("abcd", 2),
            saved("x", 3).system_prefix(),
            saved("xyz", 4),
        ]);
        let kept: Vec<u64> = worth_persisting(&radix)
            .iter()
            .map(|key| radix.get(*key).unwrap().used)
            .collect();
        assert_eq!(kept, [4, 3, 2]);
    }

    #[test]
    fn warmup_entries_are_evicted_before_prompt_entries() {
        let entries = [
            saved("abcd", 1),
            saved("abcdxyz", 9).of("s").ahead(),
            saved("efgh", 2),
            saved("efghij", 3),
            saved("kl", 4),
        ];
        // The interior entry saves four tokens, the warm-up entry three. Then come the leaves,
        // oldest first; the one before the warm-up entry counts as a leaf.
        assert_eq!(order(&entries), [9, 2, 1, 3, 4]);
        let kept: Vec<u64> = worth_persisting(&tree(&entries))
            .iter()
            .filter_map(|key| tree(&entries).get(*key).map(|entry| entry.used))
            .collect();
        assert!(!kept.contains(&9), "warm-up entries are not persisted");
    }

    #[test]
    fn longest_of_equally_recent_entries_is_persisted_first() {
        // A system prefix, what two branches share, and the end of the branch in use; then a side
        // request.
        let entries = [
            saved("hh", 7).system_prefix().hit(),
            saved("hhsh", 7),
            saved("hhshab", 7).multi_turn(),
            saved("hhshxy", 3),
            saved("q", 9),
        ];
        let radix = tree(&entries);
        let kept: Vec<usize> = worth_persisting(&radix)
            .into_iter()
            .map(|key| radix.depth(key))
            .collect();
        assert_eq!(kept, [1, 6, 4, 2, 6]);
    }
}
