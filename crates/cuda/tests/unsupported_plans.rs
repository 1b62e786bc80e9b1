//! Configurations and requests beyond the device's limits return errors with a reason. The suite
//! covers invalid calls. Without a GPU every test but those of configurations prints SKIPPED and
//! passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
}

use std::sync::Arc;

use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    AttentionSpec, Backend, Conditioning, DeviceError, DraftLoad, DraftLoadConfig, DraftSpec,
    ExpertGateUp, FeedForward, GateActivation, KvFormat, KvFormats, Limits, LoadConfig, Mixer,
    MoeSpec, QuantType, RopePairs,
};
use cuda::{CudaBackend, GpuInfo, Options, compile};
use model::DraftKind;
use model::synth::{SynthSpec, draft_of};

const LIMITS: Limits = Limits {
    sequences: 2,
    context: 100,
    tree_nodes: 4,
    prefill_chunk: 64,
    pool_tokens: None,
};

fn load_config() -> LoadConfig {
    let synthetic = SyntheticModel::new(SyntheticLayout::HybridTiled, QuantType::Q8_0, 1);
    LoadConfig {
        target: synthetic.spec,
        weights: synthetic.weights,
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: LIMITS,
    }
}

fn options() -> Options {
    Options {
        compile: compile::Options {
            cache: Some(std::env::temp_dir().join("hearth-test-kernels")),
            ..compile::Options::default()
        },
        ..Options::default()
    }
}

/// A GPU that no test opens.
fn rtx_3090() -> GpuInfo {
    GpuInfo {
        ordinal: 0,
        name: "an RTX 3090".to_owned(),
        capability: (8, 6),
        run_as: None,
        sm_count: 82,
        total_bytes: 24 << 30,
    }
}

