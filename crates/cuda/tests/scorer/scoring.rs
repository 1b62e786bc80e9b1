//! The scorer on the GPU against the scorer on the CPU.

use std::ops::ControlFlow;

use conformance::scoring::{dense, open, prompt, score, sparse};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{BlockSparsity, DeviceError, LayerSpec, Mixer, QuantType, ScoreSettings};

use cpu::{CpuBackend, CpuOptions};

use crate::fixtures::model::{cpu_reference, open_device};

/// Models of f32 matrices have f32 activations, keys and values on both devices.
const TOLERANCE: f64 = 1e-3;
/// Of the mean over chunks, where the GPU rounds activations, keys and values to f16.
const HALF_TOLERANCE: f64 = 2e-2;

/// The largest and the mean relative difference.
fn apart(found: &[f32], expected: &[f32]) -> (f64, f64) {
    assert_eq!(found.len(), expected.len());
    let off = found.iter().zip(expected).map(|(found, expected)| {
        let (found, expected) = (f64::from(*found), f64::from(*expected));
        let off = (found - expected).abs() / expected.max(1e-9);
        if off.is_nan() { f64::INFINITY } else { off }
    });
    let all: Vec<f64> = off.collect();
    let worst = all.iter().copied().fold(0.0, f64::max);
    (worst, all.iter().sum::<f64>() / all.len() as f64)
}

#[test]
fn scores_match_the_cpu_reference() {
    let Some(gpu) = open_device(false) else {
        return;
    };
    // On the CPU the fast path and the reference agree where matrices are f32.
    let processor = CpuBackend::new(CpuOptions::default());
    let late = ScoreSettings {
        tail_tokens: 21,
        rotated_tail: true,
        scored_layers: Some(1),
        smoothing: 1,
        chunk: 32,
        ..dense()
    };
    // Partial last blocks and chunks; the longest begins a second chunk of rows.
    for layout in SyntheticLayout::ALL {
        let model = SyntheticModel::new(layout, QuantType::F32, 3);
        let mut found = open(&gpu.backend, &model, None);
        let mut expected = open(&processor, &model, None);
        assert_eq!(found.info().exit_layer, expected.info().exit_layer);
        let mut cases = vec![(600, dense()), (8, dense()), (515, late), (1500, sparse())];
        if layout == SyntheticLayout::HybridTiled {
            cases.push((4300, ScoreSettings::default()));
        }
        for (n, settings) in cases {
            let tokens = prompt(n, 5);
            let settings = &settings;
            let (worst, _) = apart(
                &score(&mut *found, &tokens, settings),
                &score(&mut *expected, &tokens, settings),
            );
            let name = &model.spec.name;
            assert!(worst < TOLERANCE, "{name}, {n} tokens: off by {worst}");
        }
    }
    for (layout, ty) in [
        (SyntheticLayout::HybridWide, QuantType::Q8_0),
        (SyntheticLayout::HybridGrouped, QuantType::Q4_K),
        (SyntheticLayout::Dense, QuantType::F16),
    ] {
        let model = SyntheticModel::new(layout, ty, 4);
        let (mut found, mut expected) = (
            open(&gpu.backend, &model, None),
            open(&cpu_reference(), &model, None),
        );
        let tokens = prompt(700, 6);
        let (_, mean) = apart(
            &score(&mut *found, &tokens, &dense()),
            &score(&mut *expected, &tokens, &dense()),
        );
        let name = &model.spec.name;
        assert!(mean < HALF_TOLERANCE, "{name}: off by {mean} on average");
    }
}

#[test]
fn an_alpha_that_keeps_every_block_equals_dense_bit_for_bit() {
    let Some(gpu) = open_device(false) else {
        return;
    };
    for ty in [QuantType::F32, QuantType::Q4_K] {
        let model = SyntheticModel::new(SyntheticLayout::HybridWide, ty, 17);
        let mut scorer = open(&gpu.backend, &model, None);
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
        assert_ne!(
            score(&mut *scorer, &tokens, &sparse()),
            whole,
            "no block was dropped"
        );
    }
}

#[test]
fn scores_do_not_depend_on_earlier_calls_and_cancelled_calls_leave_nothing() {
    let Some(gpu) = open_device(false) else {
        return;
    };
    let model = SyntheticModel::new(SyntheticLayout::HybridTiled, QuantType::Q4_K, 19);
    let mut scorer = open(&gpu.backend, &model, None);
    let (tokens, settings) = (prompt(4200, 20), ScoreSettings::default());
    let mut seen = Vec::new();
    let expected = scorer.score(&tokens, &settings, &mut |at| {
        seen.push(at);
        ControlFlow::Continue(())
    });
    let expected = expected.unwrap().unwrap();
    assert!(expected.iter().all(|score| (0.0..=1.0).contains(score)));
    // Layers above the last attention layer are not computed.
    let is_attention = |layer: &LayerSpec| matches!(layer.mixer, Mixer::Attention(_));
    let exit = model.spec.layers.iter().rposition(is_attention).unwrap();
    let total = (exit + 1) * tokens.len();
    assert!(seen.windows(2).all(|two| two[0].done < two[1].done));
    assert!(seen.iter().all(|at| at.total == total));
    assert_eq!(seen.last().map(|at| at.done), Some(total));
    score(&mut *scorer, &tokens[..500], &sparse());
    let stopped = scorer.score(&tokens, &settings, &mut |_| ControlFlow::Break(()));
    assert_eq!(stopped.unwrap(), None);
    assert_eq!(score(&mut *scorer, &tokens, &settings), expected);
    let beyond = ScoreSettings {
        tail_tokens: 33,
        ..settings
    };
    let refused = scorer.score(&tokens, &beyond, &mut |_| ControlFlow::Continue(()));
    assert!(matches!(
        refused,
        Err(DeviceError::InvalidCall { call: "score", .. })
    ));
}
