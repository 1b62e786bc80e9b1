//! What the tests of attention, norms and rows share: a card that compiles on demand, and headers as words.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use std::ops::Deref;

use contract::{NodeIdx, TokenId, Tree};
use cuda::driver::{Buffer, Gpu};
use cuda::launch::{Launch, Unit};

use crate::card::{self, Random};

/// The card, if there is one.
pub struct Device(Gpu);

impl Device {
    pub fn open() -> Option<Device> {
        card::gpu().map(Device)
    }

    /// Compiles what the launches need and was not compiled before, runs them in order, and waits.
    pub fn launch(&self, launches: &[Launch]) {
        let mut units: Vec<Unit> = launches.iter().map(|l| l.unit.clone()).collect();
        units.sort();
        units.dedup();
        let modules = card::modules(&self.0, &units);
        for launch in launches {
            self.0.run(&modules, launch).unwrap();
        }
        self.0.sync().unwrap();
    }

    /// Bytes on the card, from a 256-byte boundary on.
    pub fn bytes(&self, bytes: &[u8]) -> Buffer<u8> {
        self.0.upload(bytes).unwrap()
    }
}

impl Deref for Device {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.0
    }
}

/// Words of a `Step`, as `kernels/common/step.cuh` has it.
pub const STEP_WORDS: usize = 544;

/// Of them, those that place the features of trees.
pub const FEATURES: usize = 540;

/// A tree on a sequence.
#[derive(Debug, Clone)]
pub struct Placed {
    pub slot: usize,
    pub committed: usize,
    pub tree: Tree,
}

/// A `Step` over trees; `asked` rows are asked for.
pub fn step(trees: &[Placed], asked: &[usize]) -> Vec<i32> {
    let mut words = vec![0_i32; STEP_WORDS];
    let (token, position, tree_of, parent, depth) = (20, 84, 148, 212, 276);
    let (ancestors, asked_row) = (340, 468);
    words[tree_of..parent].fill(-1);
    let mut row = 0;
    for (t, placed) in trees.iter().enumerate() {
        let first = row;
        let tree = &placed.tree;
        let numbers = [placed.slot, placed.committed, first, tree.len()];
        words[4 + 4 * t..][..4].copy_from_slice(&numbers.map(|n| n as i32));
        words[532 + t] = match tree.window() {
            window if window.is_full() => 1 << 30,
            window => window.tokens() as i32 + 1,
        };
        words[536 + t] = tree.window().sinks() as i32;
        for node in tree.nodes() {
            words[token + row] = tree.token(node).0 as i32;
            words[position + row] = (placed.committed + tree.depth(node)) as i32;
            words[tree_of + row] = t as i32;
            words[parent + row] = tree.parent(node).map_or(-1, |p| (first + p.index()) as i32);
            words[depth + row] = tree.depth(node) as i32;
            let mask = tree.ancestor_mask(node);
            words[ancestors + 2 * row] = mask as i32;
            words[ancestors + 2 * row + 1] = (mask >> 32) as i32;
            row += 1;
        }
    }
    words[0] = row as i32;
    words[1] = trees.len() as i32;
    words[2] = asked.len() as i32;
    for (i, &row) in asked.iter().enumerate() {
        words[asked_row + i] = row as i32;
    }
    words
}

/// A `Chunk` of tokens after `committed` others.
pub fn chunk(slot: usize, committed: usize, tokens: &[u32], asked: &[usize]) -> Vec<i32> {
    let mut words = vec![0_i32; 68];
    let numbers = [tokens.len(), slot, committed, asked.len()];
    words[..4].copy_from_slice(&numbers.map(|n| n as i32));
    for (i, &row) in asked.iter().enumerate() {
        words[4 + i] = row as i32;
    }
    words.extend(tokens.iter().map(|&t| t as i32));
    words
}

/// A `Commit` of paths `(slot, committed, nodes)`.
pub fn commit(paths: &[(usize, usize, Vec<usize>)]) -> Vec<i32> {
    let mut words = vec![0_i32; 4 + 4 * 68];
    words[0] = paths.len() as i32;
    for (p, (slot, committed, nodes)) in paths.iter().enumerate() {
        let at = 4 + 68 * p;
        let numbers = [*slot, *committed, nodes.len()];
        words[at..at + 3].copy_from_slice(&numbers.map(|n| n as i32));
        for (i, &node) in nodes.iter().enumerate() {
            words[at + 4 + i] = node as i32;
        }
    }
    words
}

/// A tree of `nodes` nodes from their parents.
pub fn tree(parents: &[usize]) -> Tree {
    let tokens: Vec<TokenId> = (0..=parents.len() as u32).map(TokenId).collect();
    let parents: Vec<NodeIdx> = parents.iter().map(|&p| NodeIdx(p as u16)).collect();
    Tree::new(&tokens, &parents).unwrap()
}

pub fn chain(nodes: usize) -> Tree {
    tree(&(0..nodes - 1).collect::<Vec<_>>())
}

pub fn star(nodes: usize) -> Tree {
    tree(&vec![0; nodes - 1])
}

pub fn random_tree(random: &mut Random, nodes: usize) -> Tree {
    let parents: Vec<usize> = (1..nodes).map(|i| random.below(i)).collect();
    tree(&parents)
}
