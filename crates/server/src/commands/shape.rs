//! Sizes of a model and values of a file, as facts for people and programs.

use contract::{FeedForward, Mixer, ModelSpec, OutputGate, TokenKind, Vocab};
use serde_json::{Value, json};

use crate::progress::bytes_text;

/// One fact.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fact {
    /// The JSON key; people see it with spaces.
    pub key: &'static str,
    /// The JSON value.
    pub value: Value,
    /// The text for people.
    pub shown: String,
}

/// A fact whose text is its value.
pub(super) fn fact(key: &'static str, value: impl Into<Value>) -> Fact {
    let value = value.into();
    let shown = match &value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Fact { key, value, shown }
}

/// A fact with its own text.
pub(super) fn shown(key: &'static str, value: impl Into<Value>, shown: String) -> Fact {
    Fact {
        key,
        value: value.into(),
        shown,
    }
}

/// The facts of a draft file.
pub(super) fn of_draft(draft: &model::DraftFile) -> Vec<Fact> {
    let metadata = &draft.metadata;
    let window = metadata.window.filter(|_| metadata.sliding.contains(&true));
    let sliding = metadata.sliding.iter().filter(|slides| **slides).count();
    let causal = match metadata.causal {
        Some(true) => "all layers",
        None if metadata.kind == model::DraftKind::Dflash => "sliding layers",
        Some(false) | None => "no layer",
    };
    let mut all = vec![
        fact("name", draft.name.clone()),
        fact("kind", metadata.kind.name()),
        fact("format", metadata.format.name()),
        shown("bytes", draft.bytes, bytes_text(draft.bytes)),
        fact("layers", metadata.layers),
        fact("block", metadata.block),
        fact("mask_token", metadata.mask),
        fact("rope_theta", metadata.theta),
        fact("sliding_layers", sliding),
        fact("causal_in_block", causal),
    ];
    all.extend(window.map(|window| fact("window", window)));
    let drafted = metadata.block - metadata.first_row().min(metadata.block);
    all.push(fact("tokens_a_pass", drafted));
    let later = [
        ("conv_taps", metadata.conv_taps),
        ("conv_group", metadata.conv_group),
        ("rank", metadata.rank),
        ("selector_top_k", metadata.selector_top_k),
    ];
    all.extend(
        later
            .into_iter()
            .filter_map(|(key, value)| Some(fact(key, value?))),
    );
    all.extend(metadata.vocab.map(|vocab| fact("target_vocabulary", vocab)));
    all.extend(metadata.target_layers.map(|n| fact("target_layers", n)));
    all.push(match &metadata.capture_layers {
        Some(layers) => fact(
            "taps",
            layers
                .iter()
                .map(usize::to_string)
                .collect::<Vec<_>>()
                .join(", "),
        ),
        None => fact("taps", "not in the file; spread evenly over the target"),
    });
    all
}

/// The multi-token-prediction head, in words.
fn mtp_head(spec: &ModelSpec) -> String {
    let Some(mtp) = &spec.mtp else {
        return "none".to_owned();
    };
    let values: usize = mtp.weights(spec).iter().map(|w| w.values()).sum();
    let whose = |own: bool| if own { "its own" } else { "the model's" };
    format!(
        "one layer of {:.1} M parameters, {} embedding, {} LM head",
        values as f64 / 1e6,
        whose(mtp.embedding.is_some()),
        whose(mtp.head.is_some())
    )
}

/// The sizes of a model.
pub(super) fn of(spec: &ModelSpec) -> Vec<Fact> {
    let n_attention = spec.attention_layers().count();
    let n_delta = spec.delta_layers().count();
    let tied = spec.head.name == spec.embedding.name;
    let mut facts = vec![
        fact("trained_context", spec.trained_context),
        fact("vocabulary", spec.vocab),
        fact("hidden", spec.hidden),
        fact("layers", spec.layers.len()),
        fact("attention_layers", n_attention),
        fact("delta_layers", n_delta),
        fact("head", if tied { "the embedding" } else { "its own" }),
        fact("mtp_head", mtp_head(spec)),
        shown(
            "norm_epsilon",
            spec.norm_eps,
            format!("{:e}", spec.norm_eps),
        ),
    ];
    match spec.layers.first().map(|layer| &layer.ffn) {
        Some(FeedForward::Dense(dense)) => facts.push(fact("feed_forward", dense.width())),
        Some(FeedForward::Experts(moe)) => {
            let shared = moe.shared.as_ref().map_or(0, |shared| shared.ffn.width());
            facts.extend([
                fact("experts", moe.n_experts),
                fact("experts_per_token", moe.n_used),
                fact("expert_feed_forward", moe.width()),
                fact("shared_feed_forward", shared),
            ]);
        }
        None => {}
    }
    if let Some(a) = spec.attention_layers().next() {
        let gated = a.gate != OutputGate::None;
        facts.extend([
            fact("query_heads", a.n_heads),
            fact("key_value_heads", a.n_kv_heads),
            fact("head_dim", a.head_dim),
            fact("rope_dims", a.rope.dims),
            fact("rope_theta", a.rope.theta),
            fact("attention_gate", if gated { "yes" } else { "no" }),
        ]);
    }
    if let Some(d) = spec.delta_layers().next() {
        facts.extend([
            fact("delta_key_heads", d.n_k_heads),
            fact("delta_value_heads", d.n_v_heads),
            fact("delta_dims", format!("{} x {}", d.k_dim, d.v_dim)),
            fact("conv_taps", d.conv_taps),
        ]);
    }
    facts.push(fact("order", order(spec)));
    facts
}

