//! A radix tree over token sequences: finds the longest cached prefix of a prompt.
//!
//! Every token is compared, and no hash is involved. A node without an entry stands only where
//! texts diverge, so there are at most twice as many nodes as entries.
//!
//! Kept by hand: the crates on offer have no parent links, which the eviction classes need.

use std::collections::BTreeMap;

use contract::TokenId;

/// Identifies a node with an entry, until that entry is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(usize);

/// Entries by their tokens.
#[derive(Debug)]
pub(crate) struct RadixTree<E> {
    /// Freed nodes are `None` and reused. Node 0 is the root, with no edge and no entry.
    nodes: Vec<Option<Node<E>>>,
}

#[derive(Debug)]
struct Node<E> {
    parent: usize,
    /// Tokens between the parent and this node; at least one except at the root.
    edge: Vec<TokenId>,
    /// Tokens from the root to the end of the edge.
    depth: usize,
    /// Children by the first token of their edge.
    children: BTreeMap<TokenId, usize>,
    entry: Option<E>,
}

const ROOT: usize = 0;

impl<E> Default for RadixTree<E> {
    fn default() -> RadixTree<E> {
        RadixTree {
            nodes: vec![Some(Node {
                parent: ROOT,
                edge: Vec::new(),
                depth: 0,
                children: BTreeMap::new(),
                entry: None,
            })],
        }
    }
}

