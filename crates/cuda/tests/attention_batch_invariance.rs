//! Attention rows are batch-invariant, and tree nodes equal single tokens bit for bit.

#![allow(clippy::unwrap_used, reason = "these are tests")]

mod fixtures {
    pub mod attention;
    pub mod gpu;
    pub mod step;
}

use contract::AttentionWindow;
use contract::KvFormat::{self, F16, Q4_0, Q5_1, Q8_0, Tq3_0};
use cuda::Numerics;
use cuda::select::uses_f16_queries;
use fixtures::attention::{ALL, AttentionFixture, LayerInputs, kinds, on, pass, shape};
use fixtures::gpu::{Random, same_bits};
use fixtures::step::{KernelDevice, Placed, chain, random_tree, star};

#[test]
fn attention_row_is_batch_invariant() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(4);
    for (k, v) in ALL {
        for (i, shape) in kinds(k, v).into_iter().take(3).enumerate() {
            let committed = 333;
            // The block partition also depends on the context limit.
            let room = [8_500, committed + 64][i.min(1)];
            let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 2, room);
            fixture.commit_random(&mut random, 0, 0..committed);
            fixture.commit_random(&mut random, 1, 0..40);
            fixture.upload(&gpu);
            let full = random_tree(&mut random, 48);
            let inputs = LayerInputs::random(&gpu, &mut random, &shape, 64);
            let width = shape.n_heads * shape.head_dim;
            let all = pass(
                &gpu,
                &fixture,
                &[on(0, committed, full.clone())],
                &inputs,
                64,
            );
            for nodes in [1, 2, 8, 24, 33] {
                let parents: Vec<usize> = full
                    .nodes()
                    .take(nodes)
                    .skip(1)
                    .map(|n| full.parent(n).unwrap().index())
                    .collect();
                let part = on(0, committed, fixtures::step::tree(&parents));
                let other = on(1, 40, chain(9));
                let bucket = (nodes + 9).next_multiple_of(8);
                let found = pass(&gpu, &fixture, &[part, other], &inputs, bucket);
                same_bits(
                    "rows",
                    &found.out[..nodes * width],
                    &all.out[..nodes * width],
                );
            }
        }
    }
}

/// Feeds tree nodes one by one after their ancestors and compares the bits with the joint pass. Of
/// every tree it checks the first, the deepest, the last and some other nodes.
fn check_equal_alone(
    gpu: &KernelDevice,
    random: &mut Random,
    fixture: &mut AttentionFixture,
    trees: &[Placed],
    inputs: &LayerInputs,
) {
    let width = fixture.shape.n_heads * fixture.shape.head_dim;
    let rows: usize = trees.iter().map(|p| p.tree.len()).sum();
    let bucket = rows.next_multiple_of(8).max(24);
    let together = pass(gpu, fixture, trees, inputs, bucket).out;
    fixture.download(gpu);
    let before = fixture.planes.clone();
    let mut first = 0;
    for Placed {
        slot,
        committed,
        tree,
    } in trees
    {
        let deepest = tree.nodes().max_by_key(|n| tree.depth(*n)).unwrap();
        let mut some = vec![0, deepest.index(), tree.len() - 1];
        some.extend((0..3).map(|_| random.below(tree.len())));
        some.sort_unstable();
        some.dedup();
        for node in some {
            let path = tree.path_to(tree.nodes().nth(node).unwrap());
            for (depth, ancestor) in path.nodes().iter().enumerate() {
                let (from, to) = (committed + ancestor.index(), committed + depth);
                for head in 0..fixture.shape.n_kv_heads {
                    fixture.copy((*slot, head), from, to, &before);
                }
            }
            fixture.upload(gpu);
            let window = tree.window();
            let alone = on(
                *slot,
                committed + path.len() - 1,
                chain(1).with_window(window),
            );
            let own = inputs.row(gpu, &fixture.shape, first + node);
            let found = pass(gpu, fixture, &[alone], &own, 1).out;
            let row = &together[(first + node) * width..][..width];
            let name = format!("{:?}: node {node} after {committed}", fixture.shape.k);
            same_bits(&name, &found, row);
            fixture.planes.clone_from(&before);
        }
        first += tree.len();
    }
}

