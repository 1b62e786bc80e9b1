//! The CPU against an independent implementation in f32 on the same dequantized weights: logits,
//! the residual stream after each layer, the states of layer 0, and a greedy continuation.

#![expect(
    clippy::unwrap_used,
    reason = "an unreadable fixture and a wrong value fail the test"
)]

use conformance::compare::Tolerance;
use conformance::golden::{Golden, GoldenArray};
use contract::{Backend, KvFormat, KvFormats, Limits, LoadConfig};
use cpu::{CpuBackend, CpuOptions, InspectedRunner};

const REFERENCE: CpuOptions = CpuOptions {
    reference: true,
    threads: Some(2),
};
const FAST: CpuOptions = CpuOptions {
    reference: false,
    threads: Some(2),
};
/// Only the order of sums differs.
const CLOSE: Tolerance = Tolerance {
    absolute: 1e-4,
    relative: 0.0,
};

fn load_config(golden: &Golden, options: CpuOptions) -> LoadConfig {
    // Half precision in the cache alone costs the reference 1e-3.
    let format = if options.reference {
        KvFormat::F32
    } else {
        KvFormat::F16
    };
    let kv = KvFormats {
        k: format,
        v: format,
    };
    let limits = Limits {
        sequences: 2,
        context: 256,
        tree_nodes: 8,
        prefill_chunk: 256,
        pool_tokens: None,
    };
    golden.load_config(kv, limits).unwrap()
}

fn open(golden: &Golden, options: CpuOptions) -> Box<dyn InspectedRunner> {
    CpuBackend::new(options)
        .open_inspected(load_config(golden, options), &mut |_| {})
        .unwrap()
}

#[test]
fn reference_logits_match_the_golden_files() {
    for golden in Golden::all().unwrap() {
        golden
            .check_logits(&mut *open(&golden, REFERENCE), CLOSE)
            .unwrap();
    }
}

#[test]
fn fast_path_logits_stay_within_eight_bit_activation_error() {
    let far = Tolerance {
        absolute: 1.0,
        relative: 0.0,
    };
    for golden in Golden::all().unwrap() {
        // Where experts are level, 8-bit activations may choose others than f32 does.
        let least_gap = 0.1;
        let kept = golden.router_gaps.iter().filter(|gap| **gap >= least_gap);
        assert!(
            3 * kept.count() >= golden.router_gaps.len(),
            "few rows are compared"
        );
        let found = golden
            .check_logits_beyond(least_gap, &mut *open(&golden, FAST), far)
            .unwrap();
        assert!(found.mean < 0.06, "{}: {}", golden.stem, found.mean);
    }
}

#[test]
fn reference_layers_match_the_golden_files() {
    for golden in Golden::all().unwrap() {
        let layers = open(&golden, REFERENCE).hidden_states(&golden.ids).unwrap();
        golden.check_hidden(&layers, CLOSE).unwrap();
    }
}

#[test]
fn delta_state_and_window_match_the_golden_files() {
    for golden in Golden::all().unwrap() {
        if golden.recurrent_layers.contains(&0) {
            let mut runner = open(&golden, REFERENCE);
            let seq = runner.open(golden.ids.len()).unwrap();
            runner.prefill(seq, &golden.ids, &[]).unwrap();
            let state = runner.delta_state(seq, 0).unwrap();
            golden
                .check_state(GoldenArray::Delta, &state, CLOSE)
                .unwrap();
            let window = runner.conv_window(seq, 0).unwrap();
            golden
                .check_state(GoldenArray::Conv, &window, CLOSE)
                .unwrap();
        }
    }
}

#[test]
fn reference_greedy_decoding_matches_the_golden_files() {
    for golden in Golden::all().unwrap() {
        let compared = golden
            .check_greedy(&mut *open(&golden, REFERENCE), CLOSE.absolute)
            .unwrap();
        assert!(
            compared + 2 >= golden.greedy_ids.len(),
            "{compared} compared"
        );
    }
}

#[test]
fn memory_matches_the_estimate_and_loading_reports_progress() {
    for golden in Golden::all().unwrap() {
        for options in [FAST, REFERENCE] {
            let config = load_config(&golden, options);
            let backend = CpuBackend::new(options);
            let estimate = backend.estimate(&config).unwrap();
            let mut last = None;
            let runner = backend.open(config, &mut |p| last = Some(p)).unwrap();
            assert_eq!(runner.info().memory, estimate, "{}", golden.stem);
            let last = last.unwrap();
            assert_eq!(last.done_bytes, last.total_bytes);
        }
    }
}
