//! Masses of logits rows on the GPU have the bits of the contract, and rows that are asked for with
//! a query are answered by the part that decides. Without a GPU every test prints SKIPPED and
//! passes.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod gpu;
    pub mod model;
    pub mod step;
}

use std::sync::Arc;

use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::mass::{self, MassCut, MassPart, MassQuery};
use contract::{
    Backend, LogitsProcessors, LogitsRequest, LogitsRow, QuantType, TokenId, VerifyItem,
};
use cuda::launch::logits::{
    LogitsBuffers, LogitsReduction, MASS_QUERIES_BYTES, MassBuffers, edit, edits, mass_bytes,
    masses, queries, read_mass, reduce,
};
use cuda::launch::norm::RowSource;

use fixtures::gpu::{Random, poisoned};
use fixtures::model::{F16_KV, LIMITS, load_config, open_device, text, tree};
use fixtures::step::{KernelDevice, Placed, chain, step};

fn at_share(divisor: f32, share: f64) -> MassQuery {
    MassQuery {
        divisor,
        part: MassPart::AtShare(share),
    }
}

fn best(divisor: f32, share: f64, floor: f64) -> MassQuery {
    MassQuery {
        divisor,
        part: MassPart::Best(MassCut { share, floor }),
    }
}

/// Rows of several kinds: spread, flat, tied, with infinities and NaN.
fn rows(random: &mut Random, vocab: usize) -> Vec<Vec<f32>> {
    let mut rows = vec![
        random.normals(vocab, 3.0),
        random.normals(vocab, 0.1),
        vec![1.5; vocab],
        random.normals(vocab, 8.0),
        random.normals(vocab, 2.0),
        random.normals(vocab, 2.0),
    ];
    for i in (0..vocab).step_by(3) {
        rows[3][i] = f32::NEG_INFINITY;
        rows[4][i] = f32::NAN;
    }
    rows[5][vocab / 2] = f32::INFINITY;
    rows
}

/// What the kernels find for the rows of a step, some of them edited.
fn found(
    gpu: &KernelDevice,
    (vocab, rows): (usize, &[Vec<f32>]),
    asked: &[(usize, MassQuery)],
    changes: &[(usize, &LogitsProcessors)],
) -> Vec<u8> {
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
        k: 64.min(vocab),
    };
    let mut logits = poisoned::<f32>(gpu, bucket * vocab);
    logits.upload(gpu, &rows.concat()).unwrap();
    let edited = poisoned::<f32>(gpu, bucket * vocab);
    let scratch = poisoned::<u8>(gpu, shape.scratch_bytes(bucket));
    let out = poisoned::<u8>(gpu, shape.out_bytes(bucket));
    let blob = gpu.bytes(&edits(changes, vocab));
    let any = !changes.is_empty();
    let at = LogitsBuffers {
        logits: logits.ptr(),
        edited: if any { edited.ptr() } else { 0 },
        edits: if any { blob.ptr() } else { 0 },
        scratch: scratch.ptr(),
        out: out.ptr(),
    };
    let bytes = queries(asked);
    assert_eq!(bytes.len(), MASS_QUERIES_BYTES);
    let asked = gpu.bytes(&bytes);
    let sums = poisoned::<u8>(gpu, shape.mass_scratch_bytes(bucket));
    let results = poisoned::<u8>(gpu, mass_bytes(bucket));
    let own = MassBuffers {
        queries: asked.ptr(),
        scratch: sums.ptr(),
        out: results.ptr(),
    };
    let mut launches = Vec::new();
    if any {
        launches.extend(edit(shape, bucket, source, at));
    }
    launches.extend(reduce(shape, bucket, source, at));
    launches.extend(masses(shape, bucket, source, (at, own)));
    gpu.launch(&launches);
    let bytes = results.download(gpu).unwrap();
    let padding = &bytes[mass_bytes(rows.len())..];
    assert!(padding.iter().all(|b| *b == 255), "padding was written");
    bytes
}

#[test]
fn totals_and_tokens_have_the_bits_of_the_contract() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(8);
    for vocab in [7, 64, 512, 513, 1024, 20_001, 248_320] {
        let rows = rows(&mut random, vocab);
        for divisor in [0.05, 0.7, 1.0, 3.0] {
            let shares = [0.0, 0.25, 0.5, 0.999, 0.999_999_999_999];
            for share in shares {
                let asked: Vec<(usize, MassQuery)> =
                    (0..5).map(|row| (row, at_share(divisor, share))).collect();
                let found = found(&gpu, (vocab, &rows), &asked, &[]);
                for (i, raw) in rows.iter().enumerate() {
                    let what = format!("{vocab} tokens, row {i}, {divisor}, {share}");
                    let result = read_mass(&found, i);
                    // Row 5 has no query.
                    if i == 5 {
                        assert_eq!((result.total, result.token), (0.0, None), "{what}");
                        continue;
                    }
                    let clean = |x: &f32| if x.is_nan() { f32::NEG_INFINITY } else { *x };
                    let row: Vec<f32> = raw.iter().map(clean).collect();
                    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let total: f64 = mass::block_masses(&row, max, divisor).iter().sum();
                    assert_eq!(result.total.to_bits(), total.to_bits(), "{what}");
                    // The end of a row may be left to the host.
                    let Some((id, logit, raw)) = result.token else {
                        assert!(share > 0.9, "{what}");
                        continue;
                    };
                    let at = mass::pick(&row, max, divisor, share).unwrap();
                    assert_eq!((id as usize, logit, raw), (at, row[at], row[at]), "{what}");
                }
            }
        }
        // An infinite logit is left to the host.
        let found = found(&gpu, (vocab, &rows), &[(5, at_share(1.0, 0.5))], &[]);
        assert_eq!(read_mass(&found, 5).total, 0.0);
    }
}

