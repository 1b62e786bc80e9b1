//! Drafts in all four file_formats: read alike, every trap of theirs stepped over, and what does
//! not fit refused with words that say which side is wrong.
#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod damage;
mod export;
mod later_kinds;

use std::sync::Arc;

use contract::{BlockMask, DraftSpec, TokenId};
use export::{DraftFileFormat, Export, LAYERS, TAPS, WINDOW, target};
use gguf::{Array, FileBytes, Value};
use model::{DraftOptions, ModelError};
use serde_json::json;

fn check_refused(export: &Export, parts: &[&str]) {
    let message = match export.load() {
        Ok(_) => panic!("{:?} was taken, {parts:?} expected", export.file_format),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(
            message.contains(part),
            "{:?}: no '{part}' in: {message}",
            export.file_format
        );
    }
}

fn windows(spec: &DraftSpec) -> Vec<(usize, BlockMask)> {
    spec.layers
        .iter()
        .map(|layer| (layer.window, layer.block_mask))
        .collect()
}

fn capture_layers() -> Vec<usize> {
    TAPS.map(|tap| tap as usize).to_vec()
}

const FULL: (usize, BlockMask) = (DraftSpec::DEFAULT_WINDOW, BlockMask::Full);
const SLIDING: (usize, BlockMask) = (WINDOW as usize, BlockMask::Causal);

#[test]
fn all_four_file_formats_load_the_same_draft() {
    for file_format in DraftFileFormat::ALL {
        let draft = Export::new(file_format).load().unwrap();
        let spec = &draft.spec;
        assert_eq!(
            (spec.hidden, spec.block, spec.mask_token),
            (256, 16, TokenId(1023))
        );
        assert_eq!(spec.capture_layers, capture_layers(), "{file_format:?}");
        assert_eq!(windows(spec), [FULL; LAYERS], "{file_format:?}");
        assert_eq!(spec.depth(), 15);
        for layer in &spec.layers {
            let a = &layer.attention;
            assert_eq!((a.n_heads, a.n_kv_heads, a.head_dim), (4, 2, 128));
            assert_eq!((a.rope.dims, a.rope.theta), (128, 1e7));
        }
        // The same tensor under every name.
        let gate = spec.layers[1].ffn.gate.clone();
        let expected = Export::new(DraftFileFormat::B).load().unwrap();
        let other = &expected.spec.layers[1].ffn.gate;
        assert_eq!(
            draft.weights.bytes(&gate).unwrap(),
            expected.weights.bytes(other).unwrap()
        );
    }
}

#[test]
fn sliding_layers_have_windows_and_are_causal_in_the_block() {
    for file_format in [
        DraftFileFormat::B,
        DraftFileFormat::C,
        DraftFileFormat::Safetensors,
    ] {
        let spec = Export::new(file_format).sliding().load().unwrap().spec;
        assert_eq!(windows(&spec), [SLIDING, SLIDING, FULL], "{file_format:?}");
        assert_eq!(spec.window(), DraftSpec::DEFAULT_WINDOW);
    }
}

#[test]
fn causal_flag_of_the_file_is_used() {
    let causal = |flag| {
        Export::new(DraftFileFormat::C)
            .sliding()
            .key("{a}.attention.causal", Some(Value::Bool(flag)))
    };
    let masks = |export: Export| -> Vec<BlockMask> {
        let spec = export.load().unwrap().spec;
        spec.layers.iter().map(|layer| layer.block_mask).collect()
    };
    assert_eq!(masks(causal(true)), [BlockMask::Causal; LAYERS]);
    assert_eq!(masks(causal(false)), [BlockMask::Full; LAYERS]);
    let hf = Export::new(DraftFileFormat::Safetensors).sliding();
    assert_eq!(
        masks(hf.clone().field("is_causal", json!(false))),
        [BlockMask::Full; LAYERS]
    );
    let nested = hf.field("dflash_config/causal", json!(true));
    assert_eq!(masks(nested), [BlockMask::Causal; LAYERS]);
}

#[test]
fn missing_windows_can_be_given_for_every_file_format() {
    for file_format in DraftFileFormat::ALL {
        let plain = Export::new(file_format).load().unwrap().spec;
        let options = DraftOptions {
            window: Some(WINDOW as usize),
            ..DraftOptions::default()
        };
        let spec = Export::new(file_format).load_with(options).unwrap().spec;
        assert_eq!(windows(&spec), [SLIDING, SLIDING, FULL], "{file_format:?}");
        assert_ne!(spec.hash, plain.hash, "snapshots of the two must not match");
    }
}

