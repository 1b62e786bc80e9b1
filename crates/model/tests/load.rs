//! Loading files made by other people's converters, and what the spec of each must say.

#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::fs;
use std::path::{Path, PathBuf};

use contract::{
    AttentionSpec, GateActivation, HeadMap, Mixer, OutputGate, PreTokenizer, QuantType, RopePairs,
    RopeSpec, TokenId, TokenKind,
};
use model::{LoadedModel, load};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../conformance/fixtures/models")
        .join(name)
}

fn loaded(name: &str) -> LoadedModel {
    load(&fixture(name)).unwrap_or_else(|e| panic!("{e}"))
}

/// Indices of the gated-delta layers.
fn recurrent(loaded: &LoadedModel) -> Vec<usize> {
    let layers = loaded.spec.layers.iter().enumerate();
    layers
        .filter(|(_, l)| matches!(l.mixer, Mixer::GatedDelta(_)))
        .map(|(i, _)| i)
        .collect()
}

#[test]
fn hybrid_with_three_value_heads_per_key_head_loads() {
    let loaded = loaded("hybrid_r3_mixed.gguf");
    let spec = &loaded.spec;
    assert_eq!((spec.vocab, spec.hidden, spec.layers.len()), (512, 256, 3));
    assert_eq!(recurrent(&loaded), [0, 1]);
    let Mixer::GatedDelta(delta) = &spec.layers[0].mixer else {
        panic!()
    };
    assert_eq!(
        (delta.n_k_heads, delta.n_v_heads, delta.k_dim, delta.v_dim),
        (2, 6, 128, 128)
    );
    assert_eq!((delta.conv_taps, delta.head_map), (4, HeadMap::Tiled));
    assert_eq!((delta.conv.rows, delta.conv.cols), (delta.channels(), 4));
    let Mixer::Attention(attention) = &spec.layers[2].mixer else {
        panic!()
    };
    assert_eq!(
        (attention.n_heads, attention.n_kv_heads, attention.head_dim),
        (2, 1, 256)
    );
    assert_eq!((attention.rope.dims, attention.rope.theta), (64, 1e7));
    assert_eq!(
        (attention.gate, attention.scale),
        (OutputGate::SigmoidPerHead, 1.0 / 16.0)
    );
    assert_eq!(attention.q.rows, 2 * 2 * 256);
    assert_ne!(spec.head.name, spec.embedding.name);
    let types: Vec<QuantType> = loaded.info.types.iter().map(|share| share.ty).collect();
    assert_eq!(types.len(), 15, "every type: {types:?}");
    for weight in spec.weights() {
        assert_eq!(loaded.weights.bytes(weight).unwrap().len(), weight.bytes());
    }
}

#[test]
fn mtp_block_is_the_head_and_not_part_of_the_trunk() {
    let loaded = loaded("hybrid_mtp_q4_k_m.gguf");
    let spec = &loaded.spec;
    assert_eq!(loaded.info.ignored, Vec::<std::sync::Arc<str>>::new());
    let mtp = spec.mtp.as_ref().unwrap();
    let prefix = format!("blk.{}.", spec.layers.len());
    for weight in mtp.weights(spec) {
        assert!(weight.name.starts_with(&prefix), "{}", weight.name);
    }
    assert_eq!(mtp.weights(spec).len(), 15);
    assert_eq!((mtp.embedding.is_none(), mtp.head.is_none()), (true, true));
    assert!(matches!(mtp.layer.mixer, Mixer::Attention(_)));
}

#[test]
fn tied_head_is_the_embedding() {
    for name in ["hybrid_r1_bf16.gguf", "dense_f16.gguf"] {
        let loaded = loaded(name);
        assert_eq!(loaded.spec.head, loaded.spec.embedding, "{name}");
    }
}

#[test]
fn dense_model_attends_in_every_layer_without_gate() {
    let loaded = loaded("dense_f16.gguf");
    assert_eq!(recurrent(&loaded), Vec::<usize>::new());
    for attention in loaded.spec.attention_layers() {
        assert_eq!(
            (attention.gate, attention.rope.dims),
            (OutputGate::None, 128)
        );
        assert_eq!(attention.rope.theta, 1e6);
        assert!(attention.q_norm.is_some() && attention.k_norm.is_some());
    }
    assert_eq!(loaded.info.architecture, "qwen3");
}

