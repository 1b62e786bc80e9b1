//! Errors of a runner whose capacity is exceeded: each states its reason. The suite tests calls
//! that break the protocol.

#![expect(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::path::Path;
use std::sync::Arc;

use contract::{
    Backend, DeviceError, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, QuantType,
    Runner, TokenId, WeightError, WeightRef, WeightSource,
};
use cpu::{CpuBackend, CpuOptions};

const LIMITS: Limits = Limits {
    sequences: 2,
    context: 100,
    tree_nodes: 4,
    prefill_chunk: 64,
    pool_tokens: None,
};

fn load_config() -> LoadConfig {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/fixtures/models");
    let loaded = model::load(&folder.join("hybrid_r3_q4_k_m.gguf")).unwrap();
    LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: LIMITS,
    }
}

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions::default())
}

fn open(config: LoadConfig) -> Box<dyn Runner> {
    backend().open(config, &mut |_| {}).unwrap()
}

#[test]
fn capacity_excludes_pages_of_open_sequences() {
    let mut config = load_config();
    // Two pages for each of two sequences; the pool has three.
    (config.limits.context, config.limits.pool_tokens) = (300, Some(600));
    let mut runner = open(config);
    let room = |runner: &dyn Runner| (runner.capacity().sequences, runner.capacity().tokens);
    assert_eq!(room(&*runner), (2, 768));
    let long = runner.open(301).unwrap_err();
    let refused = matches!(
        long,
        DeviceError::OutOfMemory {
            wanted: 301,
            free: 300,
            ..
        }
    );
    assert!(refused, "{long}");
    let (first, second) = (runner.open(300).unwrap(), runner.open(200).unwrap());
    // No pages are reserved.
    assert_eq!(room(&*runner), (0, 768));
    let third = runner.open(1).unwrap_err();
    let refused = matches!(
        third,
        DeviceError::OutOfMemory {
            what: "sequences",
            ..
        }
    );
    assert!(refused, "{third}");
    let tokens = vec![TokenId(1); 300];
    let read = |runner: &mut dyn Runner, seq, n: usize| {
        tokens[..n]
            .chunks(64)
            .try_for_each(|chunk| runner.prefill(seq, chunk, &[]).map(|_| ()))
    };
    read(&mut *runner, first, 256).unwrap();
    assert_eq!(room(&*runner), (0, 512));
    read(&mut *runner, second, 1).unwrap();
    assert_eq!(room(&*runner), (0, 256));
    runner.close(first);
    assert_eq!(room(&*runner), (1, 512));
}

#[test]
fn cache_formats_are_supported_for_sufficient_head_sizes() {
    let head_dim = load_config()
        .target
        .attention_layers()
        .next()
        .unwrap()
        .head_dim;
    for format in KvFormat::ALL {
        let mut config = load_config();
        config.kv.v = format;
        match backend().estimate(&config) {
            Ok(_) => assert!(format != KvFormat::Tq3_0 || head_dim.is_multiple_of(128)),
            Err(error) => {
                let named = error.to_string().contains(format.name());
                assert!(named && !head_dim.is_multiple_of(128), "{error}");
            }
        }
    }
}

#[test]
fn oversized_plans_are_refused_before_loading() {
    for context in [1 << 40, usize::MAX] {
        let mut config = load_config();
        config.limits.context = context;
        let opened = backend().open(config, &mut |_| panic!("loading began"));
        check_memory(opened.err().unwrap());
    }
}

fn check_memory(error: DeviceError) {
    assert!(
        matches!(
            error,
            DeviceError::OutOfMemory {
                what: "memory bytes",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn weights_of_wrong_shape_are_named() {
    let mut config = load_config();
    let mut spec = (*config.target).clone();
    spec.final_norm.cols = 255;
    config.target = Arc::new(spec);
    let error = backend().estimate(&config).unwrap_err().to_string();
    assert!(
        error.contains("output_norm.weight") && error.contains("255"),
        "{error}"
    );
}

/// Returns NaN for every f32 weight.
struct Poisoned(Arc<dyn WeightSource>, Vec<u8>);

impl WeightSource for Poisoned {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        match weight.ty {
            QuantType::F32 => Ok(&self.1[..weight.bytes()]),
            _ => self.0.bytes(weight),
        }
    }
}

#[test]
fn models_that_compute_nan_cause_no_panic() {
    let mut config = load_config();
    let nan = f32::NAN.to_le_bytes().repeat(1 << 16);
    config.weights = Arc::new(Poisoned(Arc::clone(&config.weights), nan));
    let mut runner = open(config);
    let seq = runner.open(100).unwrap();
    let requests = [(0, LogitsRequest::full()), (69, LogitsRequest::top_k(3))];
    let rows = runner.prefill(seq, &[TokenId(3); 70], &requests).unwrap();
    assert!(rows[0].raw.iter().all(|x| *x == f32::NEG_INFINITY));
    assert_eq!(rows[1].ids, [TokenId(0), TokenId(1), TokenId(2)]);
    assert_eq!(rows[1].lse, f32::NEG_INFINITY);
}
