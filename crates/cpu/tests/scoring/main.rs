//! The scorer against an f64 model, and its promises: dense at density one, deterministic, early
//! exit, cancellation, refusals.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod reference_f64;

use std::ops::ControlFlow;

use conformance::scoring::{self, dense, prompt, score, sparse};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{BlockSparsity, DeviceError, Mixer, QuantType, ScoreSettings, Scorer, TokenId};
use cpu::{CpuBackend, CpuOptions};
use reference_f64::ReferenceF64;

const TOLERANCE: f64 = 1e-3;

fn fast(threads: usize) -> CpuOptions {
    CpuOptions {
        reference: false,
        threads: Some(threads),
    }
}

fn open(options: CpuOptions, model: &SyntheticModel, exit_layer: Option<usize>) -> Box<dyn Scorer> {
    scoring::open(&CpuBackend::new(options), model, exit_layer)
}

/// Compares with the reference; `options` must compute without rounding activations.
fn check(
    options: CpuOptions,
    model: &SyntheticModel,
    tokens: &[TokenId],
    exit_layer: Option<usize>,
    settings: &ScoreSettings,
) {
    let mut scorer = open(options, model, exit_layer);
    let exit_layer = scorer.info().exit_layer;
    let found = score(&mut *scorer, tokens, settings);
    let expected = ReferenceF64 { model, exit_layer }.scores(tokens, settings);
    assert_eq!(found.len(), expected.len());
    let worst = found
        .iter()
        .zip(&expected)
        .map(|(found, expected)| (f64::from(*found) - expected).abs() / expected.max(1e-9))
        .fold(0.0, f64::max);
    assert!(worst < TOLERANCE, "{} is off by {worst}", model.spec.name);
}

#[test]
fn dense_scores_of_every_layout_match_f64() {
    for layout in SyntheticLayout::ALL {
        let model = SyntheticModel::new(layout, QuantType::F32, 3);
        check(fast(2), &model, &prompt(600, 5), None, &dense());
    }
}

#[test]
fn the_reference_matches_f64_for_quantised_weights() {
    let reference = CpuOptions {
        reference: true,
        threads: Some(2),
    };
    for layout in [SyntheticLayout::HybridGrouped, SyntheticLayout::Dense] {
        let model = SyntheticModel::new(layout, QuantType::Q8_0, 4);
        check(reference, &model, &prompt(300, 6), None, &dense());
    }
}

#[test]
fn sparse_scores_match_f64_where_blocks_are_dropped() {
    let settings = sparse();
    for layout in [SyntheticLayout::HybridGrouped, SyntheticLayout::Plain] {
        let model = SyntheticModel::new(layout, QuantType::F32, 8);
        let tokens = prompt(1500, 9);
        check(fast(2), &model, &tokens, None, &settings);
        let mut scorer = open(fast(2), &model, None);
        assert_ne!(
            score(&mut *scorer, &tokens, &settings),
            score(&mut *scorer, &tokens, &dense()),
            "no block was dropped"
        );
    }
}

#[test]
fn scores_of_4096_tokens_match_f64() {
    for layout in [SyntheticLayout::HybridTiled, SyntheticLayout::Plain] {
        let model = SyntheticModel::new(layout, QuantType::F32, 11);
        check(fast(2), &model, &prompt(4096, 12), None, &dense());
    }
}

#[test]
fn windows_of_layers_and_rotated_tails_match_f64() {
    let mut model = SyntheticModel::new(SyntheticLayout::Plain, QuantType::F32, 13);
    let spec = std::sync::Arc::make_mut(&mut model.spec);
    if let Mixer::Attention(attention) = &mut spec.layers[0].mixer {
        attention.window = Some(150);
    }
    let settings = ScoreSettings {
        tail_tokens: 21,
        rotated_tail: true,
        smoothing: 1,
        chunk: 32,
        ..dense()
    };
    check(fast(2), &model, &prompt(500, 14), None, &settings);
}

