//! The bundled model against its golden files. The text side renders and tokenises as the
//! publisher's tools do. Every device gives the logits of an independent implementation in f32 on
//! the same dequantised weights.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod draft;
mod drift;
mod golden;
mod gpu;
mod head;
mod own_drafts;
mod pool;
mod prefix;
mod properties;

use std::sync::Arc;

use chat::Tokenizer;
use chat::openai::request::chat_request;
use chat::request::{ConversationPolicy, LateSystem};
use chat::template::ChatTemplate;
use contract::{
    Backend, KvFormat, KvFormats, Limits, LoadConfig, LogitsRequest, LogitsRow, TokenId,
};
use cpu::{CpuBackend, CpuOptions};
use serde_json::json;

use golden::{FAST, REFERENCE, cases, ember, ids, numbers, tensors};

/// A device's logits rows after each token of a case: the prompt and the greedy tokens together.
fn rows(loaded: &model::LoadedModel, options: CpuOptions, tokens: &[TokenId]) -> Vec<LogitsRow> {
    let requests: Vec<_> = (0..tokens.len())
        .map(|i| (i, LogitsRequest::full()))
        .collect();
    let mut runner = CpuBackend::new(options)
        .open(load_config(loaded, options), &mut |_| {})
        .unwrap();
    let seq = runner.open(tokens.len()).unwrap();
    runner.prefill(seq, tokens, &requests).unwrap()
}

fn load_config(loaded: &model::LoadedModel, options: CpuOptions) -> LoadConfig {
    let format = if options.reference {
        KvFormat::F32
    } else {
        KvFormat::F16
    };
    LoadConfig {
        target: Arc::clone(&loaded.spec),
        weights: Arc::clone(&loaded.weights),
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: 1,
            context: 1024,
            tree_nodes: 1,
            prefill_chunk: 512,
            pool_tokens: None,
        },
    }
}

/// Mean and worst difference from the golden logits over all cases. Fails if a greedy token differs
/// although the reference led by more than `sure`.
fn compare_with_golden(options: CpuOptions, sure: f64) -> (f64, f64) {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let golden = tensors();
    let (mut sum, mut count, mut worst) = (0.0, 0_usize, 0.0_f64);
    for case in cases() {
        let name = case["name"].as_str().unwrap();
        let prompt = ids(&case["prompt_ids"]);
        let greedy = ids(&case["greedy_ids"]);
        let rows = rows(&loaded, options, &[prompt.clone(), greedy.clone()].concat());
        let best = &golden[&format!("{name}.top_ids")];
        let logits = &golden[&format!("{name}.top_logits")];
        assert_eq!(best.len(), 8 * rows.len(), "{name}");
        for (i, (&id, &expected)) in best.iter().zip(logits).enumerate() {
            let off = f64::from((rows[i / 8].raw[id as usize] - expected).abs());
            (sum, count, worst) = (sum + off, count + 1, worst.max(off));
        }
        for (row, &expected) in rows.iter().zip(&golden[&format!("{name}.log_sum_exp")]) {
            worst = worst.max(f64::from((row.raw_lse - expected).abs()));
        }
        for (step, margin) in numbers(&case["margins"]).into_iter().enumerate() {
            let row = &rows[prompt.len() - 1 + step].raw;
            let top = (0..row.len())
                .max_by(|&a, &b| row[a].total_cmp(&row[b]))
                .unwrap();
            if margin > sure {
                assert_eq!(
                    TokenId(top as u32),
                    greedy[step],
                    "{name}, step {step}, margin {margin}"
                );
            }
        }
    }
    assert!(count > 4000, "only {count} logits were compared");
    (sum / count as f64, worst)
}

#[test]
fn rendering_and_tokenisation_match_the_reference_tools() {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
    let template = ChatTemplate::from_vocab(&loaded.vocab).unwrap();
    let policy = ConversationPolicy {
        late_system: LateSystem::User,
        thinking_default: None,
        now_unix: 0,
    };
    for case in cases() {
        let mut body = json!({ "messages": case["messages"] });
        for field in ["tools", "enable_thinking"] {
            if !case[field].is_null() {
                body[field] = case[field].clone();
            }
        }
        let request = chat_request(body.to_string().as_bytes()).unwrap();
        let rendered = template
            .render(&request.conversation(&policy).unwrap())
            .unwrap();
        assert_eq!(rendered.text, case["prompt"].as_str().unwrap());
        assert_eq!(
            tokenizer.encode_rendered(&rendered).unwrap(),
            ids(&case["prompt_ids"])
        );
        assert_eq!(
            tokenizer.decode(&ids(&case["greedy_ids"])),
            case["greedy_text"].as_str().unwrap()
        );
    }
}

#[test]
fn reference_logits_match_the_independent_implementation() {
    let (mean, worst) = compare_with_golden(REFERENCE, 1e-3);
    assert!(worst < 1e-3 && mean < 1e-4, "mean {mean}, worst {worst}");
}

#[test]
fn fast_path_logits_are_within_the_error_of_eight_bit_activations() {
    let (mean, worst) = compare_with_golden(FAST, 1.5);
    assert!(mean < 0.06, "mean {mean}, worst {worst}");
}

#[test]
fn residual_stream_at_captured_layers_matches_golden() {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let cases = cases();
    let code = cases.iter().find(|case| case["name"] == "code").unwrap();
    let tokens = [ids(&code["prompt_ids"]), ids(&code["greedy_ids"])].concat();
    let mut runner = CpuBackend::new(REFERENCE)
        .open_inspected(load_config(&loaded, REFERENCE), &mut |_| {})
        .unwrap();
    let hidden_states = runner.hidden_states(&tokens[..48]).unwrap();
    let golden = &tensors()["code.taps"];
    let per_layer = 48 * loaded.spec.hidden;
    for (layer, expected) in [1, 3, 5, 7, 10]
        .into_iter()
        .zip(golden.chunks_exact(per_layer))
    {
        let hidden = loaded.spec.hidden;
        for (found, expected) in hidden_states[layer]
            .chunks(hidden)
            .zip(expected.chunks(hidden))
        {
            // A few channels of the residual stream grow to thousands, and their rounding affects
            // the others.
            let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let allowed = 1e-4 + 1e-5 * largest;
            for (a, b) in found.iter().zip(expected) {
                let off = (a - b).abs();
                assert!(
                    off <= allowed,
                    "after layer {layer}: {a}, not {b}, of at most {largest}"
                );
            }
        }
    }
}