fn unsupported(config: &LoadConfig, part: &str) {
    let error = CudaBackend::new(rtx_3090()).estimate(config).unwrap_err();
    assert!(matches!(error, DeviceError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn unsupported_plan_is_rejected_by_name_before_loading() {
    let mut wrong = load_config();
    wrong.limits.sequences = 0;
    unsupported(&wrong, "a limit of 0");
    let mut wrong = load_config();
    wrong.limits.tree_nodes = 65;
    unsupported(&wrong, "use at most 64");
}

#[test]
fn parts_without_kernels_are_rejected_by_name() {
    let refused = |change: &dyn Fn(&mut AttentionSpec), part: &str| {
        let mut config = load_config();
        let spec = Arc::make_mut(&mut config.target);
        let attention = spec
            .layers
            .iter_mut()
            .find_map(|layer| match &mut layer.mixer {
                Mixer::Attention(a) => Some(a),
                Mixer::GatedDelta(_) => None,
            });
        change(attention.unwrap());
        unsupported(&config, part);
        unsupported(&config, "--device cpu");
    };
    let norm = load_config().target.final_norm.clone();
    refused(&|a| a.window = Some(63), "fewer than 64 tokens");
    refused(&|a| a.biases.o = Some(norm.clone()), "output projection");
    let mut config = load_config();
    let spec = Arc::make_mut(&mut config.target);
    for layer in &mut spec.layers {
        if let Mixer::Attention(a) = &mut layer.mixer {
            a.window = Some(512);
        }
    }
    let windows = Options {
        windows: true,
        ..options()
    };
    let backend = CudaBackend::with_options(rtx_3090(), windows);
    let error = backend.estimate(&config).unwrap_err().to_string();
    assert!(error.contains("remove --attention-window"), "{error}");
}

#[test]
fn experts_that_are_no_whole_row_blocks_are_rejected_by_name() {
    let synthetic = SyntheticModel::new(SyntheticLayout::HybridExperts, QuantType::Q8_0, 1);
    let refused = |change: &dyn Fn(&mut MoeSpec), variant: &str, part: &str| {
        let mut config = load_config();
        config.target = synthetic.spec.clone();
        config.weights = synthetic.weights.clone();
        let backend = CudaBackend::new(rtx_3090());
        backend.estimate(&config).unwrap();
        let FeedForward::Experts(experts) = &mut Arc::make_mut(&mut config.target).layers[0].ffn
        else {
            panic!("the model has experts")
        };
        change(experts);
        let error = backend.estimate(&config).unwrap_err();
        assert!(format!("{error:?}").starts_with(variant), "{error:?}");
        assert!(error.to_string().contains(part), "{error}");
    };
    let narrow = |spec: &mut MoeSpec| {
        let n = spec.n_experts;
        let ExpertGateUp::Fused(gate_up) = &mut spec.gate_up else {
            panic!("gate and up are fused")
        };
        gate_up.weight.rows = n * 2 * 96;
        spec.down.weight.cols = 96;
    };
    refused(&narrow, "Unsupported", "96 channels");
    refused(&|spec| spec.n_used = 0, "Weight", "0 of 8 experts");
    refused(&|spec| spec.down.n_experts = 7, "Weight", "7 experts");
    refused(&|spec| spec.router.rows = 9, "Weight", "[9, 256] found");
}

#[test]
fn drafts_without_kernels_are_rejected_by_name() {
    let target = SynthSpec::parse("tiny-hybrid:q8_0")
        .unwrap()
        .load()
        .unwrap();
    let refused = |kind: DraftKind, change: &dyn Fn(&mut DraftSpec)| {
        let mut draft = draft_of(&target, kind, QuantType::Q8_0, 1);
        change(Arc::make_mut(&mut draft.spec));
        let config = LoadConfig {
            target: target.spec.clone(),
            weights: target.weights.clone(),
            draft: Some(DraftLoadConfig {
                spec: draft.spec,
                weights: draft.weights,
                kv: KvFormat::F16,
                load: DraftLoad::AtOpen,
            }),
            ..load_config()
        };
        CudaBackend::new(rtx_3090()).estimate(&config).unwrap_err()
    };
    let (pairs, markov) = (DraftKind::Dflash2, DraftKind::Dspark);
    let gelu = refused(pairs, &|spec| {
        spec.layers[1].ffn.activation = GateActivation::GeluTanh;
    });
    let wide = refused(pairs, &|spec| {
        let Conditioning::Pairwise(selector) = &mut spec.conditioning else {
            panic!("the draft has a selector")
        };
        selector.top_k = 65;
    });
    let turned = refused(markov, &|spec| {
        spec.layers[0].attention.rope.pairs = RopePairs::Adjacent;
    });
    for (error, part) in [
        (gelu, "a draft with GELU"),
        (wide, "selects from 65 candidates"),
        (turned, "a rotary embedding of another kind"),
    ] {
        assert!(matches!(error, DeviceError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    // Shapes are checked by the names of their weights.
    for (kind, weight) in [(pairs, "draft.successor"), (markov, "draft.next")] {
        let error = refused(kind, &|spec| match &mut spec.conditioning {
            Conditioning::Pairwise(selector) => selector.successor.rows -= 1,
            Conditioning::Markov(markov) => markov.next.rows -= 1,
            Conditioning::Independent => panic!("candidates depend on the token before"),
        });
        assert!(error.to_string().contains(weight), "{error}");
    }
    let error = refused(pairs, &|spec| {
        let conv = spec.layers[0].ffn_conv.as_mut();
        conv.expect("the draft has convolutions").base.rows = 3;
    });
    assert!(
        error.to_string().contains("draft.0.ffn_conv_base"),
        "{error}"
    );
}

#[test]
fn oversized_plan_error_names_the_context_that_fits() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let limited = Options {
        vram_limit: Some(1 << 30),
        ..options()
    };
    let backend = CudaBackend::with_options(gpu.info().clone(), limited);
    let mut long = load_config();
    long.limits.context = 1 << 20;
    let error = backend.open(long.clone(), &mut |_| {}).map(|_| ());
    let text = error.unwrap_err().to_string();
    assert!(text.contains("1073741824 that may be used"), "{text}");
    let fits = text.split("a context of ").last().unwrap();
    let fits: usize = fits.split(' ').next().unwrap().parse().unwrap();
    long.limits.context = fits;
    let runner = backend.open(long.clone(), &mut |_| {}).unwrap();
    assert_eq!(runner.info().memory, backend.estimate(&long).unwrap());
    let memory = &runner.info().memory;
    assert!(memory.total_bytes() <= 1 << 30);
    assert!(memory.driver_bytes > 0 && memory.pinned_bytes > 0);
    long.limits.context = fits + 512;
    assert!(backend.open(long, &mut |_| {}).is_err());
}