/// Trees whose roots are just before and after tile and split boundaries, for these KV types.
fn check_nodes_equal_single_tokens(k: KvFormat, v: KvFormat, windows: bool) {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(8);
    let shape = shape((24, 4, 256, 64), true, true, k, v);
    let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 3, 2500);
    fixture.config.numerics = Numerics::BatchInvariant;
    fixture.config.tree_windows = windows;
    if !uses_f16_queries(&shape, fixture.config) {
        return;
    }
    for slot in 0..3 {
        fixture.commit_random(&mut random, slot, 0..2430);
    }
    let inputs = LayerInputs::random(&gpu, &mut random, &shape, 64);
    let mut of = |random: &mut Random, tree: Placed| {
        check_equal_alone(&gpu, random, &mut fixture, &[tree], &inputs);
    };
    if !windows {
        // With 132 multiprocessors, splits have two tiles from position 2,240.
        for committed in [0, 40, 63, 64, 127, 190, 2040, 2111, 2237, 2300, 2360] {
            let tree = on(1, committed, random_tree(&mut random, 24));
            of(&mut random, tree);
        }
        of(&mut random, on(1, 1, chain(64)));
        of(&mut random, on(2, 2111, chain(64)));
        of(&mut random, on(2, 2239, chain(64)));
    }
    let seen = |placed: Placed, tokens, sinks| {
        let window = if windows {
            AttentionWindow::new(tokens, sinks)
        } else {
            AttentionWindow::FULL
        };
        Placed {
            tree: placed.tree.with_window(window),
            ..placed
        }
    };
    let several = [
        seen(on(0, 2300, random_tree(&mut random, 20)), 100, 5),
        seen(on(1, 187, chain(24)), 64, 70),
        seen(on(2, 2175, star(20)), 2047, 0),
    ];
    check_equal_alone(&gpu, &mut random, &mut fixture, &several, &inputs);
}

/// Plans for short contexts have their own block partition (`plan::Depth`).
#[test]
fn attention_row_bits_do_not_depend_on_the_context_limit() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(10);
    for format in [Q8_0, Tq3_0, F16] {
        let shape = shape((24, 4, 256, 64), true, true, format, format);
        let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 1, 20_000);
        fixture.config.numerics = Numerics::BatchInvariant;
        fixture.commit_random(&mut random, 0, 0..1024);
        fixture.upload(&gpu);
        let room = fixture.tokens;
        let inputs = LayerInputs::random(&gpu, &mut random, &shape, 64);
        for (committed, tree) in [
            (0, chain(24)),
            (500, chain(32)),
            (512, random_tree(&mut random, 24)),
            (1000, star(33)),
            (1024, random_tree(&mut random, 64)),
        ] {
            let bucket = tree.len().next_multiple_of(8);
            let mut found = [1088, 8192, room].map(|tokens| {
                fixture.tokens = tokens;
                pass(
                    &gpu,
                    &fixture,
                    &[on(0, committed, tree.clone())],
                    &inputs,
                    bucket,
                )
                .out
            });
            let [few, some, many] = &mut found;
            let name = format!("{format:?}: {} rows after {committed}", tree.len());
            same_bits(&name, few, many);
            same_bits(&name, some, many);
        }
    }
}

#[test]
fn tree_node_attention_equals_single_token_attention() {
    for (k, v) in [(Q8_0, Q8_0), (Tq3_0, Tq3_0), (F16, F16), (Q4_0, Q5_1)] {
        check_nodes_equal_single_tokens(k, v, false);
    }
}

#[test]
fn windowed_tree_node_attention_equals_single_token_attention() {
    check_nodes_equal_single_tokens(Q8_0, Q8_0, true);
}

#[test]
fn tree_node_attention_equals_single_token_attention_where_splits_grow() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(9);
    let shape = shape((24, 4, 256, 64), true, true, Q8_0, Q8_0);
    let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 1, 12_600);
    fixture.config.numerics = Numerics::BatchInvariant;
    fixture.commit_random(&mut random, 0, 0..12_500);
    let inputs = LayerInputs::random(&gpu, &mut random, &shape, 64);
    // With 132 multiprocessors, the boundary is at 10,688.
    for (committed, tree) in [
        (10_680, chain(24)),
        (12_410, chain(24)),
        (12_470, random_tree(&mut random, 24)),
    ] {
        check_equal_alone(
            &gpu,
            &mut random,
            &mut fixture,
            &[on(0, committed, tree)],
            &inputs,
        );
    }
}