#[test]
fn format_a_uses_the_targets_rope_base() {
    let wrong = Some(Value::F32(1e6));
    for (file_format, theta) in [
        (DraftFileFormat::A, 1e7),
        (DraftFileFormat::B, 1e6),
        (DraftFileFormat::C, 1e6),
    ] {
        let export = Export::new(file_format).key("{a}.rope.freq_base", wrong.clone());
        let spec = export.load().unwrap().spec;
        assert_eq!(
            spec.layers[0].attention.rope.theta, theta,
            "{file_format:?}"
        );
    }
    let nested = Export::new(DraftFileFormat::Safetensors)
        .field("rope_theta", json!(null))
        .field(
            "rope_parameters",
            json!({"rope_theta": 5e6, "rope_type": "default"}),
        );
    assert_eq!(
        nested.load().unwrap().spec.layers[0].attention.rope.theta,
        5e6
    );
}

#[test]
fn block_size_mask_and_capture_layers_come_from_the_file() {
    let eight = Some(Value::U32(8));
    let a = Export::new(DraftFileFormat::A).key("{a}.dflash.block_size", eight.clone());
    assert_eq!(a.load().unwrap().spec.depth(), 7);
    let c = Export::new(DraftFileFormat::C).key("{a}.block_size", eight);
    assert_eq!(c.load().unwrap().spec.depth(), 7);
    let nested = Export::new(DraftFileFormat::Safetensors)
        .field("block_size", json!(null))
        .field("dflash_config/block_size", json!(4));
    assert_eq!(nested.load().unwrap().spec.depth(), 3);
    // Without a list the layers are spread evenly, of four: 1, 1, 1 — which cannot be.
    check_refused(
        &Export::new(DraftFileFormat::A).key("{a}.dflash.target_layer_ids", None),
        &["not ascending"],
    );
}

#[test]
fn alternative_tensor_names_are_known() {
    let export = Export::new(DraftFileFormat::B)
        .rename("dflash.fc.weight", Some("dflash_fc.weight"))
        .rename(
            "dflash.hidden_norm.weight",
            Some("dflash_hidden_norm.weight"),
        )
        .rename(
            "blk.0.ffn_norm.weight",
            Some("blk.0.post_attention_norm.weight"),
        );
    assert!(export.load().is_ok());
}

#[test]
fn copies_of_shared_tensors_are_ignored_and_other_heads_refused() {
    let copy = Export::new(DraftFileFormat::C).add("token_embd.weight", 1024, 256);
    assert!(copy.load().is_ok());
    let own = Export::new(DraftFileFormat::C).add("output.weight", 512, 256);
    check_refused(&own, &["output.weight", "borrows the target's"]);
}

#[test]
fn drafts_of_another_target_are_refused_with_both_sizes() {
    let u = |n| Some(Value::U32(n));
    let ids = |ids: &[i32]| Some(Value::Array(Array::I32(ids.to_vec())));
    for (file_format, taps_key, beyond) in [
        (DraftFileFormat::A, "{a}.dflash.target_layer_ids", 4),
        (DraftFileFormat::B, "{a}.dflash.target_layer_ids", 4),
        (DraftFileFormat::C, "{a}.target_layers", 5),
    ] {
        let export = Export::new(file_format);
        check_refused(
            &export.clone().key(taps_key, ids(&[1, 2, beyond])),
            &["target layer 4", "has 4", "draft.gguf"],
        );
        check_refused(
            &export.clone().key(taps_key, ids(&[1, 2])),
            &["names 2 target layers", "room for 3"],
        );
        check_refused(
            &export.clone().key(taps_key, ids(&[2, 1, 3])),
            &["not ascending"],
        );
        check_refused(&export.key(taps_key, ids(&[-1, 1, 2])), &["target_layer"]);
    }
    // An entry that names the embedding's output names no layer.
    check_refused(
        &Export::new(DraftFileFormat::C).key("{a}.target_layers", ids(&[0, 1, 2])),
        &["0 names no layer"],
    );
    for key in ["{a}.dflash.mask_token_id", "tokenizer.ggml.mask_token_id"] {
        let file_format = if key.starts_with('t') {
            DraftFileFormat::C
        } else {
            DraftFileFormat::B
        };
        check_refused(
            &Export::new(file_format).key(key, u(1024)),
            &["mask is token 1024", "1024"],
        );
        check_refused(
            &Export::new(file_format).key(key, None),
            &["mask_token_id", "missing"],
        );
    }
    check_refused(
        &Export::new(DraftFileFormat::B).key("{a}.vocab_size", u(248_320)),
        &["248320 tokens", "1024"],
    );
    let hf = Export::new(DraftFileFormat::Safetensors);
    check_refused(
        &hf.clone().field("num_target_layers", json!(64)),
        &["64 layers", "has 4"],
    );
    check_refused(&hf.clone().field("vocab_size", json!(7)), &["7 tokens"]);
    check_refused(
        &hf.field("dflash_config/mask_token_id", json!(5000)),
        &["token 5000"],
    );
    let error = Export::new(DraftFileFormat::B)
        .key("{a}.vocab_size", u(7))
        .load()
        .err()
        .unwrap();
    assert!(matches!(error, ModelError::DraftMismatch { .. }), "{error}");
}

