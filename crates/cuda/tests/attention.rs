//! KV cache writes, tree attention and compaction match the reference.

#![allow(clippy::unwrap_used, reason = "these are tests")]

mod fixtures {
    pub mod attention;
    pub mod gpu;
    pub mod step;
}

use contract::AttentionWindow;
use contract::KvFormat::{self, Bf16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Tq3_0};
use cuda::GpuProps;
use cuda::Numerics;
use cuda::launch::attention::{
    AttentionConfig, Mask, Positions, Shape, compact, qk_norm_rope_append,
};
use cuda::launch::draft;
use cuda::select::uses_f16_queries;
use fixtures::attention::{
    ALL, AttentionFixture, LayerInputs, codecs, join, kinds, max_code_distance, on, pass, shape,
    split,
};
use fixtures::gpu::{Random, close, same_bits};
use fixtures::step::{KernelDevice, Placed, chain, chunk, commit, random_tree, star};

/// The device's properties, in batch-invariant form, and without WGMMA where that changes kernels.
fn gpus(fixture: &AttentionFixture) -> Vec<AttentionConfig> {
    let [plain, exact] = [(false, Numerics::Fastest), (true, Numerics::BatchInvariant)].map(
        |(has_wgmma, numerics)| AttentionConfig {
            gpu: GpuProps {
                has_wgmma,
                ..fixture.config.gpu
            },
            numerics,
            ..fixture.config
        },
    );
    if !(fixture.config.gpu.has_wgmma && fixture.shape.head_dim == 256) {
        vec![plain]
    } else if uses_f16_queries(&fixture.shape, exact) {
        vec![fixture.config, exact, plain]
    } else {
        vec![fixture.config, plain]
    }
}

/// Fails unless a stored row equals the codec's row. TQ3_0 scales a group by its norm, whose sum
/// order differs here. One of 256 codes may therefore round differently.
fn assert_stored(
    fixture: &AttentionFixture,
    plane: usize,
    at: (usize, usize, usize),
    row: &[f32],
    what: &str,
) {
    let codec = codecs(&fixture.shape)[plane / 2];
    let (values, scales) = split(codec, row);
    let (slot, position, head) = at;
    if codec.format() == Tq3_0 {
        let expected = join(Tq3_0, &values, &scales, row.len());
        let found = fixture.load(plane, slot, position, head);
        let apart = max_code_distance(&found, &expected);
        assert!(apart <= 1, "{what}: {apart} codes are others");
        return;
    }
    assert_eq!(
        fixture.stored(plane, slot, position, head),
        values,
        "{what}: values"
    );
    assert_eq!(
        fixture.stored(plane + 1, slot, position, head),
        scales,
        "{what}: scales"
    );
}

/// Maximum relative error: f16 MMA unless the cache is f32.
fn allowed(fixture: &AttentionFixture) -> f64 {
    if uses_f16_queries(&fixture.shape, fixture.config) {
        2e-3
    } else {
        3e-6
    }
}

fn check(gpu: &KernelDevice, random: &mut Random, shape: Shape, trees: &[Placed]) {
    let most = trees.iter().map(|p| p.committed + 64).max().unwrap();
    let mut fixture = AttentionFixture::new(gpu, random, shape, 3, most);
    for placed in trees {
        let first = match shape.ring_pages {
            0 => 0,
            _ => placed.committed.saturating_sub(shape.window),
        };
        fixture.commit_random(random, placed.slot, first..placed.committed);
    }
    fixture.upload(gpu);
    let rows: usize = trees.iter().map(|p| p.tree.len()).sum();
    let inputs = LayerInputs::random(gpu, random, &shape, rows);
    for config in gpus(&fixture) {
        fixture.config = config;
        check_on(gpu, &mut fixture, trees, &inputs);
    }
}

