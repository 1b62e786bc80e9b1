//! Mixtures of experts: what a file's keys and tensors become, and what is refused by name.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod rewrite;

use contract::{ExpertGateUp, MoeSpec, QuantType};
use gguf::{Array, Value};
use model::synth::SynthSpec;
use model::{LoadedModel, ModelError};
use rewrite::{check_refused, rewritten_from, rewritten_with};

/// 16 experts of 256 channels, 4 per row, and a shared one; four layers.
const HYBRID: &str = "tiny-hybrid-moe:q8_0";
/// The same experts without a shared one; two layers.
const DENSE: &str = "tiny-dense-moe:q8_0";

fn with_keys(base: &str, set: &[(&str, Option<Value>)]) -> Result<LoadedModel, ModelError> {
    rewritten_from(base, set, |name| Some(name.to_owned()))
}

fn array(values: &[u32]) -> Option<Value> {
    Some(Value::Array(Array::U32(values.to_vec())))
}

fn experts(loaded: &LoadedModel, layer: usize) -> &MoeSpec {
    loaded.spec.layers[layer].ffn.experts().unwrap()
}

#[test]
fn both_families_load_with_their_parts() {
    for (base, layers, shared) in [(HYBRID, 4, true), (DENSE, 2, false)] {
        let loaded = with_keys(base, &[]).unwrap();
        assert_eq!(loaded.spec.layers.len(), layers);
        for layer in 0..layers {
            let moe = experts(&loaded, layer);
            assert_eq!((moe.n_experts, moe.n_used, moe.width()), (16, 4, 256));
            assert_eq!(moe.weights_scale, 1.0);
            assert_eq!((moe.router.ty, moe.router.rows), (QuantType::F32, 16));
            assert_eq!(moe.shared.is_some(), shared);
            for stack in moe.stacks() {
                assert_eq!((stack.rows(), stack.cols()), (256, 256));
                assert_eq!(16 * stack.expert_bytes(), stack.weight.bytes());
            }
            assert!(matches!(moe.gate_up, ExpertGateUp::Separate { .. }));
        }
        for weight in loaded.spec.weights() {
            assert_eq!(loaded.weights.bytes(weight).unwrap().len(), weight.bytes());
        }
        assert_eq!(loaded.info.ignored, []);
    }
}

#[test]
fn prediction_head_of_a_mixture_has_experts() {
    let loaded = with_keys("tiny-hybrid-moe+mtp:q4_k_m", &[]).unwrap();
    let mtp = loaded.spec.mtp.as_ref().unwrap();
    let moe = mtp.layer.ffn.experts().unwrap();
    assert_eq!(&*moe.router.name, "blk.4.ffn_gate_inp.weight");
    // Some files do not count the head's block.
    let set = [
        ("qwen35moe.block_count", Some(Value::U32(4))),
        ("qwen35moe.expert_used_count", array(&[4, 3, 2, 1])),
    ];
    let loaded = with_keys("tiny-hybrid-moe+mtp:q4_k_m", &set).unwrap();
    let mtp = loaded.spec.mtp.as_ref().unwrap();
    assert_eq!(mtp.layer.ffn.experts().unwrap().n_used, 1);
}

#[test]
fn keys_may_be_arrays_and_widths_may_be_derived() {
    let set = [("qwen3moe.expert_used_count", array(&[3, 16]))];
    let loaded = with_keys(DENSE, &set).unwrap();
    assert_eq!([0, 1].map(|layer| experts(&loaded, layer).n_used), [3, 16]);
    let set = [
        ("qwen3moe.expert_feed_forward_length", None),
        ("qwen3moe.feed_forward_length", Some(Value::U32(4 * 256))),
    ];
    assert_eq!(experts(&with_keys(DENSE, &set).unwrap(), 1).width(), 256);
    // Without a width of its own, the shared expert is as wide as the others.
    let set = [("qwen35moe.expert_shared_feed_forward_length", None)];
    let loaded = with_keys(HYBRID, &set).unwrap();
    let shared = experts(&loaded, 0).shared.as_ref().unwrap();
    assert_eq!(shared.ffn.width(), 256);
}

#[test]
fn weight_scale_of_zero_is_none() {
    for (value, expected) in [(0.0, 1.0), (1.0, 1.0), (2.5, 2.5)] {
        let set = [("qwen3moe.expert_weights_scale", Some(Value::F32(value)))];
        let loaded = with_keys(DENSE, &set).unwrap();
        assert_eq!(experts(&loaded, 0).weights_scale, expected);
    }
    for value in [-1.0, f32::NAN, f32::INFINITY] {
        let set = [("qwen3moe.expert_weights_scale", Some(Value::F32(value)))];
        check_refused(with_keys(DENSE, &set), &["qwen3moe.expert_weights_scale"]);
    }
}

