//! Embedding rows, logits reduction, logits processors and hidden-state capture match the
//! reference.

#![allow(clippy::unwrap_used, reason = "these are tests")]

mod fixtures {
    pub mod gpu;
    pub mod step;
}

use std::sync::Arc;

use contract::quant::{dequantize_row, quantize_row};
use contract::{
    LogitsProcessors, LogitsRequest, LogitsSelection, QuantType, TokenCount, TokenId, TokenMask,
};
use cpu::reference::rows as reference;
use cuda::launch::draft::{CaptureTarget, capture_hidden_states};
use cuda::launch::logits::{LogitsBuffers, LogitsReduction, edit, edits, reduce};
use cuda::launch::norm::RowSource;
use cuda::launch::{draft, embedding};
use cuda::pack;
use fixtures::gpu::{Random, poisoned, same_bits};
use fixtures::step::{FEATURES, KernelDevice, Placed, chain, chunk, commit, star, step};

#[test]
fn embedding_rows_match_the_codec() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(1);
    for ty in QuantType::ALL {
        for width in [256, 5120] {
            let (vocab, bytes) = (37, ty.row_bytes(width));
            let mut table = vec![0; vocab * bytes];
            for row in table.chunks_mut(bytes) {
                quantize_row(ty, &random.normals(width, 1.0), row);
            }
            let tokens = [36, 0, 17, 17, 5];
            let header = gpu.upload(&chunk(0, 0, &tokens, &[])).unwrap();
            let mut stored = vec![0; vocab * pack::table_type(ty).row_bytes(width)];
            pack::table_rows(ty, width, &table, &mut stored);
            let device = gpu.bytes(&stored);
            let out = poisoned::<f32>(&gpu, 8 * width);
            let embeddings = embedding::EmbeddingTable {
                ty: pack::table_type(ty),
                width,
                at: device.ptr(),
            };
            gpu.launch(&[embedding::gather(
                embeddings,
                8,
                RowSource::Chunk(header.ptr()),
                out.ptr(),
            )]);
            let mut expected = vec![0.0; tokens.len() * width];
            for (token, row) in tokens.iter().zip(expected.chunks_mut(width)) {
                dequantize_row(ty, &table[*token as usize * bytes..][..bytes], row);
            }
            let found = out.download(&gpu).unwrap();
            same_bits(ty.name(), &found[..expected.len()], &expected);
            assert!(found[expected.len()..].iter().all(|v| v.is_nan()));
        }
    }
}

/// A logits row of one kind, adversarial ones included.
fn logits(random: &mut Random, vocab: usize, kind: usize) -> Vec<f32> {
    let mut row = random.normals(vocab, 3.0);
    match kind {
        // Few distinct values: ties everywhere.
        1 => row.iter_mut().for_each(|x| *x = x.round()),
        // One value everywhere, or nothing.
        2 => row.fill(0.25),
        3 => row.fill(f32::NEG_INFINITY),
        // Rising with the id, so the best are adjacent.
        4 => (0..vocab).for_each(|i| row[i] = i as f32 * 1e-3),
        5 => {
            row.fill(f32::NEG_INFINITY);
            for i in 0..5.min(vocab) {
                row[i * (vocab - 1) / 4] = i as f32;
            }
        }
        6 => {
            for i in 0..vocab / 3 {
                row[i * 3] = [f32::NAN, -0.0, 0.0, f32::NEG_INFINITY][i % 4];
            }
        }
        7 => row[vocab / 2] = f32::INFINITY,
        // A plateau wider than the candidate list.
        8 => {
            for x in &mut row[vocab / 4..vocab / 2] {
                *x = 50.0;
            }
            row[vocab - 1] = 60.0;
        }
        9 => row.fill(f32::NAN),
        _ => (),
    }
    row
}

