//! DFlash2 and DSpark drafts: recognised in every file format, and wrong tensors named.

use contract::{BlockMask, Conditioning, DraftSpec, DraftValues, TokenId};
use gguf::Value;
use serde_json::json;

use super::check_refused;
use super::export::{DraftFileFormat, Export, HIDDEN, LAYERS};

const VOCAB: usize = 1024;
const RANK: usize = 16;
const TAPS: usize = 3;
const GROUP: usize = 32;
const GROUPS: usize = HIDDEN / GROUP;

fn u(n: usize) -> Option<Value> {
    Some(Value::U32(n as u32))
}

/// Names and shapes of what DFlash2 adds.
fn selector_tensors(file_format: DraftFileFormat) -> Vec<(String, usize, usize)> {
    let hf = file_format == DraftFileFormat::Safetensors;
    let names = if hf {
        [
            "candidate_selector.hidden_projection.weight",
            "candidate_selector.predecessor_codebook",
            "candidate_selector.successor_codebook",
        ]
    } else {
        [
            "selector_hidden.weight",
            "selector_predecessor.weight",
            "selector_successor.weight",
        ]
    };
    let mut all = vec![
        (names[0].to_owned(), RANK, HIDDEN),
        (names[1].to_owned(), VOCAB, RANK),
        (names[2].to_owned(), VOCAB, RANK),
    ];
    for i in 0..LAYERS {
        for sublayer in ["attn", "ffn"] {
            let (base, projection) = match (hf, sublayer) {
                (true, "attn") => (
                    "attention_conv.base_kernel",
                    "attention_conv.kernel_projection",
                ),
                (true, _) => ("mlp_conv.base_kernel", "mlp_conv.kernel_projection"),
                (false, "attn") => ("attn_conv_base", "attn_conv_proj"),
                (false, _) => ("ffn_conv_base", "ffn_conv_proj"),
            };
            let layer = if hf { "layers" } else { "blk" };
            all.push((format!("{layer}.{i}.{base}"), 2 * TAPS, HIDDEN));
            let projection = format!("{layer}.{i}.{projection}.weight");
            all.push((projection, 2 * TAPS * GROUPS, HIDDEN));
        }
    }
    all
}

/// Names and shapes of what DSpark adds.
fn markov_tensors(file_format: DraftFileFormat, draft_vocab: usize) -> Vec<(String, usize, usize)> {
    let names = match file_format {
        DraftFileFormat::Safetensors => [
            "markov_head.markov_w1.weight",
            "markov_head.markov_w2.weight",
            "confidence_head.proj.weight",
            "confidence_head.proj.bias",
        ],
        _ => [
            "markov_w1.weight",
            "markov_w2.weight",
            "conf_proj.weight",
            "conf_proj.bias",
        ],
    };
    let [w1, w2, confidence, bias] = names.map(str::to_owned);
    vec![
        (w1, VOCAB, RANK),
        (w2, draft_vocab, RANK),
        (confidence, 1, HIDDEN + RANK),
        (bias, 1, 1),
    ]
}

fn with_tensors(mut export: Export, tensors: Vec<(String, usize, usize)>) -> Export {
    export.added.extend(tensors);
    export
}

fn dflash2(file_format: DraftFileFormat) -> Export {
    let export = with_tensors(Export::new(file_format), selector_tensors(file_format));
    let prefix = match file_format {
        DraftFileFormat::Safetensors => {
            return export
                .field("architectures", json!(["DFlash2DraftModel"]))
                .field("dflash_config/conv_kernel_size", json!(TAPS))
                .field("dflash_config/conv_group_size", json!(GROUP))
                .field("dflash_config/selector_rank", json!(RANK))
                .field("dflash_config/selector_top_k", json!(16));
        }
        DraftFileFormat::C => "{a}",
        _ => "{a}.dflash",
    };
    export
        .key(&format!("{prefix}.conv_kernel_size"), u(TAPS))
        .key(&format!("{prefix}.conv_group_size"), u(GROUP))
        .key(&format!("{prefix}.selector_rank"), u(RANK))
        .key(&format!("{prefix}.selector_top_k"), u(16))
}

fn dspark(file_format: DraftFileFormat) -> Export {
    let export = with_tensors(Export::new(file_format), markov_tensors(file_format, VOCAB));
    export.field("architectures", json!(["Qwen3DSparkModel"]))
}

