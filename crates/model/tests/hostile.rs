//! A loader that is lied to: every byte before the data of a minimal model attacked, and random
//! damage to a synthetic one. It may load or refuse, but a refusal says what and where, and a
//! loaded spec is consistent.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::sync::Arc;

use contract::{Mixer, QuantType};
use gguf::{Array, FileBytes, GgufFile, GgufString, GgufWriter, Value};
use model::synth::SynthSpec;
use model::{LoadedModel, ModelError};
use proptest::prelude::*;

const HIDDEN: u64 = 32;
const STATE: u64 = 4;

/// One gated-delta and one attention block, a multi-token-prediction head, six tokens, with head
/// sizes that keep the file small.
fn minimal() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer
        .meta("general.architecture", "qwen35".into())
        .unwrap();
    let mut put = |key: &str, value: Value| writer.meta(&format!("qwen35.{key}"), value).unwrap();
    for (key, value) in [
        ("block_count", 3),
        ("nextn_predict_layers", 1),
        ("context_length", 64),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", 32),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("rope.dimension_count", 16),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", STATE as u32),
        ("ssm.group_count", 1),
        ("ssm.time_step_rank", 3),
        ("ssm.inner_size", 3 * STATE as u32),
    ] {
        put(key, Value::U32(value));
    }
    put(
        "attention.head_count",
        Value::Array(Array::U32(vec![1, 2, 2])),
    );
    put(
        "attention.recurrent_layers",
        Value::Array(Array::Bool(vec![true, false, false])),
    );
    put("rope.freq_base", Value::F32(1e7));
    put("attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    let mut put =
        |key: &str, value: Value| writer.meta(&format!("tokenizer.{key}"), value).unwrap();
    let tokens = ["a", "b", "ab", "<|im_end|>", "<|endoftext|>", "x"];
    let texts = |texts: &[&str]| {
        Value::Array(Array::String(
            texts.iter().map(|t| GgufString::from(*t)).collect(),
        ))
    };
    put("ggml.model", "gpt2".into());
    put("ggml.pre", "qwen35".into());
    put("ggml.tokens", texts(&tokens));
    put(
        "ggml.token_type",
        Value::Array(Array::I32(vec![1, 1, 1, 3, 3, 5])),
    );
    put("ggml.merges", texts(&["a b"]));
    put("ggml.eos_token_id", Value::U32(3));
    put("chat_template", "{{ messages }}".into());
    put("chat_template.tools", "{{ tools }}".into());
    let mut tensors: Vec<(String, QuantType, Vec<u64>)> = Vec::new();
    let mut add = |name: &str, ty, dims: &[u64]| tensors.push((name.to_owned(), ty, dims.to_vec()));
    let (f32, q8) = (QuantType::F32, QuantType::Q8_0);
    add("token_embd.weight", q8, &[HIDDEN, 6]);
    add("output_norm.weight", f32, &[HIDDEN]);
    for block in 0..3 {
        let mut add = |name: &str, ty, dims: &[u64]| add(&format!("blk.{block}.{name}"), ty, dims);
        add("attn_norm.weight", f32, &[HIDDEN]);
        add("post_attention_norm.weight", f32, &[HIDDEN]);
        for name in ["ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"] {
            add(name, q8, &[HIDDEN, 32]);
        }
        if block == 0 {
            add("attn_qkv.weight", q8, &[HIDDEN, 5 * STATE]);
            add("attn_gate.weight", q8, &[HIDDEN, 3 * STATE]);
            add("ssm_beta.weight", f32, &[HIDDEN, 3]);
            add("ssm_alpha.weight", f32, &[HIDDEN, 3]);
            add("ssm_a", f32, &[3]);
            add("ssm_dt.bias", f32, &[3]);
            add("ssm_conv1d.weight", f32, &[4, 5 * STATE]);
            add("ssm_norm.weight", f32, &[STATE]);
            add("ssm_out.weight", f32, &[3 * STATE, HIDDEN]);
        } else {
            add("attn_q.weight", q8, &[HIDDEN, 128]);
            add("attn_k.weight", q8, &[HIDDEN, 32]);
            add("attn_v.weight", q8, &[HIDDEN, 32]);
            add("attn_output.weight", q8, &[64, HIDDEN]);
            add("attn_q_norm.weight", f32, &[32]);
            add("attn_k_norm.weight", f32, &[32]);
        }
    }
    let mut add = |name: &str, dims: &[u64]| add(&format!("blk.2.nextn.{name}"), f32, dims);
    add("eh_proj.weight", &[2 * HIDDEN, HIDDEN]);
    add("enorm.weight", &[HIDDEN]);
    add("hnorm.weight", &[HIDDEN]);
    add("embed_tokens.weight", &[HIDDEN, 6]);
    for (name, ty, dims) in &tensors {
        writer.tensor(name, *ty, dims).unwrap();
    }
    let n_bytes = |(_, ty, dims): &(String, QuantType, Vec<u64>)| {
        ty.row_bytes(usize::try_from(dims.iter().product::<u64>()).unwrap())
    };
    let mut body = writer.start(Vec::new()).unwrap();
    body.write(&vec![0; tensors.iter().map(n_bytes).sum()])
        .unwrap();
    body.finish().unwrap()
}

fn load(bytes: &[u8]) -> Result<LoadedModel, ModelError> {
    model::load_bytes("bad.gguf", FileBytes::shared(Arc::from(bytes)))
}