/// Compares one pass over committed rows, and the rows that it writes, with the reference.
fn check_on(
    gpu: &KernelDevice,
    fixture: &mut AttentionFixture,
    trees: &[Placed],
    inputs: &LayerInputs,
) {
    let shape = fixture.shape;
    let rows: usize = trees.iter().map(|p| p.tree.len()).sum();
    let found = pass(gpu, fixture, trees, inputs, rows.next_multiple_of(8));
    fixture.download(gpu);
    let width = shape.n_heads * shape.head_dim;
    let mut row = 0;
    let (mut expected, mut queries, mut keys, mut card_keys) = (vec![], vec![], vec![], vec![]);
    for placed in trees {
        let decoded = fixture.decode(placed);
        let (first, mut all_gates) = (row, vec![]);
        for node in 0..placed.tree.len() {
            let position = placed.committed + placed.tree.depths()[node] as usize;
            let (q, gates) = inputs.queries(&shape, row, position);
            queries.extend(q);
            for head in 0..shape.n_kv_heads {
                let at = (placed.slot, placed.committed + node, head);
                keys.extend(inputs.key(&shape, row, head, position));
                card_keys.extend(fixture.load(0, at.0, at.1, at.2));
                assert_stored(fixture, 2, at, inputs.value(&shape, row, head), "a value");
            }
            all_gates.extend(gates);
            row += 1;
        }
        let own = &found.queries[first * width..row * width];
        if !shape.gate {
            all_gates = vec![0.0; own.len()];
        }
        expected.extend(decoded.attend(&shape, placed, own, &all_gates));
    }
    let name = format!("{shape:?} {trees:?}");
    let narrow = if uses_f16_queries(&shape, fixture.config) {
        4e-4
    } else {
        1e-6
    };
    close(
        &format!("queries of {name}"),
        &found.queries,
        &queries,
        narrow,
    );
    let rounded = match shape.k {
        F32 => 1e-6,
        F16 => 4e-4,
        Bf16 => 3e-3,
        Q8_0 => 8e-3,
        Q5_0 | Q5_1 => 0.06,
        Q4_0 | Q4_1 => 0.12,
        Tq3_0 => 0.22,
    };
    close(&format!("keys of {name}"), &card_keys, &keys, rounded);
    close(
        &format!("rows of {name}"),
        &found.out,
        &expected,
        allowed(fixture),
    );
}

/// Compares trees of every kind over every head shape for these KV types.
fn check_trees_match_reference(k: KvFormat, v: KvFormat) {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(1);
    for (i, shape) in kinds(k, v).into_iter().enumerate() {
        let small = [0, 1, 63, 64, 250, 97, 31, 128][i];
        check(&gpu, &mut random, shape, &[on(1, small, chain(1))]);
        let nodes = [24, 64, 17, 33, 8, 23, 64, 16][i];
        let tree = random_tree(&mut random, nodes);
        check(&gpu, &mut random, shape, &[on(2, 130 + small, tree)]);
    }
    let bushy = random_tree(&mut random, 11);
    let several = [on(2, 0, star(8)), on(0, 301, chain(5)), on(1, 64, bushy)];
    check(&gpu, &mut random, kinds(k, v)[0], &several);
    check(&gpu, &mut random, kinds(k, v)[1], &several);
}

#[test]
fn tree_attention_over_f32_matches_reference() {
    check_trees_match_reference(F32, F32);
}

#[test]
fn tree_attention_over_f16_matches_reference() {
    check_trees_match_reference(F16, F16);
}

#[test]
fn tree_attention_over_q8_0_matches_reference() {
    check_trees_match_reference(Q8_0, Q8_0);
}

#[test]
fn tree_attention_over_q4_0_matches_reference() {
    check_trees_match_reference(Q4_0, Q4_0);
}

#[test]
fn tree_attention_over_bf16_matches_reference() {
    check_trees_match_reference(Bf16, Bf16);
}

#[test]
fn tree_attention_over_q4_1_matches_reference() {
    check_trees_match_reference(Q4_1, Q4_1);
}

#[test]
fn tree_attention_over_q5_0_matches_reference() {
    check_trees_match_reference(Q5_0, Q5_0);
}

#[test]
fn tree_attention_over_q5_1_matches_reference() {
    check_trees_match_reference(Q5_1, Q5_1);
}

#[test]
fn tree_attention_over_tq3_0_matches_reference() {
    check_trees_match_reference(Tq3_0, Tq3_0);
}

#[test]
fn tree_attention_over_mixed_types_matches_reference() {
    for (k, v) in ALL.into_iter().filter(|(k, v)| k != v && *k != F32) {
        check_trees_match_reference(k, v);
    }
}

#[test]
fn tree_attention_over_f32_keys_or_values_matches_reference() {
    check_trees_match_reference(F32, Q8_0);
}

/// Contexts of many splits. Compilation and the reference dominate the time, so each test covers a
/// few types.
fn long_contexts(formats: &[(KvFormat, KvFormat)]) {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(2);
    for &(k, v) in formats {
        let shape = shape((6, 1, 256, 64), true, true, k, v);
        let tree = random_tree(&mut random, 24);
        check(&gpu, &mut random, shape, &[on(0, 9000, tree)]);
    }
}

/// The longest usual contexts.
fn deep_contexts(format: KvFormat) {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(2);
    let shape = shape((6, 1, 256, 64), true, true, format, format);
    check(&gpu, &mut random, shape, &[on(0, 131_072, chain(3))]);
}