#[test]
fn vocabulary_has_kinds_merges_templates_and_stop_tokens() {
    for (name, pre) in [
        ("hybrid_r1_bf16.gguf", PreTokenizer::Qwen35),
        ("dense_f16.gguf", PreTokenizer::Qwen2),
    ] {
        let vocab = loaded(name).vocab;
        assert_eq!(
            (vocab.tokens.len(), vocab.kinds.len(), vocab.pre),
            (512, 512, pre)
        );
        assert!(!vocab.merges.is_empty() && !vocab.add_bos);
        let id = |text: &str| {
            TokenId(vocab.tokens.iter().position(|token| token == text).unwrap() as u32)
        };
        let end = id("<|im_end|>");
        assert_eq!(vocab.eos_token, Some(end));
        assert_eq!(vocab.kinds[end.index()], TokenKind::Control);
        assert!(vocab.eos.contains(&end) && vocab.eos.contains(&id("<|endoftext|>")));
        assert!(vocab.chat_template.is_some());
    }
}

#[test]
fn hash_identifies_the_model_independent_of_the_path() {
    let first = loaded("hybrid_r1_bf16.gguf").spec.hash;
    let copy = tempfile::tempdir().unwrap();
    let path = copy.path().join("other-name.gguf");
    fs::copy(fixture("hybrid_r1_bf16.gguf"), &path).unwrap();
    assert_eq!(load(&path).unwrap().spec.hash, first);
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 40;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_ne!(load(&path).unwrap().spec.hash, first);
    assert_ne!(loaded("dense_f16.gguf").spec.hash, first);
}

/// The attention of a layer that has one.
fn attention(loaded: &LoadedModel, layer: usize) -> &AttentionSpec {
    match &loaded.spec.layers[layer].mixer {
        Mixer::Attention(attention) => attention,
        Mixer::GatedDelta(_) => panic!("layer {layer} is recurrent"),
    }
}

#[test]
fn llama_has_adjacent_rotary_pairs_and_what_the_file_adds() {
    let plain = loaded("llama_q8_0.gguf");
    let a = attention(&plain, 1);
    assert_eq!((a.n_heads, a.n_kv_heads, a.head_dim), (6, 2, 32));
    assert_eq!((a.rope.pairs, a.rope.theta), (RopePairs::Adjacent, 1e5));
    assert!(a.rope_factors.is_none() && a.biases.iter().next().is_none());
    assert!(a.q_norm.is_none() && !a.is_basic());
    assert_eq!(plain.vocab.pre, PreTokenizer::Smollm);
    let more = loaded("llama3_f16.gguf");
    let a = attention(&more, 0);
    assert_eq!(a.rope_factors.as_ref().unwrap().cols, 16);
    assert_eq!(a.biases.iter().count(), 4);
    let names: Vec<&str> = more.spec.weights().iter().map(|w| &*w.name).collect();
    let shared = names.iter().filter(|name| **name == "rope_freqs.weight");
    assert_eq!(shared.count(), 1);
}

#[test]
fn qwen2_has_biases_on_its_inputs() {
    let loaded = loaded("qwen2_f16.gguf");
    let a = attention(&loaded, 0);
    assert_eq!(a.rope, RopeSpec::new(32, 1e6));
    assert!(a.biases.q.is_some() && a.biases.k.is_some() && a.biases.v.is_some());
    assert!(a.biases.o.is_none());
}

#[test]
fn gemma3_alternates_windows_and_normalises_behind_blocks() {
    let loaded = loaded("gemma3_q4_1.gguf");
    let spec = &loaded.spec;
    assert_eq!(spec.embedding_scale, 96_f32.sqrt());
    let windows = [0, 1, 2].map(|layer| attention(&loaded, layer).window);
    assert_eq!(windows, [Some(20), None, Some(20)]);
    let rope = |layer| attention(&loaded, layer).rope;
    assert_eq!((rope(0).theta, rope(0).scale), (1e4, 1.0));
    assert_eq!((rope(1).theta, rope(1).scale), (1e6, 0.125));
    for layer in &spec.layers {
        assert!(layer.post_mixer_norm.is_some() && layer.post_ffn_norm.is_some());
        assert_eq!(layer.ffn.activation(), GateActivation::GeluTanh);
    }
    let pieces = loaded.vocab.pieces.as_ref().unwrap();
    assert!(!pieces.space_prefix && loaded.vocab.add_bos);
}