fn check_reduction(
    gpu: &KernelDevice,
    vocab: usize,
    k: usize,
    rows: &[Vec<f32>],
    changes: &[(usize, LogitsProcessors)],
) {
    let requested: Vec<usize> = (0..rows.len()).collect();
    let head = [Placed {
        slot: 0,
        committed: 3,
        tree: chain(rows.len()),
    }];
    let header = gpu.upload(&step(&head, &requested)).unwrap();
    let source = RowSource::Step(header.ptr());
    let bucket = rows.len() + 2;
    let shape = LogitsReduction {
        vocab,
        stride: vocab,
        k,
    };
    let mut logits = poisoned::<f32>(gpu, bucket * vocab);
    logits.upload(gpu, &rows.concat()).unwrap();
    let edited = poisoned::<f32>(gpu, bucket * vocab);
    let scratch = poisoned::<u8>(gpu, shape.scratch_bytes(bucket));
    let out = poisoned::<u8>(gpu, shape.out_bytes(bucket));
    let items: Vec<(usize, &LogitsProcessors)> = changes.iter().map(|(row, e)| (*row, e)).collect();
    let blob = gpu.bytes(&edits(&items, vocab));
    let any = !changes.is_empty();
    let at = LogitsBuffers {
        logits: logits.ptr(),
        edited: if any { edited.ptr() } else { 0 },
        edits: if any { blob.ptr() } else { 0 },
        scratch: scratch.ptr(),
        out: out.ptr(),
    };
    let mut launches = Vec::new();
    if any {
        launches.extend(edit(shape, bucket, source, at));
    }
    launches.extend(reduce(shape, bucket, source, at));
    gpu.launch(&launches);
    let bytes = out.download(gpu).unwrap();
    let edited = edited.download(gpu).unwrap();
    for (i, raw) in rows.iter().enumerate() {
        let own = changes
            .iter()
            .find(|(row, _)| *row == i)
            .map(|(_, e)| Arc::new(e.clone()));
        if let Some(own) = &own {
            let mut all = raw.clone();
            own.apply(&mut all);
            let found = &edited[i * vocab..][..vocab];
            for (id, (a, b)) in found.iter().zip(&all).enumerate() {
                assert!(
                    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
                    "edited {id}: {a} not {b}"
                );
            }
        }
        let expected = reference::row(
            &LogitsRequest {
                selection: LogitsSelection::TopK(k),
                processors: own,
                mass: None,
            },
            raw,
        );
        let found = shape.read(&bytes, i);
        let ids: Vec<u32> = expected.ids.iter().map(|id| id.0).collect();
        assert_eq!(found.ids, ids, "vocab {vocab}, k {k}, row {i}");
        same_bits("logits", &found.logits, &expected.logits);
        same_bits("raw logits", &found.raw, &expected.raw);
        for (a, b) in [(found.lse, expected.lse), (found.raw_lse, expected.raw_lse)] {
            assert!(
                a == b || (a - b).abs() < 2e-5,
                "log-sum-exp {a}, not {b} (row {i})"
            );
        }
    }
    assert!(
        bytes[shape.out_bytes(rows.len())..]
            .iter()
            .all(|b| *b == 255),
        "padding was written"
    );
}

#[test]
fn logits_reduction_matches_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(5);
    for (vocab, k) in [
        (263, 1),
        (263, 64),
        (40, 64),
        (4096, 8),
        (16384, 64),
        (20_001, 20),
        (248_320, 8),
        (248_320, 64),
    ] {
        let rows: Vec<Vec<f32>> = (0..10)
            .map(|kind| logits(&mut random, vocab, kind))
            .collect();
        check_reduction(&gpu, vocab, k, &rows, &[]);
    }
}