const BOTH: [DraftFileFormat; 2] = [DraftFileFormat::C, DraftFileFormat::Safetensors];

#[test]
fn dflash2_loads_from_every_file_format() {
    for file_format in DraftFileFormat::ALL {
        let spec = dflash2(file_format).sliding().load().unwrap().spec;
        let Conditioning::Pairwise(selector) = &spec.conditioning else {
            panic!("{file_format:?}: {:?}", spec.conditioning);
        };
        assert_eq!((selector.top_k, selector.hidden.rows), (16, RANK));
        assert_eq!((spec.first_row, spec.depth()), (1, 15));
        for layer in &spec.layers {
            for conv in [&layer.attention_conv, &layer.ffn_conv] {
                let conv = conv.as_ref().unwrap();
                assert_eq!((conv.taps, conv.group), (TAPS, GROUP), "{file_format:?}");
            }
            // Sliding layers of this kind see the whole block.
            assert_eq!(layer.block_mask, BlockMask::Full, "{file_format:?}");
        }
    }
}

#[test]
fn dspark_loads_from_every_file_format_and_samples_at_the_root() {
    for file_format in DraftFileFormat::ALL {
        let spec = dspark(file_format).load().unwrap().spec;
        let Conditioning::Markov(markov) = &spec.conditioning else {
            panic!("{file_format:?}: {:?}", spec.conditioning);
        };
        assert_eq!((markov.previous.rows, markov.previous.cols), (VOCAB, RANK));
        assert!(markov.confidence.as_ref().unwrap().bias.is_some());
        assert_eq!((spec.first_row, spec.depth()), (0, 16), "{file_format:?}");
    }
    let c = dspark(DraftFileFormat::C).key("{a}.sample_from_anchor", Some(Value::Bool(false)));
    let hf = dspark(DraftFileFormat::Safetensors).field("sample_from_anchor", json!(false));
    for export in [c, hf] {
        assert_eq!(export.load().unwrap().spec.depth(), 15);
    }
    // A head that the file calls absent is not used, and one that it promises must be there.
    let absent =
        dspark(DraftFileFormat::C).key("{a}.has_confidence_head", Some(Value::Bool(false)));
    let spec = absent.load().unwrap().spec;
    assert!(matches!(&spec.conditioning, Conditioning::Markov(m) if m.confidence.is_none()));
    let promised = dspark(DraftFileFormat::C)
        .key("{a}.has_confidence_head", Some(Value::Bool(true)))
        .without("conf_proj.weight");
    check_refused(&promised, &["conf_proj.weight", "missing"]);
}

#[test]
fn every_missing_tensor_is_named() {
    for file_format in BOTH {
        for (name, _, _) in selector_tensors(file_format) {
            let export = dflash2(file_format).without(&name);
            check_refused(&export, &[&name, "missing"]);
        }
        for (name, _, _) in markov_tensors(file_format, VOCAB) {
            let optional = name.starts_with("conf");
            let export = dspark(file_format).without(&name);
            if optional {
                assert!(export.load().is_ok(), "{name}");
            } else {
                check_refused(&export, &[&name, "missing"]);
            }
        }
    }
}

#[test]
fn every_misshapen_tensor_is_named() {
    for file_format in BOTH {
        let spoil = |export: Export, (name, rows, cols): (String, usize, usize)| {
            let (rows, cols) = if rows > 1 {
                (rows + 1, cols)
            } else {
                (rows, cols + 1)
            };
            check_refused(&export.without(&name).add(&name, rows, cols), &[&name]);
        };
        for tensor in selector_tensors(file_format) {
            spoil(dflash2(file_format), tensor);
        }
        for tensor in markov_tensors(file_format, VOCAB) {
            spoil(dspark(file_format), tensor);
        }
    }
    let c = || dflash2(DraftFileFormat::C);
    check_refused(
        &c().key("{a}.selector_top_k", None),
        &["selector_top_k", "missing"],
    );
    check_refused(
        &c().key("{a}.selector_top_k", u(900)),
        &["selector_top_k", "900"],
    );
    check_refused(
        &c().key("{a}.conv_kernel_size", u(2)),
        &["blk.0.attn_conv_base", "two sides of 2 taps"],
    );
    check_refused(
        &c().key("{a}.conv_group_size", u(48)),
        &["blk.0.attn_conv_proj.weight", "groups of 48"],
    );
    check_refused(
        &dspark(DraftFileFormat::Safetensors).field("markov_rank", json!(8)),
        &["markov_w1", "rank 16", "8"],
    );
    check_refused(
        &dspark(DraftFileFormat::Safetensors).field("markov_head_type", json!("gated")),
        &["markov_head_type", "gated"],
    );
}