#[test]
fn long_context_attention_over_16_bit_types_matches_reference() {
    long_contexts(&[ALL[1], ALL[2]]);
}

#[test]
fn long_context_attention_over_q8_0_matches_reference() {
    long_contexts(&[ALL[3], ALL[9]]);
}

#[test]
fn long_context_attention_over_5_bit_types_matches_reference() {
    long_contexts(&[ALL[4], ALL[5]]);
}

#[test]
fn long_context_attention_over_4_bit_types_matches_reference() {
    long_contexts(&[ALL[6], ALL[7]]);
}

#[test]
fn long_context_attention_over_tq3_0_matches_reference() {
    long_contexts(&[ALL[8], ALL[12]]);
}

#[test]
fn long_context_attention_over_mixed_types_matches_reference() {
    long_contexts(&[ALL[11], ALL[13], ALL[14]]);
}

#[test]
fn very_long_context_attention_over_f16_matches_reference() {
    deep_contexts(F16);
}

#[test]
fn very_long_context_attention_over_q8_0_matches_reference() {
    deep_contexts(Q8_0);
}

#[test]
fn very_long_context_attention_over_q4_0_matches_reference() {
    deep_contexts(Q4_0);
}

#[test]
fn very_long_context_attention_over_tq3_0_matches_reference() {
    deep_contexts(Tq3_0);
}

#[test]
fn windowed_and_block_attention_matches_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(3);
    for format in [F32, F16, Q8_0, Q5_0] {
        for mask in [Mask::Full, Mask::Causal] {
            for (window, committed) in [(100, 40), (100, 99), (100, 700), (512, 3000), (1, 5)] {
                let mut shape = shape((32, 8, 128, 128), false, true, format, format);
                shape.window = window;
                shape.mask = mask;
                shape.ring_pages = draft::ring_pages(window, 64);
                let block = [on(1, committed, chain(16)), on(0, committed + 7, chain(16))];
                check(&gpu, &mut random, shape, &block);
            }
        }
    }
}

#[test]
fn each_tree_attends_through_its_own_window() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(7);
    for (format, heads) in [
        (F32, vec![(4, 2, 64, 16)]),
        (F16, vec![(24, 4, 256, 64), (4, 2, 64, 16)]),
        (Q8_0, vec![(24, 4, 256, 64)]),
        (Tq3_0, vec![(24, 4, 256, 64)]),
    ] {
        for heads in heads {
            let shape = shape(heads, true, true, format, format);
            let mut trees = vec![
                on(0, 700, random_tree(&mut random, 24)),
                on(1, 333, chain(33)),
                on(2, 1200, chain(1)),
            ];
            let most = trees.iter().map(|p| p.committed + 64).max().unwrap();
            let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 3, most);
            for tree in &trees {
                fixture.commit_random(&mut random, tree.slot, 0..tree.committed);
            }
            fixture.upload(&gpu);
            let inputs = LayerInputs::random(&gpu, &mut random, &shape, 64);
            for config in gpus(&fixture) {
                fixture.config = config;
                let full = pass(&gpu, &fixture, &trees, &inputs, 64);
                fixture.config.tree_windows = true;
                for windows in [
                    [(64, 0), (64, 0), (64, 0)],
                    [(65, 5), (200, 64), (0, 0)],
                    [(130, 4), (270, 100), (100, 700)],
                    [(333, 333), (64, 1), (1135, 1)],
                ] {
                    for (tree, (tokens, sinks)) in trees.iter_mut().zip(windows) {
                        let window = AttentionWindow::new(tokens, sinks);
                        tree.tree = tree.tree.clone().with_window(window);
                    }
                    check_on(&gpu, &mut fixture, &trees, &inputs);
                }
                // Windows that mask nothing give the same bits as no window.
                for wide in [
                    AttentionWindow::FULL,
                    AttentionWindow::new(1300, 0),
                    AttentionWindow::new(1300, 9),
                ] {
                    for tree in &mut trees {
                        tree.tree = tree.tree.clone().with_window(wide);
                    }
                    let found = pass(&gpu, &fixture, &trees, &inputs, 64);
                    same_bits("rows", &found.out, &full.out);
                }
            }
        }
    }
}