/// One letter per layer, bottom to top: `d` for gated delta, `A` for attention.
fn order(spec: &ModelSpec) -> String {
    spec.layers
        .iter()
        .map(|layer| match layer.mixer {
            Mixer::GatedDelta(_) => 'd',
            Mixer::Attention(_) => 'A',
        })
        .collect()
}

/// The sizes and special tokens of a vocabulary.
pub(super) fn of_vocabulary(vocab: &Vocab) -> Vec<Fact> {
    let kind = |kind: TokenKind| vocab.kinds.iter().filter(|other| **other == kind).count();
    let name = |id: contract::TokenId| {
        let text = vocab.tokens.get(id.index()).map_or("?", String::as_str);
        format!("{id} {}", text.escape_debug())
    };
    let ends: Vec<String> = vocab.eos.iter().map(|id| name(*id)).collect();
    let mut facts = vec![
        fact("tokens", vocab.tokens.len()),
        fact("merges", vocab.merges.len()),
        fact("cut", format!("{:?}", vocab.pre).to_lowercase()),
        fact("control_tokens", kind(TokenKind::Control)),
        fact("user_defined_tokens", kind(TokenKind::UserDefined)),
        fact("unused_tokens", kind(TokenKind::Unused)),
        shown("end_tokens", json!(ends), ends.join(", ")),
    ];
    if let Some(bos) = vocab.bos_token.filter(|_| vocab.add_bos) {
        facts.push(fact("put_before_text", name(bos)));
    }
    facts.push(match &vocab.chat_template {
        Some(template) => shown(
            "chat_template",
            template.len(),
            format!("{} bytes", template.len()),
        ),
        None => fact(
            "chat_template",
            "none; the built-in one of the family is used",
        ),
    });
    facts
}

/// Longer metadata values are cut, in characters.
const MAX_CHARS: usize = 100;
/// Longer metadata arrays are cut.
const MAX_ITEMS: usize = 8;

/// A metadata value on one line.
pub(super) fn metadata(value: &gguf::Value) -> String {
    let text = match value {
        gguf::Value::U8(v) => v.to_string(),
        gguf::Value::I8(v) => v.to_string(),
        gguf::Value::U16(v) => v.to_string(),
        gguf::Value::I16(v) => v.to_string(),
        gguf::Value::U32(v) => v.to_string(),
        gguf::Value::I32(v) => v.to_string(),
        gguf::Value::U64(v) => v.to_string(),
        gguf::Value::I64(v) => v.to_string(),
        gguf::Value::F32(v) => v.to_string(),
        gguf::Value::F64(v) => v.to_string(),
        gguf::Value::Bool(v) => v.to_string(),
        gguf::Value::String(text) => text.shown().into_owned(),
        gguf::Value::Array(array) => items(array),
    };
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The first items of an array.
fn items(array: &gguf::Array) -> String {
    use gguf::Array;
    fn first<T>(all: &[T], one: impl Fn(&T) -> String) -> Vec<String> {
        all.iter().take(MAX_ITEMS).map(one).collect()
    }
    let mut shown = match array {
        Array::U8(v) => first(v, u8::to_string),
        Array::I8(v) => first(v, i8::to_string),
        Array::U16(v) => first(v, u16::to_string),
        Array::I16(v) => first(v, i16::to_string),
        Array::U32(v) => first(v, u32::to_string),
        Array::I32(v) => first(v, i32::to_string),
        Array::U64(v) => first(v, u64::to_string),
        Array::I64(v) => first(v, i64::to_string),
        Array::F32(v) => first(v, f32::to_string),
        Array::F64(v) => first(v, f64::to_string),
        Array::Bool(v) => first(v, bool::to_string),
        Array::String(v) => first(v, |text| text.shown().into_owned()),
        Array::Array(v) => first(v, |inner| format!("[{} items]", inner.len())),
    };
    if array.len() > MAX_ITEMS {
        shown.push("…".to_owned());
    }
    format!("[{}]", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open;

    fn of_key<'a>(facts: &'a [Fact], key: &str) -> &'a Value {
        &facts.iter().find(|fact| fact.key == key).unwrap().value
    }

    #[test]
    fn tiny_model_has_the_facts_of_its_shape() {
        let loaded = open::tiny();
        let facts = of(&loaded.spec);
        assert_eq!(of_key(&facts, "order"), "dddA");
        assert_eq!(of_key(&facts, "delta_value_heads"), 6);
        assert_eq!(of_key(&facts, "rope_dims"), 64);
        let facts = of_vocabulary(&loaded.vocab);
        assert_eq!(of_key(&facts, "cut"), "qwen35");
        assert!(
            of_key(&facts, "end_tokens")
                .to_string()
                .contains("<|im_end|>")
        );
    }

    #[test]
    fn long_metadata_values_are_cut() {
        let numbers = gguf::Value::Array(gguf::Array::U32((0..100).collect()));
        assert_eq!(metadata(&numbers), "[0, 1, 2, 3, 4, 5, 6, 7, …]");
        let text = "é".repeat(200);
        assert_eq!(
            metadata(&gguf::Value::String(text.as_str().into()))
                .chars()
                .count(),
            101
        );
    }
}