#[test]
fn optional_tensors_change_the_layers() {
    let mut export = dflash2(DraftFileFormat::C)
        .rename("blk.1.attn_v.weight", None)
        .key("{a}.logit_scale", Some(Value::F32(0.5)))
        .key("{a}.final_logit_softcapping", Some(Value::F32(30.0)))
        .add("token_embd.weight", VOCAB, HIDDEN)
        .add("output.weight", VOCAB, HIDDEN);
    for i in 0..LAYERS {
        export = export
            .add(&format!("blk.{i}.attn_sinks.weight"), 1, 4)
            .add(&format!("blk.{i}.post_attention_norm.weight"), 1, HIDDEN)
            .add(&format!("blk.{i}.post_ffw_norm.weight"), 1, HIDDEN);
    }
    let spec: DraftSpec = (*export.load().unwrap().spec).clone();
    assert_eq!((spec.logit_scale, spec.logit_softcap), (0.5, Some(30.0)));
    assert!(spec.embedding.is_some() && spec.head.is_some());
    let values: Vec<DraftValues> = spec.layers.iter().map(|layer| layer.values).collect();
    let own = DraftValues::Projection;
    assert_eq!(values, [own, DraftValues::Keys, own]);
    for layer in &spec.layers {
        let norms = (&layer.post_attention_norm, &layer.post_ffn_norm);
        assert!(matches!(
            (&layer.sinks, norms),
            (Some(_), (Some(_), Some(_)))
        ));
        assert_ne!(Some(&layer.ffn_norm), layer.post_attention_norm.as_ref());
    }
    let names: Vec<&str> = spec.weights().iter().map(|w| &*w.name).collect();
    let mut distinct = names.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), names.len(), "each weight once: {names:?}");
}

#[test]
fn promised_sinks_must_be_there() {
    let export = dflash2(DraftFileFormat::Safetensors)
        .field("dflash_config/attention_sink_bias", json!(true));
    check_refused(&export, &["layers.0.self_attn.sinks", "missing"]);
}

#[test]
fn draft_vocabularies_are_ids_in_gguf_and_offsets_in_safetensors() {
    const PART: usize = 100;
    let of = |file_format, head: &str, ids: Vec<i64>| {
        let export = with_tensors(Export::new(file_format), markov_tensors(file_format, PART));
        export
            .field("architectures", json!(["DSparkDraftModel"]))
            .add(head, PART, HIDDEN)
            .integers("d2t", ids)
    };
    let ids = || (0..PART as i64).map(|row| 3 * row + 1);
    let gguf = of(DraftFileFormat::C, "output.weight", ids().collect());
    let offsets = ids().enumerate().map(|(row, id)| id - row as i64);
    let hf = of(
        DraftFileFormat::Safetensors,
        "lm_head.weight",
        offsets.collect(),
    );
    for export in [gguf.clone(), hf] {
        let spec = export.load().unwrap().spec;
        let head = spec.head.as_ref().unwrap();
        let found = head.ids.as_ref().unwrap();
        assert_eq!((head.weight.rows, found[2]), (PART, TokenId(7)));
    }
    let wrong = |ids: Vec<i64>| of(DraftFileFormat::C, "output.weight", ids);
    check_refused(&wrong(vec![5; PART]), &["d2t", "token 5 occurs twice"]);
    check_refused(&wrong((1000..1100).collect()), &["d2t", "row 24", "1024"]);
    check_refused(&wrong((0..90).collect()), &["output.weight"]);
    check_refused(
        &gguf.without("output.weight"),
        &["output.weight", "missing"],
    );
    check_refused(
        &dflash2(DraftFileFormat::C)
            .add("output.weight", PART, HIDDEN)
            .integers("d2t", ids().collect()),
        &["d2t", "whole vocabulary"],
    );
}

#[test]
fn speculators_configurations_are_read() {
    let export = dspark(DraftFileFormat::Safetensors)
        .field("speculators_model_type", json!("dspark"))
        .field("dflash_config/target_layer_ids", json!(null))
        .field("aux_hidden_state_layer_ids", json!([1, 2, 4]));
    assert_eq!(export.load().unwrap().spec.capture_layers, [0, 1, 3]);
}