/// What devices rely on without checking it again.
fn check_consistent(loaded: &LoadedModel) {
    let spec = &loaded.spec;
    for weight in spec.weights() {
        assert_eq!(loaded.weights.bytes(weight).unwrap().len(), weight.bytes());
    }
    assert_eq!(spec.embedding.rows, spec.vocab);
    if let Some(mtp) = &spec.mtp {
        let shape = (mtp.eh_proj.rows, mtp.eh_proj.cols);
        assert_eq!(shape, (spec.hidden, 2 * spec.hidden));
        assert!(mtp.attention().is_some());
    }
    assert_eq!((spec.head.rows, spec.head.cols), (spec.vocab, spec.hidden));
    assert!(spec.trained_context > 0 && spec.norm_eps > 0.0 && !spec.layers.is_empty());
    assert!(loaded.vocab.eos.iter().all(|id| id.index() < spec.vocab));
    assert_eq!(loaded.vocab.kinds.len(), spec.vocab);
    let head = spec.mtp.iter().map(|mtp| &mtp.layer);
    for layer in spec.layers.iter().chain(head) {
        if let Some(moe) = layer.ffn.experts() {
            assert!((1..=moe.n_experts).contains(&moe.n_used));
            assert_eq!(
                (moe.router.rows, moe.down.rows()),
                (moe.n_experts, spec.hidden)
            );
            assert!(moe.width() > 0 && moe.weights_scale > 0.0);
        }
        match &layer.mixer {
            Mixer::Attention(a) => {
                assert!(a.n_heads.is_multiple_of(a.n_kv_heads) && a.rope.dims <= a.head_dim);
                assert_eq!(a.o.cols, a.n_heads * a.head_dim);
            }
            Mixer::GatedDelta(d) => {
                assert!(d.n_v_heads.is_multiple_of(d.n_k_heads) && d.conv_taps >= 2);
                assert_eq!(
                    (d.qkv.rows, d.out.cols),
                    (d.channels(), d.n_v_heads * d.v_dim)
                );
            }
        }
    }
}

/// Loads it or not; a refusal must name the file and a place in it.
fn check(bytes: &[u8]) -> bool {
    match load(bytes) {
        Ok(loaded) => {
            check_consistent(&loaded);
            true
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("bad.gguf"), "{text}");
            let place = match &error {
                ModelError::Key { key, .. } => !key.is_empty() && text.contains("key "),
                ModelError::Tensor { tensor, .. } => !tensor.is_empty() && text.contains("tensor "),
                ModelError::Unsupported { what, .. } => !what.is_empty(),
                ModelError::Container(_) => true,
                ModelError::Unknown { .. }
                | ModelError::DraftMismatch { .. }
                | ModelError::Importance { .. } => false,
            };
            assert!(place, "{text}");
            false
        }
    }
}

fn head_len(bytes: &[u8]) -> usize {
    GgufFile::from_bytes("head", FileBytes::shared(Arc::from(bytes)))
        .unwrap()
        .head(0)
        .len()
}

#[test]
fn minimal_model_loads() {
    let loaded = load(&minimal()).unwrap();
    check_consistent(&loaded);
    assert_eq!(loaded.spec.layers.len(), 2);
    assert_eq!(loaded.info.ignored.len(), 0);
    assert!(loaded.spec.mtp.is_some());
    assert_eq!(
        loaded.vocab.named_templates,
        [("tools".to_owned(), "{{ tools }}".to_owned())]
    );
}

#[test]
fn truncated_minimal_models_are_refused() {
    let whole = minimal();
    // The last bytes are padding after the last tensor, which is ignored anyway.
    for len in 0..whole.len() - 128 {
        assert!(!check(&whole[..len]), "cut to {len} bytes");
    }
}

#[test]
fn bit_flips_before_the_data_load_or_are_refused() {
    let whole = minimal();
    let mut refused = 0;
    for at in 0..head_len(&whole) {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            refused += usize::from(!check(&bytes));
        }
    }
    assert!(refused > 10_000, "only {refused} of the flips were noticed");
}

#[test]
fn hostile_numbers_load_or_are_refused() {
    let whole = minimal();
    let numbers = [
        0,
        1,
        3,
        255,
        1 << 16,
        u64::from(u32::MAX),
        1 << 33,
        1 << 62,
        u64::MAX,
    ];
    for at in 0..head_len(&whole) - 8 {
        for number in numbers {
            let mut bytes = whole.clone();
            let width = if at % 2 == 0 { 4 } else { 8 };
            bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            check(&bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn random_damage_to_a_synthetic_model_loads_or_is_refused(
        damage in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<u64>(), 1usize..9), 1..6,
        ),
        cut in prop::option::of(any::<prop::sample::Index>()),
        has_experts in any::<bool>(),
    ) {
        thread_local! {
            static WHOLE: [Vec<u8>; 2] = ["tiny-dense:q4_0", "tiny-dense-moe:q4_0"]
                .map(|name| SynthSpec::parse(name).unwrap().bytes().unwrap());
        }
        let mut bytes = WHOLE.with(|whole| whole[usize::from(has_experts)].clone());
        let head = head_len(&bytes);
        for (at, number, width) in damage {
            let at = at.index(head - 8);
            bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check(&bytes);
    }
}
