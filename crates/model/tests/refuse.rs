//! Files that cannot be run are refused, by names that help: of the file, the key, the tensor.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod rewrite;

use std::sync::Arc;

use contract::QuantType;
use gguf::{Array, FileBytes, GgufFile, GgufString, GgufWriter, Value};
use model::synth::SynthSpec;
use model::{LoadedModel, ModelError};
use rewrite::{check_refused, rewritten_from};

/// The tiny synthetic file with changed metadata and without some tensors.
fn changed(set: &[(&str, Option<Value>)], drop: &[&str]) -> Result<LoadedModel, ModelError> {
    rewritten(set, |name| (!drop.contains(&name)).then(|| name.to_owned()))
}

/// The tiny synthetic file with one tensor under another name.
fn renamed(from: &str, to: &str) -> Result<LoadedModel, ModelError> {
    rewritten(&[], |name| {
        Some(if name == from { to } else { name }.to_owned())
    })
}

/// The tiny synthetic file with changed metadata and other tensor names; `None` drops a tensor.
fn rewritten(
    set: &[(&str, Option<Value>)],
    rename: impl Fn(&str) -> Option<String>,
) -> Result<LoadedModel, ModelError> {
    rewritten_from("tiny-hybrid:q8_0", set, rename)
}

#[test]
fn unchanged_copies_load() {
    assert!(changed(&[], &[]).is_ok());
}

#[test]
fn other_families_are_refused_with_an_alternative() {
    for (other, instead) in [
        ("qwen3next", "use a model of Qwen3.5"),
        ("mamba", "use a model of Qwen3 to Qwen3.6"),
        ("clip", "give the language model"),
        ("dflash", "give the model it drafts for"),
    ] {
        let set = [("general.architecture", Some(Value::from(other)))];
        check_refused(changed(&set, &[]), &[other, "not supported", instead]);
    }
}

#[test]
fn mixtures_of_experts_of_dense_families_are_refused() {
    for family in ["llama", "qwen2"] {
        let experts = format!("{family}.expert_count");
        let set = [
            ("general.architecture", Some(Value::from(family))),
            (experts.as_str(), Some(Value::U32(8))),
        ];
        check_refused(
            changed(&set, &[]),
            &["a mixture of 8 experts", "dense model"],
        );
    }
}

#[test]
fn recurrent_layer_list_overrides_the_interval() {
    let list = Value::Array(Array::Bool(vec![false, true, true, true]));
    let set = [("qwen35.attention.recurrent_layers", Some(list))];
    // Layer 0 now attends, but the file has no attention tensors there.
    check_refused(
        changed(&set, &[]),
        &["blk.0.attn_qkv.weight", "full-attention block"],
    );
    let short = Value::Array(Array::Bool(vec![true]));
    let set = [("qwen35.attention.recurrent_layers", Some(short))];
    check_refused(
        changed(&set, &[]),
        &["recurrent_layers", "1 flags", "4 blocks"],
    );
}

#[test]
fn impossible_numbers_are_refused_with_the_key() {
    let cases: [(&str, Option<Value>, &str); 10] = [
        ("qwen35.block_count", Some(Value::U32(0)), "at least 1"),
        ("qwen35.block_count", None, "missing"),
        (
            "qwen35.block_count",
            Some(Value::U64(u64::MAX)),
            "block_count",
        ),
        (
            "qwen35.nextn_predict_layers",
            Some(Value::U32(9)),
            "9 multi-token prediction blocks",
        ),
        (
            "qwen35.attention.head_count_kv",
            Some(Value::U32(3)),
            "a multiple is expected",
        ),
        (
            "qwen35.attention.key_length",
            Some(Value::U32(250)),
            "multiple of 32",
        ),
        ("qwen35.ssm.inner_size", Some(Value::U32(7)), "6 x 128"),
        (
            "qwen35.ssm.time_step_rank",
            Some(Value::U32(5)),
            "5 value heads for 2 key heads",
        ),
        (
            "qwen35.rope.dimension_count",
            Some(Value::U32(63)),
            "even number",
        ),
        (
            "qwen35.full_attention_interval",
            Some(Value::from("four")),
            "full_attention_interval",
        ),
    ];
    for (key, value, part) in cases {
        check_refused(changed(&[(key, value)], &[]), &[part]);
    }
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    check_refused(
        changed(&[], &["blk.2.ssm_out.weight"]),
        &["blk.2.ssm_out.weight", "missing"],
    );
    let wider = [("qwen35.feed_forward_length", Some(Value::U32(1024)))];
    check_refused(
        changed(&wider, &[]),
        &[
            "blk.0.ffn_gate.weight",
            "256 x 512",
            "256 x 1024 is expected",
        ],
    );
    let all_trunk: Vec<String> = (0..4)
        .map(|i| format!("blk.{i}.attn_norm.weight"))
        .collect();
    let names: Vec<&str> = all_trunk.iter().map(String::as_str).collect();
    check_refused(changed(&[], &names), &["attn_norm.weight", "missing"]);
}