#[test]
fn edited_rows_have_the_masses_of_their_edits() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(9);
    for vocab in [300, 248_320] {
        let rows = rows(&mut random, vocab)[..2].to_vec();
        let processors = LogitsProcessors {
            bias: vec![(TokenId(3), 9.0), (TokenId(7), -4.0)],
            ..LogitsProcessors::default()
        };
        let asked = [(0, at_share(0.9, 0.6)), (1, at_share(0.9, 0.6))];
        let found = found(&gpu, (vocab, &rows), &asked, &[(1, &processors)]);
        for (i, raw) in rows.iter().enumerate() {
            let mut row = raw.clone();
            if i == 1 {
                processors.apply(&mut row);
            }
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let at = mass::pick(&row, max, 0.9, 0.6).unwrap();
            let (id, logit, unedited) = read_mass(&found, i).token.unwrap();
            assert_eq!((id as usize, logit, unedited), (at, row[at], raw[at]));
        }
    }
}

/// A query changes how much of a row comes back, not what it says.
#[test]
fn rows_with_a_query_are_parts_of_full_rows() {
    let Some(device) = open_device(false) else {
        return;
    };
    let model = SyntheticModel::new(SyntheticLayout::HybridTiled, QuantType::Q4_K, 3);
    let vocab = model.spec.vocab;
    let config = load_config(&model, F16_KV, LIMITS);
    let mut runner = device.backend.open(config, &mut |_| {}).unwrap();
    let seq = runner.open(300).unwrap();
    runner.prefill(seq, &text(vocab, 70, 7), &[]).unwrap();
    let tree = tree(vocab, 12, |i| i / 2);
    let biased = Arc::new(LogitsProcessors {
        bias: vec![(TokenId(5), 3.0)],
        ..LogitsProcessors::default()
    });
    let queries: Vec<(Option<MassQuery>, Option<Arc<LogitsProcessors>>)> = (0..12)
        .map(|i| {
            let query = match i % 4 {
                0 => Some(at_share(1.0, f64::from(i) / 12.0)),
                1 => Some(best(0.5, 0.9, 0.0)),
                2 => Some(best(4.0, 1.0, 1e-6)),
                _ => None,
            };
            (query, (i % 3 == 0).then(|| Arc::clone(&biased)))
        })
        .collect();
    let mut verify = |with_query: bool| -> Vec<LogitsRow> {
        let requests: Vec<LogitsRequest> = queries
            .iter()
            .map(|(query, processors)| LogitsRequest {
                processors: processors.clone(),
                mass: query.filter(|_| with_query),
                ..LogitsRequest::full()
            })
            .collect();
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        let rows = runner.verify(&[item]).unwrap().remove(0);
        runner.discard(seq).unwrap();
        rows
    };
    let (full, parts) = (verify(false), verify(true));
    for (i, ((full, part), (query, _))) in full.iter().zip(&parts).zip(&queries).enumerate() {
        assert_eq!(full.mass, 0.0);
        let max = full
            .logits
            .iter()
            .copied()
            .fold(f32::NEG_INFINITY, f32::max);
        match query {
            None => assert_eq!(part, full, "row {i}"),
            Some(query) => {
                let MassQuery {
                    divisor,
                    part: asked,
                } = *query;
                let total: f64 = mass::block_masses(&full.logits, max, divisor).iter().sum();
                match asked {
                    MassPart::AtShare(share) => {
                        let at = mass::pick(&full.logits, max, divisor, share).unwrap();
                        assert_eq!(part.ids, [full.ids[at]], "row {i}");
                    }
                    MassPart::Best(cut) => {
                        let mut ranked: Vec<usize> = (0..vocab).collect();
                        ranked.sort_by(|a, b| {
                            full.logits[*b].total_cmp(&full.logits[*a]).then(a.cmp(b))
                        });
                        ranked.truncate(64);
                        let logits: Vec<f32> = ranked.iter().map(|i| full.logits[*i]).collect();
                        match cut.covered_by(&logits, divisor, total, vocab) {
                            None => {
                                assert_eq!(part, full, "row {i}");
                                continue;
                            }
                            Some(heavy) => {
                                let ids: Vec<usize> =
                                    part.ids.iter().map(|id| id.index()).collect();
                                assert_eq!(ids, ranked[..heavy], "row {i}");
                            }
                        }
                    }
                }
                assert_eq!(part.mass.to_bits(), total.to_bits(), "row {i}");
                assert_eq!(
                    (part.lse, part.raw_lse),
                    (full.lse, full.raw_lse),
                    "row {i}"
                );
                for (at, id) in part.ids.iter().enumerate() {
                    assert_eq!(part.logits[at], full.logits[id.index()], "row {i}");
                    assert_eq!(part.raw[at], full.raw[id.index()], "row {i}");
                }
            }
        }
    }
}