#[test]
fn prefill_chunk_appends_keys_and_values_at_their_pages() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(5);
    for (k, v) in ALL {
        for shape in kinds(k, v) {
            let (rows, committed) = (37, 240);
            let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 2, committed + rows);
            let inputs = LayerInputs::random(&gpu, &mut random, &shape, rows);
            let header = gpu
                .upload(&chunk(1, committed, &vec![0; rows], &[]))
                .unwrap();
            let from = fixture.projections(&inputs);
            gpu.launch(&[qk_norm_rope_append(
                &shape,
                40,
                Positions::Chunk(header.ptr()),
                from,
                fixture.append_target(),
            )]);
            let q = inputs.q.download(&gpu).unwrap();
            fixture.download(&gpu);
            for row in 0..rows {
                let (expected, gates) = inputs.queries(&shape, row, committed + row);
                let own = &q[row * shape.n_heads * shape.q_stride()..]
                    [..shape.n_heads * shape.q_stride()];
                let heads = own.chunks(shape.q_stride());
                let found: Vec<f32> = heads
                    .clone()
                    .flat_map(|h| h[..shape.head_dim].to_vec())
                    .collect();
                close("queries", &found, &expected, 1e-6);
                let found: Vec<f32> = heads.flat_map(|h| h[shape.head_dim..].to_vec()).collect();
                same_bits("gates", &found, &gates);
                for head in 0..shape.n_kv_heads {
                    let at = (1, committed + row, head);
                    assert_stored(&fixture, 2, at, inputs.value(&shape, row, head), "a value");
                }
            }
        }
    }
}

#[test]
fn extreme_rows_are_stored_as_the_codec_stores_them() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(6);
    let plain = KvFormat::ALL.map(|format| (format, false));
    let turned = KvFormat::ALL.map(|format| (format, true));
    for (format, turned) in [plain, turned].concat() {
        let mut shape = shape((1, 1, 256, 64), false, false, format, format);
        shape.rotated = turned;
        let rows = 7;
        let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 1, rows);
        let mut inputs = LayerInputs::random(&gpu, &mut random, &shape, rows);
        let v = &mut inputs.host_v;
        v[..256].fill(0.0);
        for (i, x) in v[256..512].iter_mut().enumerate() {
            *x = if i % 2 == 0 { 3.0 } else { -3.0 };
        }
        v[512..768].iter_mut().for_each(|x| *x *= 1e-30);
        v[768..1024].iter_mut().for_each(|x| *x *= 1e-41);
        v[1024..1280].iter_mut().for_each(|x| *x *= 6e4);
        v[1280..1536]
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = i as f32 - 128.0);
        inputs.v.upload(&gpu, &inputs.host_v).unwrap();
        let header = gpu.upload(&chunk(0, 0, &vec![0; rows], &[])).unwrap();
        let from = fixture.projections(&inputs);
        gpu.launch(&[qk_norm_rope_append(
            &shape,
            rows,
            Positions::Chunk(header.ptr()),
            from,
            fixture.append_target(),
        )]);
        fixture.download(&gpu);
        for row in 0..rows {
            let what = format!("{} row {row}", format.name());
            assert_stored(
                &fixture,
                2,
                (0, row, 0),
                inputs.value(&shape, row, 0),
                &what,
            );
        }
    }
}

#[test]
fn compact_kv_moves_bytes_verbatim() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(7);
    for (k, v) in ALL {
        for shape in kinds(k, v) {
            let mut fixture = AttentionFixture::new(&gpu, &mut random, shape, 3, 600);
            let paths = [
                (
                    2,
                    250,
                    (0..24).filter(|i| i % 3 != 1).collect::<Vec<usize>>(),
                ),
                (0, 5, vec![0, 1, 2, 3]),
                (1, 0, vec![0, 63]),
            ];
            for (slot, committed, _) in &paths {
                fixture.commit_random(&mut random, *slot, 0..committed + 64);
            }
            fixture.upload(&gpu);
            let header = gpu.upload(&commit(&paths)).unwrap();
            gpu.launch(&[compact(
                &shape,
                &fixture.group_cache(),
                paths.len(),
                header.ptr(),
            )]);
            let before = fixture.planes.clone();
            fixture.download(&gpu);
            let after = std::mem::replace(&mut fixture.planes, before);
            for (slot, committed, nodes) in &paths {
                for plane in 0..4 {
                    for head in 0..shape.n_kv_heads {
                        let rows: Vec<Vec<u8>> = nodes
                            .iter()
                            .map(|n| fixture.stored(plane, *slot, committed + n, head).to_vec())
                            .collect();
                        for (i, row) in rows.iter().enumerate() {
                            let bytes = fixture.row_bytes(plane);
                            let at = fixture.stored(plane, *slot, committed + i, head).as_ptr()
                                as usize
                                - fixture.planes[plane].as_ptr() as usize;
                            fixture.planes[plane][at..at + bytes].copy_from_slice(row);
                        }
                    }
                }
            }
            assert!(fixture.planes == after, "{shape:?}");
        }
    }
}