#[test]
fn early_exits_and_scored_layers_match_f64() {
    let model = SyntheticModel::new(SyntheticLayout::HybridGrouped, QuantType::F32, 15);
    let last = ScoreSettings {
        scored_layers: Some(1),
        ..dense()
    };
    let tokens = prompt(300, 16);
    check(fast(2), &model, &tokens, None, &last);
    // Layer 1 is a delta layer, so the exit is the attention of layer 0.
    check(fast(2), &model, &tokens, Some(1), &last);
    let scorer = open(fast(1), &model, Some(1));
    assert_eq!(scorer.info().exit_layer, 0);
    assert_eq!(scorer.info().attention_layers, 1);
}

#[test]
fn an_alpha_that_keeps_every_block_equals_dense_bit_for_bit() {
    let model = SyntheticModel::new(SyntheticLayout::HybridWide, QuantType::Q4_K, 17);
    let mut scorer = open(fast(2), &model, None);
    let tokens = prompt(900, 18);
    let all = ScoreSettings {
        sparsity: BlockSparsity {
            alpha: f32::MIN_POSITIVE,
            ..BlockSparsity::DENSE
        },
        ..ScoreSettings::default()
    };
    let whole = score(&mut *scorer, &tokens, &dense());
    assert_eq!(score(&mut *scorer, &tokens, &all), whole);
}

#[test]
fn scores_do_not_depend_on_threads_or_earlier_calls() {
    let model = SyntheticModel::new(SyntheticLayout::HybridTiled, QuantType::Q4_K, 19);
    let tokens = prompt(1111, 20);
    let settings = ScoreSettings::default();
    let mut one = open(fast(1), &model, None);
    let expected = score(&mut *one, &tokens, &settings);
    assert_eq!(expected.len(), 1111_usize.div_ceil(settings.chunk));
    assert!(expected.iter().all(|score| (0.0..=1.0).contains(score)));
    let mut many = open(fast(5), &model, None);
    score(&mut *many, &tokens[..500], &settings);
    assert_eq!(score(&mut *many, &tokens, &settings), expected);
}

#[test]
fn progress_rises_to_its_total_and_can_stop_the_work() {
    let model = SyntheticModel::new(SyntheticLayout::HybridEven, QuantType::Q8_0, 21);
    let mut scorer = open(fast(2), &model, None);
    let tokens = prompt(700, 22);
    let mut seen = Vec::new();
    let scores = scorer.score(&tokens, &ScoreSettings::default(), &mut |at| {
        seen.push(at);
        ControlFlow::Continue(())
    });
    assert!(scores.unwrap().is_some());
    assert!(seen.windows(2).all(|two| two[0].done < two[1].done));
    assert_eq!(seen.last().map(|at| at.done), Some(3 * 700));
    assert!(seen.iter().all(|at| at.total == 3 * 700));
    let mut calls = 0;
    let stopped = scorer.score(&tokens, &ScoreSettings::default(), &mut |_| {
        calls += 1;
        ControlFlow::Break(())
    });
    assert_eq!(stopped.unwrap(), None);
    assert_eq!(calls, 1);
}

#[test]
fn calls_out_of_range_are_refused_with_the_reason() {
    let model = SyntheticModel::new(SyntheticLayout::HybridEven, QuantType::Q8_0, 23);
    let mut scorer = open(fast(1), &model, None);
    let mut refused = |tokens: &[TokenId], settings: ScoreSettings| {
        let result = scorer.score(tokens, &settings, &mut |_| ControlFlow::Continue(()));
        matches!(result, Err(DeviceError::InvalidCall { call: "score", .. }))
    };
    let usual = ScoreSettings::default;
    assert!(refused(&prompt(7, 1), usual()));
    assert!(refused(&prompt(8193, 1), usual()));
    assert!(refused(&[TokenId(263); 9], usual()));
    for settings in [
        ScoreSettings {
            tail_tokens: 0,
            ..usual()
        },
        ScoreSettings {
            chunk: 0,
            ..usual()
        },
        ScoreSettings {
            smoothing: 4,
            ..usual()
        },
        ScoreSettings {
            scored_layers: Some(0),
            ..usual()
        },
        ScoreSettings {
            sparsity: BlockSparsity {
                alpha: 1.5,
                ..BlockSparsity::DENSE
            },
            ..usual()
        },
    ] {
        assert!(refused(&prompt(64, 1), settings), "{settings:?}");
    }
    assert!(!refused(&prompt(8, 1), usual()));
}
