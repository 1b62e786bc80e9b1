//! The DFS schedule of `gated_delta/decode_recurrent.cu` and the convolution sources of the nodes.
//! The host computes both, and the step header carries them.
//!
//! Every node is visited after its parent, and a leaf changes no state. If several children of a
//! node have children, its state is spilled while all but the last of them are visited. The largest
//! subtree is visited last.

use super::TAPS;

/// Arrays of the step header: convolution sources and DFS schedule.
pub const PARTS: usize = 2;

/// The visited node.
const NODE_MASK: u32 = 63;
/// The next node.
const NEXT_SHIFT: u32 = 6;
/// The visit updates the state.
const UPDATES_STATE: u32 = 1 << 13;
/// The last visit.
const IS_LAST: u32 = 1 << 14;
/// The state after the node is spilled to this slot, counted from 1.
const SPILL_SHIFT: u32 = 16;
/// The next visit reloads the state from this slot, counted from 1.
const RELOAD_SHIFT: u32 = 20;

/// Parent of every node; only node 0 has none.
type Parents = [Option<usize>];

/// The words of a tree in the header: per part a list with one word per node, from the tree's first
/// row on.
pub fn header(parents: &Parents) -> [Vec<u32>; PARTS] {
    let conv_sources = (0..parents.len()).map(|node| conv_sources(parents, node));
    [conv_sources.collect(), visits(parents)]
}

/// Maximum spilled states of a tree of `nodes` nodes: one more each time its size, including the
/// initial state, doubles.
pub fn max_spilled_states(nodes: usize) -> usize {
    let (mut count, mut least) = (0, 5);
    while nodes + 1 >= least {
        count += 1;
        least = 2 * least + 1;
    }
    count
}

/// The inputs of a node's convolution, oldest first, a byte each: nodes, and below 0 rows of the
/// window, the newest at -1.
fn conv_sources(parents: &Parents, node: usize) -> u32 {
    let mut line = [0_u8; TAPS];
    let (mut at, mut before) = (Some(node), 0_u8);
    for tap in line.iter_mut().rev() {
        *tap = match at {
            Some(node) => u8::try_from(node).expect("a tree has at most 64 nodes"),
            None => {
                before += 1;
                before.wrapping_neg()
            }
        };
        at = at.and_then(|node| parents[node]);
    }
    u32::from_le_bytes(line)
}

/// The visits of all nodes, in order.
fn visits(parents: &Parents) -> Vec<u32> {
    let mut children = vec![Vec::new(); parents.len()];
    let mut sizes = vec![1; parents.len()];
    // Parents stand before their children, so sizes are known from behind.
    for (node, parent) in parents.iter().enumerate().rev() {
        let sizes_of = |&child: &usize| (sizes[child], child);
        children[node].sort_by_key(sizes_of);
        if let Some(parent) = *parent {
            children[parent].push(node);
            sizes[parent] += sizes[node];
        }
    }
    let mut words = Vec::with_capacity(parents.len());
    subtree(&children, 0, 0, &mut words);
    for i in 1..words.len() {
        words[i - 1] |= (words[i] & NODE_MASK) << NEXT_SHIFT;
    }
    if let Some(last) = words.last_mut() {
        *last |= IS_LAST;
    }
    words
}

/// Visits `root` and all below it while `level` states wait.
fn subtree(all: &[Vec<usize>], root: usize, level: usize, words: &mut Vec<u32>) {
    let has_children = |node: usize| !all[node].is_empty();
    let word = |at: usize| u32::try_from(at).expect("a tree has at most 64 nodes");
    let place = word(level + 1);
    let children = &all[root];
    let mut visit = word(root);
    if has_children(root) {
        visit |= UPDATES_STATE;
    }
    if children
        .iter()
        .filter(|&&child| has_children(child))
        .count()
        > 1
    {
        visit |= place << SPILL_SHIFT;
    }
    words.push(visit);
    for (index, &child) in children.iter().enumerate() {
        let returns = has_children(child) && index + 1 < children.len();
        subtree(all, child, level + usize::from(returns), words);
        if let (true, Some(last)) = (returns, words.last_mut()) {
            *last |= place << RELOAD_SHIFT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random_tree(nodes: usize, next: &mut impl FnMut(usize) -> usize) -> Vec<Option<usize>> {
        let kind = next(3);
        let parent = |i: usize| match kind {
            0 => next(i),
            1 => i - 1 - next(i).min(next(i)),
            _ => (i - 1) / 2,
        };
        let others = (1..nodes).map(parent).map(Some);
        std::iter::once(None).chain(others).collect()
    }

    /// Goes through the visits with the path of nodes that the state has been brought past, as the
    /// kernel would with states.
    fn check(parents: &Parents, words: &[u32]) {
        let mut seen = vec![0; parents.len()];
        let mut spilled = vec![vec![usize::MAX]; max_spilled_states(parents.len())];
        let mut state: Vec<usize> = Vec::new();
        for (index, word) in words.iter().enumerate() {
            let node = (word & NODE_MASK) as usize;
            seen[node] += 1;
            let parent = state.last().copied();
            assert_eq!(parent, parents[node], "node {node} of {parents:?}");
            let place = |shift: u32| (word >> shift & 15) as usize;
            if word & UPDATES_STATE != 0 {
                state.push(node);
                assert!(word & IS_LAST == 0 && place(RELOAD_SHIFT) == 0);
            } else {
                assert_eq!(place(SPILL_SHIFT), 0);
            }
            assert_eq!(word >> 24, 0);
            assert_eq!(word & IS_LAST != 0, index + 1 == words.len());
            let Some(next) = words.get(index + 1) else {
                break;
            };
            assert_eq!(word >> NEXT_SHIFT & NODE_MASK, next & NODE_MASK);
            if place(SPILL_SHIFT) > 0 {
                spilled[place(SPILL_SHIFT) - 1].clone_from(&state);
            }
            if place(RELOAD_SHIFT) > 0 {
                state.clone_from(&spilled[place(RELOAD_SHIFT) - 1]);
            }
        }
        assert!(seen.iter().all(|&n| n == 1), "{seen:?} of {parents:?}");
    }

    #[test]
    fn every_node_is_visited_once_with_the_state_of_its_parent() {
        let mut x = 1_u64;
        let mut next = |n: usize| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (x >> 33) as usize % n
        };
        for nodes in 1..=64 {
            for _ in 0..60 {
                let parents = random_tree(nodes, &mut next);
                check(&parents, &visits(&parents));
            }
        }
        assert_eq!([8, 16, 24, 32, 64].map(max_spilled_states), [1, 2, 3, 3, 4]);
    }

    #[test]
    fn taps_stand_on_the_path_and_then_in_the_window() {
        let parents = [None, Some(0), Some(0), Some(2), Some(3), Some(4)];
        let of = |node: usize| {
            conv_sources(&parents, node)
                .to_le_bytes()
                .map(|byte| byte as i8)
        };
        assert_eq!(of(0), [-3, -2, -1, 0]);
        assert_eq!(of(1), [-2, -1, 0, 1]);
        assert_eq!(of(3), [-1, 0, 2, 3]);
        assert_eq!(of(5), [2, 3, 4, 5]);
    }
}