impl<E> RadixTree<E> {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries().count()
    }

    /// All entries with their length in tokens.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Key, usize, &E)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter_map(|(at, node)| {
            let node = node.as_ref()?;
            Some((Key(at), node.depth, node.entry.as_ref()?))
        })
    }

    /// The entry of a key.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut E> {
        self.nodes.get_mut(key.0)?.as_mut()?.entry.as_mut()
    }

    /// The entry of a key.
    pub(crate) fn get(&self, key: Key) -> Option<&E> {
        self.nodes.get(key.0)?.as_ref()?.entry.as_ref()
    }

    /// The length of an entry, in tokens.
    pub(crate) fn depth(&self, key: Key) -> usize {
        self.node(key.0).depth
    }

    /// The tokens of an entry.
    pub(crate) fn tokens(&self, key: Key) -> Vec<TokenId> {
        let mut edges = Vec::new();
        let mut at = key.0;
        while at != ROOT {
            edges.push(&self.node(at).edge);
            at = self.node(at).parent;
        }
        edges.into_iter().rev().flatten().copied().collect()
    }

    /// The entries at prefixes of `tokens`, itself included, shortest first.
    pub(crate) fn prefixes_of(&self, tokens: &[TokenId]) -> Vec<Key> {
        let mut found = Vec::new();
        let mut at = ROOT;
        loop {
            let node = self.node(at);
            if node.entry.is_some() {
                found.push(Key(at));
            }
            let rest = &tokens[node.depth..];
            let next = rest.first().and_then(|first| node.children.get(first));
            match next.map(|next| (*next, self.node(*next))) {
                Some((next, child)) if rest.starts_with(&child.edge) => at = next,
                _ => return found,
            }
        }
    }

    /// The longest entry that is a proper prefix of this one.
    pub(crate) fn parent_entry(&self, key: Key) -> Option<Key> {
        let mut at = key.0;
        while at != ROOT {
            at = self.node(at).parent;
            if self.node(at).entry.is_some() {
                return Some(Key(at));
            }
        }
        None
    }

    /// The counted entries that continue this one with no counted entry between.
    pub(crate) fn child_entries(&self, key: Key, counts: impl Fn(&E) -> bool) -> Vec<Key> {
        let mut found = Vec::new();
        let mut open: Vec<usize> = self.node(key.0).children.values().copied().collect();
        while let Some(at) = open.pop() {
            let node = self.node(at);
            match &node.entry {
                Some(entry) if counts(entry) => found.push(Key(at)),
                _ => open.extend(node.children.values()),
            }
        }
        found
    }

    /// Inserts an entry at `tokens`, at least one, and returns the entry that was there.
    pub(crate) fn insert(&mut self, tokens: &[TokenId], entry: E) -> (Key, Option<E>) {
        let mut at = ROOT;
        loop {
            let depth = self.node(at).depth;
            let rest = &tokens[depth..];
            let Some(first) = rest.first() else {
                let before = self.node_mut(at).entry.replace(entry);
                return (Key(at), before);
            };
            let Some(&child) = self.node(at).children.get(first) else {
                let leaf = self.add(Node {
                    parent: at,
                    edge: rest.to_vec(),
                    depth: tokens.len(),
                    children: BTreeMap::new(),
                    entry: Some(entry),
                });
                self.node_mut(at).children.insert(*first, leaf);
                return (Key(leaf), None);
            };
            let edge = &self.node(child).edge;
            let shared = edge.iter().zip(rest).take_while(|(a, b)| a == b).count();
            at = if shared == edge.len() {
                child
            } else {
                self.split(child, shared)
            };
        }
    }

    /// Removes an entry.
    pub(crate) fn remove(&mut self, key: Key) -> Option<E> {
        let entry = self.nodes.get_mut(key.0)?.as_mut()?.entry.take()?;
        let node = self.node(key.0);
        let parent = node.parent;
        if node.children.is_empty() {
            let first = node.edge[0];
            self.nodes[key.0] = None;
            self.node_mut(parent).children.remove(&first);
            self.join(parent);
        } else {
            self.join(key.0);
        }
        Some(entry)
    }

    /// Splits the edge to `child` behind `shared` tokens and returns the new node.
    fn split(&mut self, child: usize, shared: usize) -> usize {
        let node = self.node_mut(child);
        let rest = node.edge.split_off(shared);
        let edge = std::mem::replace(&mut node.edge, rest);
        let (parent, first, next) = (node.parent, edge[0], node.edge[0]);
        let depth = node.depth - node.edge.len();
        let middle = self.add(Node {
            parent,
            edge,
            depth,
            children: BTreeMap::from([(next, child)]),
            entry: None,
        });
        self.node_mut(child).parent = middle;
        self.node_mut(parent).children.insert(first, middle);
        middle
    }

    /// Merges a node that has no entry and one child with that child.
    fn join(&mut self, at: usize) {
        let node = self.node(at);
        if at == ROOT || node.entry.is_some() || node.children.len() != 1 {
            return;
        }
        let Some(node) = self.nodes[at].take() else {
            return;
        };
        let first = node.edge[0];
        for child in node.children.into_values() {
            let below = self.node_mut(child);
            let mut edge = node.edge.clone();
            edge.append(&mut below.edge);
            below.edge = edge;
            below.parent = node.parent;
            self.node_mut(node.parent).children.insert(first, child);
        }
    }

    fn add(&mut self, node: Node<E>) -> usize {
        match self.nodes.iter().position(Option::is_none) {
            Some(at) => {
                self.nodes[at] = Some(node);
                at
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        }
    }

    fn node(&self, at: usize) -> &Node<E> {
        self.nodes[at]
            .as_ref()
            .expect("parents and children are live nodes")
    }

    fn node_mut(&mut self, at: usize) -> &mut Node<E> {
        self.nodes[at]
            .as_mut()
            .expect("parents and children are live nodes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(text: &str) -> Vec<TokenId> {
        text.bytes().map(|b| TokenId(u32::from(b))).collect()
    }

    fn text(tokens: &[TokenId]) -> String {
        tokens.iter().map(|t| t.0 as u8 as char).collect()
    }

    fn prefixes(radix: &RadixTree<u32>, prompt: &str) -> Vec<String> {
        let keys = radix.prefixes_of(&ids(prompt));
        keys.iter().map(|key| text(&radix.tokens(*key))).collect()
    }

    #[test]
    fn prefixes_are_listed_shortest_first() {
        let mut radix = RadixTree::default();
        for (i, entry) in ["abcd", "ab", "abxy", "q"].into_iter().enumerate() {
            radix.insert(&ids(entry), i as u32);
        }
        assert_eq!(prefixes(&radix, "abcdef"), ["ab", "abcd"]);
        assert_eq!(prefixes(&radix, "abx"), ["ab"]);
        assert_eq!(prefixes(&radix, "abcd"), ["ab", "abcd"]);
        assert!(prefixes(&radix, "zz").is_empty());
        let ab = radix.prefixes_of(&ids("ab"))[0];
        let mut after: Vec<String> = radix
            .child_entries(ab, |_| true)
            .iter()
            .map(|k| text(&radix.tokens(*k)))
            .collect();
        after.sort();
        assert_eq!(after, ["abcd", "abxy"]);
        let below = radix.insert(&ids("abcdef"), 7).0;
        assert_eq!(radix.child_entries(ab, |entry| *entry == 7), [below]);
        radix.remove(below);
        let abcd = radix.prefixes_of(&ids("abcd"))[1];
        assert_eq!(radix.parent_entry(abcd), Some(ab));
        assert_eq!((radix.parent_entry(ab), radix.depth(abcd)), (None, 4));
    }

    #[test]
    fn entries_survive_removal_of_ancestors() {
        let mut radix = RadixTree::default();
        let mut keys: Vec<Key> = ["ab", "abcd", "abxy"]
            .map(|t| radix.insert(&ids(t), 0).0)
            .into();
        radix.remove(keys.remove(0)).unwrap();
        assert_eq!(prefixes(&radix, "abcd"), ["abcd"]);
        radix.remove(keys.remove(0)).unwrap();
        assert_eq!(prefixes(&radix, "abxyz"), ["abxy"]);
        radix.remove(keys.remove(0)).unwrap();
        assert_eq!((radix.len(), radix.nodes.iter().flatten().count()), (0, 1));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Compared with a plain map: same entries, same prefixes, and no more nodes than needed.
        #[test]
        fn radix_tree_matches_a_plain_map_with_prefix_lookup(
            steps in proptest::collection::vec((any::<bool>(), "[ab]{1,6}"), 0..60),
            probes in proptest::collection::vec("[ab]{0,8}", 1..8),
        ) {
            let mut radix = RadixTree::default();
            let mut model: BTreeMap<String, u32> = BTreeMap::new();
            for (i, (put, word)) in steps.into_iter().enumerate() {
                let word_ids = ids(&word);
                if put {
                    let replaced = model.insert(word, i as u32);
                    prop_assert_eq!(radix.insert(&word_ids, i as u32).1, replaced);
                } else {
                    let key = radix.prefixes_of(&word_ids).last().copied();
                    let key = key.filter(|key| radix.depth(*key) == word.len());
                    prop_assert_eq!(key.and_then(|key| radix.remove(key)), model.remove(&word));
                }
                prop_assert_eq!(radix.len(), model.len());
                prop_assert!(radix.nodes.iter().flatten().count() <= 2 * model.len() + 1);
            }
            for probe in probes {
                let expected: Vec<&String> = (1..=probe.len())
                    .filter_map(|n| model.get_key_value(&probe[..n]).map(|(word, _)| word))
                    .collect();
                let found = prefixes(&radix, &probe);
                prop_assert_eq!(found.iter().collect::<Vec<_>>(), expected);
            }
        }
    }
}