#[test]
fn logit_edits_match_the_contract() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(6);
    for (vocab, k) in [(263, 8), (248_320, 20)] {
        let rows: Vec<Vec<f32>> = [0, 6, 1, 0]
            .map(|kind| logits(&mut random, vocab, kind))
            .to_vec();
        let token = |random: &mut Random| TokenId(random.below(vocab) as u32);
        let mut few = TokenMask::none(vocab);
        (0..5).for_each(|_| few.insert(token(&mut random)));
        let some = |random: &mut Random| {
            let mut ids: Vec<TokenId> = (0..100).map(|_| token(random)).collect();
            ids.sort();
            ids.dedup();
            ids
        };
        let heavy = LogitsProcessors {
            allowed: None,
            bias: some(&mut random)
                .into_iter()
                .map(|t| (t, random.normal() * 5.0))
                .collect(),
            repetition: 1.3,
            frequency: 0.37,
            presence: 0.21,
            counts: some(&mut random)
                .into_iter()
                .enumerate()
                .map(|(i, token)| TokenCount {
                    token,
                    seen: i % 3 != 0,
                    generated: (i % 5) as u32,
                })
                .collect(),
        };
        let barred = LogitsProcessors {
            allowed: Some(Arc::new(few)),
            bias: vec![(TokenId(3), 2.0), (TokenId(vocab as u32 + 9), 1.0)],
            ..LogitsProcessors::default()
        };
        check_reduction(&gpu, vocab, k, &rows, &[(3, heavy.clone()), (1, barred)]);
        check_reduction(&gpu, vocab, k, &rows, &[(1, heavy)]);
    }
}

#[test]
fn captured_hidden_states_are_stored_side_by_side() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(7);
    let (width, stride, nodes) = (256, 768, 16);
    let trees = [
        Placed {
            slot: 2,
            committed: 5,
            tree: star(3),
        },
        Placed {
            slot: 0,
            committed: 9,
            tree: chain(4),
        },
    ];
    let mut header = step(&trees, &[]);
    // The second tree's rows follow two existing rows.
    let feature_rows = [2 * nodes, 2];
    header[FEATURES..][..2].copy_from_slice(&feature_rows.map(|row| row as i32));
    let header = gpu.upload(&header).unwrap();
    let x = random.normals(7 * width, 1.0);
    let device = gpu.upload(&x).unwrap();
    let out = poisoned::<f32>(&gpu, 3 * nodes * stride);
    let taps = [0, 256, 512].map(|offset| {
        let to = CaptureTarget {
            out: out.ptr(),
            stride,
            offset,
            to_feature_pool: true,
        };
        capture_hidden_states(width, 8, RowSource::Step(header.ptr()), device.ptr(), to)
    });
    gpu.launch(&taps);
    let found = out.download(&gpu).unwrap();
    let mut expected = vec![f32::from_bits(u32::MAX); found.len()];
    for (row, (slot, node)) in [(2, 0), (2, 1), (2, 2), (0, 2), (0, 3), (0, 4), (0, 5)]
        .into_iter()
        .enumerate()
    {
        for tap in 0..3 {
            let at = (slot * nodes + node) * stride + tap * width;
            expected[at..at + width].copy_from_slice(&x[row * width..][..width]);
        }
    }
    same_bits("taps", &found, &expected);

    // The rows of two paths return in order.
    let paths = [(2, 5, vec![0, 2]), (0, 9, vec![2, 3, 5])];
    let header = gpu.upload(&commit(&paths)).unwrap();
    let kept = poisoned::<f32>(&gpu, 8 * stride);
    let out_rows = cuda::launch::norm::ActivationBuffers::f32(kept.ptr());
    let captured = draft::CapturedStates {
        at: out.ptr(),
        width: stride,
        rows_per_slot: nodes,
    };
    gpu.launch(&[draft::path_rows(captured, 8, header.ptr(), out_rows)]);
    let kept = kept.download(&gpu).unwrap();
    let rows: Vec<f32> = paths
        .iter()
        .flat_map(|(slot, _, path)| path.iter().map(move |node| (slot * nodes + node) * stride))
        .flat_map(|at| expected[at..at + stride].to_vec())
        .collect();
    same_bits("path rows", &kept[..rows.len()], &rows);
    assert!(kept[rows.len()..].iter().all(|v| v.is_nan()));
}