#[test]
fn impossible_counts_are_refused_with_the_key() {
    let cases: [(&str, Option<Value>, &[&str]); 9] = [
        ("expert_count", Some(Value::U32(0)), &["at least 1"]),
        ("expert_count", None, &["missing"]),
        (
            "expert_used_count",
            Some(Value::U32(0)),
            &["0 experts per token in block 0", "1 to 16"],
        ),
        (
            "expert_used_count",
            Some(Value::U32(17)),
            &["17 experts per token", "1 to 16"],
        ),
        (
            "expert_used_count",
            array(&[4, 4, 0, 4]),
            &["0 experts per token in block 2"],
        ),
        (
            "expert_used_count",
            array(&[4, 4]),
            &["2 numbers for 4 blocks"],
        ),
        (
            "expert_feed_forward_length",
            Some(Value::U32(0)),
            &["0 channels in block 0"],
        ),
        ("expert_feed_forward_length", None, &["missing"]),
        (
            "expert_shared_feed_forward_length",
            Some(Value::U32(0)),
            &["0 channels in block 0"],
        ),
    ];
    for (key, value, parts) in cases {
        let key = format!("qwen35moe.{key}");
        let mut parts = parts.to_vec();
        parts.push(&key);
        check_refused(with_keys(HYBRID, &[(&key, value)]), &parts);
    }
    let set = [
        ("qwen3moe.expert_feed_forward_length", None),
        ("qwen3moe.feed_forward_length", Some(Value::U32(1022))),
    ];
    let parts = ["feed_forward_length", "1022 channels cannot be shared by 4"];
    check_refused(with_keys(DENSE, &set), &parts);
}

#[test]
fn router_and_experts_that_disagree_are_refused_by_name() {
    let fewer = [("qwen35moe.expert_count", Some(Value::U32(8)))];
    let parts = [
        "blk.0.ffn_gate_inp.weight",
        "a router of 16 experts",
        "expert_count is 8",
    ];
    check_refused(with_keys(HYBRID, &fewer), &parts);
    let narrower = [(
        "qwen35moe.expert_feed_forward_length",
        Some(Value::U32(128)),
    )];
    let parts = [
        "blk.0.ffn_gate_exps.weight",
        "256 x 256 x 16",
        "256 x 128 x 16 (experts last)",
    ];
    check_refused(with_keys(HYBRID, &narrower), &parts);
    // As many values in another shape: fewer experts, or none.
    for dims in [
        &[256, 512, 8][..],
        &[256, 4096],
        &[256, 256, 8, 2],
        &[256, 256, 4, 4],
    ] {
        for part in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
            let changed = format!("blk.1.{part}.weight");
            let result = rewritten_with(HYBRID, &[], |name, stored| {
                let dims = if name == changed { dims } else { stored };
                Some((name.to_owned(), dims.to_vec()))
            });
            check_refused(
                result,
                &[&changed, "256 x 256 x 16 (experts last) is expected"],
            );
        }
    }
}

#[test]
fn missing_parts_are_refused_by_name() {
    for part in [
        "ffn_gate_inp",
        "ffn_gate_exps",
        "ffn_up_exps",
        "ffn_down_exps",
        "ffn_gate_inp_shexp",
        "ffn_gate_shexp",
        "ffn_up_shexp",
        "ffn_down_shexp",
    ] {
        let dropped = format!("blk.2.{part}.weight");
        let result = rewritten_from(HYBRID, &[], |name| {
            (name != dropped).then(|| name.to_owned())
        });
        check_refused(result, &[&dropped, "missing"]);
    }
}

#[test]
fn parts_that_a_family_lacks_are_refused_by_name() {
    let renamed = |base: &str, from: &str, to: &str| {
        let rename = |name: &str| Some(if name == from { to } else { name }.to_owned());
        rewritten_from(base, &[], rename)
    };
    // Fused beside separate experts: which of them counts?
    let result = renamed(
        HYBRID,
        "blk.0.ffn_down_exps.weight",
        "blk.0.ffn_gate_up_exps.weight",
    );
    check_refused(result, &["blk.0.ffn_gate_exps.weight", "stored beside"]);
    // Qwen3 has no fused experts.
    let result = renamed(
        DENSE,
        "blk.0.ffn_gate_exps.weight",
        "blk.0.ffn_gate_up_exps.weight",
    );
    check_refused(result, &["blk.0.ffn_gate_exps.weight", "missing"]);
    let result = rewritten_from(DENSE, &[], |name| {
        Some(name.replace("blk.1.ffn_gate_inp.weight", "blk.1.ffn_gate.weight"))
    });
    check_refused(result, &["blk.1.ffn_gate_inp.weight", "missing"]);
}

#[test]
fn published_shapes_have_their_sizes() {
    let load = |name: &str| SynthSpec::parse(name).unwrap().load().unwrap();
    let loaded = load("qwen3.5-35b-a3b:q4_k_m");
    let moe = experts(&loaded, 39);
    assert_eq!((moe.n_experts, moe.n_used, moe.width()), (256, 8, 512));
    assert_eq!((loaded.spec.layers.len(), loaded.spec.hidden), (40, 2048));
    let gigabytes = loaded.info.bytes as f64 / 1e9;
    assert!((19.5..22.0).contains(&gigabytes), "{gigabytes}");
    let loaded = load("qwen3-30b-a3b:q4_k_m");
    assert_eq!(experts(&loaded, 47).n_experts, 128);
}