#[test]
fn invalid_vocabularies_are_refused_with_key_and_index() {
    let text = |bytes: &[u8]| Value::Array(Array::String(vec![bytes.into()]));
    let cases: [(&str, Option<Value>, &[&str]); 8] = [
        (
            "tokenizer.ggml.tokens",
            Some(text(b"\xff\xfe")),
            &["tokens[0]", "UTF-8"],
        ),
        (
            "tokenizer.ggml.tokens",
            Some(text(b"a")),
            &["1 tokens", "1024 rows"],
        ),
        (
            "tokenizer.ggml.tokens",
            None,
            &["tokenizer.ggml.tokens", "missing"],
        ),
        (
            "tokenizer.ggml.merges",
            Some(text(b"nospace")),
            &["merges[0]", "nospace"],
        ),
        (
            "tokenizer.ggml.eos_token_id",
            Some(Value::U32(5000)),
            &["5000", "a vocabulary of 1024"],
        ),
        (
            "tokenizer.ggml.model",
            Some(Value::from("t5")),
            &["tokenizer.ggml.model: t5"],
        ),
        (
            "tokenizer.ggml.model",
            Some(Value::from("llama")),
            &["tokenizer.ggml.scores", "missing"],
        ),
        (
            "tokenizer.ggml.pre",
            Some(Value::from("mpt")),
            &["tokenizer.ggml.pre: mpt", "qwen35"],
        ),
    ];
    for (key, value, parts) in cases {
        check_refused(changed(&[(key, value)], &[]), parts);
    }
}

#[test]
fn scores_must_be_one_number_for_each_token() {
    let scores = |scores: Vec<f32>| {
        let scores = Value::Array(gguf::Array::F32(scores));
        changed(
            &[
                ("tokenizer.ggml.model", Some(Value::from("llama"))),
                ("tokenizer.ggml.scores", Some(scores)),
            ],
            &[],
        )
    };
    let loaded = scores(vec![0.5; 1024]).unwrap();
    let pieces = loaded.vocab.pieces.unwrap();
    assert!(pieces.space_prefix && pieces.scores.len() == 1024 && loaded.vocab.merges.is_empty());
    check_refused(
        scores(vec![0.5; 7]),
        &["scores", "7 scores for 1024 tokens"],
    );
    let mut nan = vec![0.5; 1024];
    nan[9] = f32::NAN;
    check_refused(scores(nan), &["scores", "token 9"]);
}

#[test]
fn family_variants_are_refused_by_their_distinctive_tensor() {
    // Block 3 attends, block 0 does not.
    check_refused(
        renamed("blk.3.attn_q.weight", "blk.3.attn_qkv.weight"),
        &["blk.3.attn_qkv.weight", "fused", "full-attention block"],
    );
    check_refused(
        renamed("blk.0.ssm_beta.weight", "blk.0.ssm_ba.weight"),
        &["blk.0.ssm_ba.weight", "Qwen3-Next"],
    );
}

