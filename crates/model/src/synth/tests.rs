//! Synthetic files are read back by the loader, which is the other half of what is claimed of them.

use std::sync::Arc;

use contract::{HeadMap, Mixer, OutputGate, RopePairs, TokenKind};
use gguf::FileBytes;

use super::*;
use crate::load_bytes;

fn load(text: &str) -> crate::LoadedModel {
    let bytes = SynthSpec::parse(text).unwrap().bytes().unwrap();
    load_bytes("synthetic", FileBytes::shared(Arc::from(bytes))).unwrap()
}

#[test]
fn tiny_hybrid_has_production_head_sizes() {
    let loaded = load("tiny-hybrid:q4_k_m");
    let spec = &loaded.spec;
    assert_eq!((spec.layers.len(), spec.vocab, spec.hidden), (4, 1024, 256));
    assert_ne!(spec.head.name, spec.embedding.name);
    let kinds: Vec<bool> = spec
        .layers
        .iter()
        .map(|l| matches!(l.mixer, Mixer::Attention(_)))
        .collect();
    assert_eq!(kinds, [false, false, false, true]);
    let attention = spec.attention_layers().next().unwrap();
    assert_eq!((attention.head_dim, attention.rope.dims), (256, 64));
    assert_eq!(attention.gate, OutputGate::SigmoidPerHead);
    let delta = spec.delta_layers().next().unwrap();
    assert_eq!((delta.n_k_heads, delta.n_v_heads, delta.k_dim), (2, 6, 128));
    assert_eq!(delta.head_map, HeadMap::Tiled);
    assert!(loaded.vocab.chat_template.is_some());
    assert!(loaded.vocab.kinds.contains(&TokenKind::Control));
    assert!(!loaded.vocab.eos.is_empty());
}

#[test]
fn suffixes_add_a_head_with_shared_or_own_embedding_and_lm_head() {
    for (text, owns) in [
        ("tiny-hybrid+mtp:q4_k_m", false),
        ("tiny-hybrid-r1+mtp-own:q8_0", true),
    ] {
        let loaded = load(text);
        let spec = &loaded.spec;
        assert_eq!((spec.layers.len(), loaded.info.ignored.len()), (4, 0));
        let mtp = spec.mtp.as_ref().unwrap();
        assert_eq!((mtp.eh_proj.rows, mtp.eh_proj.cols), (256, 512));
        assert_eq!(mtp.embedding.is_some(), owns);
        assert_eq!(mtp.head.is_some(), owns);
        assert_eq!(&*mtp.final_norm.name, "blk.4.nextn.shared_head_norm.weight");
        let attention = mtp.attention().unwrap();
        assert_eq!(attention.gate, OutputGate::SigmoidPerHead);
        assert_eq!(
            spec.kv_layers().count(),
            spec.attention_layers().count() + 1
        );
        for weight in spec.weights() {
            assert_eq!(loaded.weights.bytes(weight).unwrap().len(), weight.bytes());
        }
        let mut plain = loaded.clone();
        plain.drop_mtp();
        assert_eq!(plain.spec.mtp, None);
        let read = |spec: &contract::ModelSpec| -> usize {
            spec.weights().iter().map(|w| w.values()).sum()
        };
        let head = u64::try_from(read(spec) - read(&plain.spec)).unwrap();
        assert_eq!(loaded.info.mtp_parameters, Some(head));
    }
}

#[test]
fn all_types_and_their_mix_round_trip() {
    for ty in QuantType::ALL {
        // Some types share their name with a recipe, which may use others.
        let spec = SynthSpec {
            types: WeightTypes::Only(ty),
            ..SynthSpec::parse("tiny-hybrid-r1").unwrap()
        };
        let bytes = FileBytes::shared(Arc::from(spec.bytes().unwrap()));
        let loaded = load_bytes("synthetic", bytes).unwrap();
        let refs = loaded.spec.weights();
        assert!(refs.iter().any(|weight| weight.ty == ty), "{}", ty.name());
        for weight in refs {
            assert_eq!(loaded.weights.bytes(weight).unwrap().len(), weight.bytes());
        }
    }
    let mixed = load("tiny-hybrid:mixed");
    let used: std::collections::BTreeSet<QuantType> = mixed
        .spec
        .weights()
        .iter()
        .map(|weight| weight.ty)
        .collect();
    assert_eq!(used.len(), QuantType::ALL.len());
}

#[test]
fn dense_model_has_no_gate_and_a_tied_head() {
    let spec = load("tiny-dense:q8_0").spec;
    assert_eq!(spec.head.name, spec.embedding.name);
    let attention = spec.attention_layers().next().unwrap();
    assert_eq!(attention.gate, OutputGate::None);
    assert_eq!(attention.rope.dims, attention.head_dim);
    assert_eq!(spec.delta_layers().count(), 0);
}

#[test]
fn dense_families_have_their_biases_factors_windows_and_norms() {
    let llama = load("tiny-llama:q4_k_m").spec;
    let attention = llama.attention_layers().next().unwrap();
    assert_eq!(attention.rope.pairs, RopePairs::Adjacent);
    assert!(attention.rope_factors.is_some() && attention.q_norm.is_none());
    let qwen2 = load("tiny-qwen2:q8_0").spec;
    let attention = qwen2.attention_layers().next().unwrap();
    assert!(attention.biases.q.is_some() && attention.biases.o.is_none());
    let gemma = load("tiny-gemma3:q4_k_m").spec;
    let windows: Vec<_> = gemma.attention_layers().map(|a| a.window).collect();
    assert_eq!(windows[4..], [Some(64), None]);
    assert!(gemma.layers[0].post_ffn_norm.is_some() && gemma.embedding_scale == 16.0);
}

#[test]
fn seeds_determine_weights_and_hash() {
    let mut spec = SynthSpec::parse("tiny-dense:q4_0").unwrap();
    let first = spec.bytes().unwrap();
    assert_eq!(first, spec.bytes().unwrap());
    spec.seed = 2;
    let second = spec.bytes().unwrap();
    let hash = |bytes: Vec<u8>| {
        load_bytes("x", FileBytes::shared(Arc::from(bytes)))
            .unwrap()
            .spec
            .hash
    };
    assert_eq!(hash(first.clone()), hash(first.clone()));
    assert_ne!(hash(first), hash(second));
}

#[test]
fn unknown_names_are_refused_with_the_known_names() {
    let error = SynthSpec::parse("qwen9:q4_k_m").unwrap_err().to_string();
    assert!(
        error.contains("qwen3.5-0.8b") && error.contains("tiny-hybrid"),
        "{error}"
    );
    let error = SynthSpec::parse("tiny-dense+mtp:q8_0").unwrap_err();
    assert!(error.to_string().contains("hybrid shape"), "{error}");
    let error = SynthSpec::parse("tiny-hybrid+uniform:q8_0").unwrap_err();
    assert!(error.to_string().contains("with experts"), "{error}");
    let error = SynthSpec::parse("tiny-dense:q9").unwrap_err().to_string();
    assert!(
        error.contains("q4_k_m") && error.contains("iq4_xs"),
        "{error}"
    );
}