#[test]
fn missing_unknown_and_misshapen_tensors_are_named() {
    for file_format in DraftFileFormat::GGUF {
        let export = Export::new(file_format);
        check_refused(
            &export.clone().rename("blk.1.attn_k.weight", None),
            &["blk.1.attn_k.weight", "missing"],
        );
        check_refused(
            &export.clone().add("blk.9.attn_q.weight", 4, 256),
            &["blk.9.attn_q.weight", "not known"],
        );
        check_refused(
            &export.clone().add("blk.0.attn_q.bias", 1, 512),
            &["blk.0.attn_q.bias"],
        );
        check_refused(
            &export.clone().rename("blk.2.ffn_up.weight", None).add(
                "blk.2.ffn_up.weight",
                256,
                256,
            ),
            &["blk.2.ffn_up.weight", "256 x 256", "256 x 512"],
        );
        check_refused(
            &export
                .clone()
                .key("{a}.attention.head_count", Some(Value::U32(8))),
            &["attn_q.weight", "8 heads"],
        );
        check_refused(
            &export.key("{a}.block_count", Some(Value::U32(4))),
            &["blk.3.", "missing"],
        );
    }
    let hf = Export::new(DraftFileFormat::Safetensors);
    check_refused(
        &hf.clone().rename("fc.weight", None),
        &["fc.weight", "missing"],
    );
    check_refused(
        &hf.field("layer_types", json!(["full_attention"])),
        &["layer_types"],
    );
}

#[test]
fn promised_kinds_and_unsupported_ones_are_named() {
    let b = || Export::new(DraftFileFormat::B);
    let c = || Export::new(DraftFileFormat::C);
    // A tensor, a key or a title makes the kind, and the kind needs all of its tensors.
    check_refused(
        &c().add("blk.0.attn_conv_base", 4, 256),
        &["blk.0.attn_conv_proj.weight", "missing"],
    );
    check_refused(
        &c().key("{a}.selector_rank", Some(Value::U32(256))),
        &["blk.0.attn_conv_base", "missing"],
    );
    check_refused(
        &b().add("markov_w2.weight", 1024, 8),
        &["markov_w1.weight", "missing"],
    );
    let hf = || Export::new(DraftFileFormat::Safetensors);
    check_refused(
        &hf().field("architectures", json!(["DFlash2DraftModel"])),
        &["layers.0.attention_conv.base_kernel", "missing"],
    );
    check_refused(
        &hf().field("architectures", json!(["DSparkDraftModel"])),
        &["markov_head.markov_w1.weight", "missing"],
    );
    check_refused(
        &c().add("markov_w1.weight", 1024, 8)
            .add("selector_hidden.weight", 8, 256),
        &["both a pairwise selector and a Markov head"],
    );
    check_refused(
        &hf().field("dflash_config/attention_sink_bias", json!(true)),
        &["gated attention"],
    );
    assert!(
        hf().field("dflash_config/attention_sink_bias", json!(false))
            .load()
            .is_ok()
    );
    check_refused(
        &hf().field("rope_scaling", json!({"rope_type": "yarn", "factor": 64.0})),
        &["rope_scaling", "yarn"],
    );
    check_refused(
        &c().key("{a}.rope.scaling.type", Some("yarn".into())),
        &["yarn"],
    );
}

#[test]
fn blocks_can_be_widened_to_twice_the_trained_rows() {
    let width = |width| DraftOptions {
        width: Some(width),
        ..DraftOptions::default()
    };
    let export = Export::new(DraftFileFormat::C);
    let spec = export.load_with(width(24)).unwrap().spec;
    assert_eq!((spec.block, spec.depth()), (24, 23));
    assert_ne!(spec.hash, export.load().unwrap().spec.hash);
    for wrong in [15, 33] {
        let error = export.load_with(width(wrong)).err().unwrap().to_string();
        assert!(error.contains("use 16 to 32"), "{error}");
    }
}

#[test]
fn models_and_drafts_are_not_confused() {
    let spec = model::synth::SynthSpec::parse("tiny-hybrid:q8_0").unwrap();
    let bytes = FileBytes::shared(Arc::from(spec.bytes().unwrap()));
    let error = model::load_draft_bytes("m.gguf", bytes, &target(), DraftOptions::default());
    let error = error.err().unwrap().to_string();
    assert!(error.contains("qwen35 as a draft"), "{error}");
    let draft = FileBytes::shared(Arc::from(Export::new(DraftFileFormat::B).gguf()));
    let error = model::load_bytes("d.gguf", draft)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("give the model it drafts for"), "{error}");
}

#[test]
fn invalid_windows_are_refused() {
    let u = |n| Some(Value::U32(n));
    let sliding = Export::new(DraftFileFormat::B).sliding();
    check_refused(
        &sliding.clone().key("{a}.attention.sliding_window", None),
        &["sliding_window"],
    );
    check_refused(
        &sliding.key("{a}.attention.sliding_window", u(8)),
        &["window of 8", "block of 16"],
    );
    for block in [0, 1, 65] {
        let export = Export::new(DraftFileFormat::B).key("{a}.dflash.block_size", u(block));
        assert!(export.load().is_err(), "{block}");
    }
}