#[test]
fn unknown_trunk_tensors_are_refused() {
    let extra = |name: &str| {
        let mut writer = GgufWriter::new();
        let bytes = SynthSpec::parse("tiny-hybrid:q8_0")
            .unwrap()
            .bytes()
            .unwrap();
        let file = GgufFile::from_bytes("base", FileBytes::shared(Arc::from(bytes))).unwrap();
        for (key, value) in file.meta().iter() {
            writer.meta(key, value.clone()).unwrap();
        }
        for tensor in file.tensors() {
            let ty = tensor.weight().unwrap().ty;
            writer.tensor(tensor.name(), ty, tensor.dims()).unwrap();
        }
        writer.tensor(name, QuantType::F32, &[1]).unwrap();
        let mut body = writer.start(Vec::new()).unwrap();
        for tensor in file.tensors() {
            body.write(file.data(tensor)).unwrap();
        }
        body.write(&[0; 4]).unwrap();
        let bytes = body.finish().unwrap();
        model::load_bytes("changed.gguf", FileBytes::shared(Arc::from(bytes)))
    };
    for name in [
        "blk.1.attn_q.bias",
        "blk.0.ssm_out.scale",
        "rope_freqs.weight",
    ] {
        check_refused(extra(name), &[name, "would change the result"]);
    }
    let loaded = extra("mm.0.weight").unwrap();
    assert_eq!(loaded.info.ignored.len(), 1);
}

#[test]
fn files_with_only_mtp_blocks_are_refused() {
    let set = [
        ("qwen35.block_count", Some(Value::U32(5))),
        ("qwen35.nextn_predict_layers", Some(Value::U32(1))),
    ];
    let result = rewritten(&set, |name| {
        let rest = name.strip_prefix("blk.3.");
        match rest {
            Some(rest) => Some(format!("blk.4.{rest}")),
            None if name.starts_with("blk.") => None,
            None => Some(name.to_owned()),
        }
    });
    check_refused(
        result,
        &[
            "multi-token prediction head alone",
            "file of the model itself",
        ],
    );
}

#[test]
fn head_is_read_whether_the_count_includes_it_or_not() {
    let keep = |name: &str| Some(name.to_owned());
    let with = |set: &[(&str, Option<Value>)]| {
        let loaded = rewritten_from("tiny-hybrid+mtp:q8_0", set, keep).unwrap();
        assert_eq!(loaded.spec.layers.len(), 4);
        loaded.spec.mtp.clone().unwrap()
    };
    let counted = with(&[]);
    let uncounted = [("qwen35.block_count", Some(Value::U32(4)))];
    assert_eq!(with(&uncounted), counted);
    // Per-block numbers without one for the head.
    let kv_heads = Value::Array(Array::U32(vec![0, 0, 0, 1]));
    let [count] = uncounted;
    let with_list = [count, ("qwen35.attention.head_count_kv", Some(kv_heads))];
    assert_eq!(with(&with_list), counted);
    assert_eq!(with(&[("qwen35.nextn_predict_layers", None)]), counted);
}

#[test]
fn head_without_its_own_norm_uses_that_of_the_model() {
    let loaded = rewritten_from("tiny-hybrid+mtp:q8_0", &[], |name| {
        (!name.ends_with("shared_head_norm.weight")).then(|| name.to_owned())
    });
    let loaded = loaded.unwrap();
    let spec = &loaded.spec;
    let mtp = spec.mtp.as_ref().unwrap();
    assert_eq!(mtp.final_norm, spec.final_norm);
    assert!(!mtp.weights(spec).contains(&&spec.final_norm));
}

#[test]
fn promised_heads_without_their_tensors_are_refused() {
    let key = "qwen35.nextn_predict_layers";
    let without = |part: &'static str| {
        rewritten_from("tiny-hybrid+mtp:q8_0", &[], move |name| {
            (!name.contains(part)).then(|| name.to_owned())
        })
    };
    check_refused(without("nextn."), &[key, "blk.N.nextn.eh_proj.weight"]);
    check_refused(without("blk.4."), &[key, "blk.N.nextn.eh_proj.weight"]);
    for part in ["nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "4.attn_q."] {
        check_refused(without(part), &["blk.4.", part, "missing"]);
    }
    // A key that would turn the last trunk layer into a head.
    check_refused(
        changed(&[(key, Some(Value::U32(1)))], &[]),
        &[key, "no block has the tensors"],
    );
    let two = [(key, Some(Value::U32(2)))];
    let result = rewritten_from("tiny-hybrid+mtp:q8_0", &two, |name| Some(name.to_owned()));
    check_refused(result, &[key, "at most 1"]);
}

#[test]
fn heads_that_are_not_behind_the_trunk_are_refused() {
    let moved = |from: &'static str, to: &'static str| {
        rewritten_from("tiny-hybrid+mtp:q8_0", &[], move |name| {
            Some(name.replace(from, to))
        })
    };
    let place = "the multi-token prediction head is block";
    check_refused(
        moved("blk.4.nextn", "blk.2.nextn"),
        &["block_count", place, "2 of 5"],
    );
    check_refused(moved("blk.4.", "blk.7."), &["block_count", place, "7 of 5"]);
    check_refused(
        moved("blk.4.nextn.enorm", "blk.3.nextn.enorm"),
        &["nextn_predict_layers", "blocks: 3, 4"],
    );
    check_refused(
        moved("blk.4.nextn.enorm.weight", "blk.4.nextn.enorm.scale"),
        &["blk.4.nextn.enorm.weight", "missing"],
    );
}

#[test]
fn per_block_keys_may_be_arrays_of_the_right_length() {
    let heads = |counts: Vec<u32>| {
        let counts = Value::Array(Array::U32(counts));
        changed(&[("qwen35.attention.head_count", Some(counts))], &[])
    };
    let loaded = heads(vec![0, 0, 0, 2]).unwrap();
    assert_eq!(loaded.spec.attention_layers().next().unwrap().n_heads, 2);
    check_refused(
        heads(vec![2, 2]),
        &["attention.head_count", "2 numbers for 4 blocks"],
    );
    check_refused(
        heads(vec![2, 2, 2, 0]),
        &["attention.head_count", "block 3", "0 query heads"],
    );
}

#[test]
fn scaled_rope_is_refused() {
    let scaling = |name: &str| {
        changed(
            &[("qwen35.rope.scaling.type", Some(Value::from(name)))],
            &[],
        )
    };
    assert!(scaling("none").is_ok());
    check_refused(
        scaling("linear"),
        &["qwen35.rope.scaling.factor", "missing"],
    );
    check_refused(scaling("yarn"), &["qwen35.rope.scaling.type", "yarn"]);
}

#[test]
fn tokens_without_utf8_are_reported_by_index() {
    let mut tokens: Vec<GgufString> = (0..1024)
        .map(|i| GgufString::from(format!("t{i}").as_str()))
        .collect();
    tokens[700] = GgufString::from(&b"\xe2\x28"[..]);
    let tokens = Value::Array(Array::String(tokens));
    check_refused(
        changed(&[("tokenizer.ggml.tokens", Some(tokens))], &[]),
        &["key tokenizer.ggml.tokens[700]", "not UTF-8"],
    );
}

#[test]
fn recommended_sampling_is_read_and_never_prevents_a_start() {
    let key = |name: &str| format!("general.sampling.{name}");
    let names = ["temp", "top_p", "top_k", "min_p", "penalty_repeat"].map(key);
    let set = |values: [Value; 5]| {
        let pairs = names.iter().map(String::as_str).zip(values.map(Some));
        let pairs: Vec<(&str, Option<Value>)> = pairs.collect();
        changed(&pairs, &[]).unwrap().card.sampling
    };
    let good = set([
        Value::F32(0.5),
        Value::F32(0.75),
        Value::I32(20),
        Value::F32(0.25),
        Value::F32(1.5),
    ]);
    assert_eq!(good.temperature, Some(0.5));
    assert_eq!((good.top_p, good.top_k), (Some(0.75), Some(20)));
    assert_eq!(
        (good.min_p, good.repetition_penalty),
        (Some(0.25), Some(1.5))
    );
    let bad = set([
        Value::F32(f32::NAN),
        Value::F32(2.0),
        Value::I32(-1),
        Value::Bool(true),
        Value::F32(0.0),
    ]);
    assert_eq!(bad, model::CardSampling::default());
}
