//! Cost of constrained decoding: the engine thread's time to compute token masks.
//!
//! `cargo run --release -p benches --bin masks -- VOCABULARY.gguf [REQUESTS [TOKENS]]`
//!
//! The file only needs a vocabulary. Two-word tokens are added until it has TOKENS (248,320). Each
//! case has a request and a reply. The bench follows the reply token by token, each time with the
//! longest allowed token that prefixes the rest, as a model would.
//! - `node`: the mask after one token.
//! - `tree`: the masks of a draft tree, level by level: the next seven tokens of the reply, each
//!   with two allowed siblings from the reply. The matcher moves back and forth. Forced positions
//!   have one child.
//! - `begin`: the start of a reply, also on the engine thread.
//!
//! `compile` is not on it: a request waits for its grammar before it is queued.
//! REQUESTS (20) replies run per case, because a reply's first tokens find empty tables. Each case
//! prints one JSON line.

use std::collections::HashSet;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use chat::Tokenizer;
use chat::grammar::ToolCallMarkup;
use chat::openai::request::chat_request;
use chat::template::ToolCallFormat;
use contract::{TokenId, TokenKind, TokenMask, Vocab};
use decode::Constraint;
use serde_json::{Value, json};
use server::settings::reasoning::ReasoningDefaults;
use server::text::constraints::ModelConstraints;

/// Depth of the tree, and children of each node on the path.
const DEPTH: usize = 7;
const CHILDREN: usize = 3;

struct MaskCase {
    name: &'static str,
    request: Value,
    reply: String,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next().map(PathBuf::from) else {
        bail!("usage: masks VOCABULARY.gguf [REQUESTS [TOKENS]]");
    };
    let mut count = |default: usize| -> Result<usize> {
        arguments.next().map_or(Ok(default), |argument| {
            argument.parse().with_context(|| argument.clone())
        })
    };
    let (requests, tokens) = (count(20)?, count(248_320)?);
    let mut vocab = model::load_vocab(&path).with_context(|| path.display().to_string())?;
    enlarge(&mut vocab, tokens);
    let tokenizer = Arc::new(Tokenizer::new(&vocab)?);
    let constraints_of_model = ModelConstraints::new(
        &tokenizer,
        tokenizer.eos(),
        tokenizer.n_tokens(),
        &ReasoningDefaults::default(),
    );
    for (number, case) in cases().into_iter().enumerate() {
        let line = measure(&constraints_of_model, &tokenizer, &case, requests)
            .with_context(|| case.name.to_owned())?;
        let mut out = std::io::stdout().lock();
        let tables = (number == 0).then_some("with the vocabulary's tables");
        writeln!(
            out,
            "{}",
            json!({"bench": "masks", "case": case.name, "vocab": tokenizer.n_tokens(),
                "compile_ms": line.compile, "compile": tables, "tokens": line.tokens, "requests": requests,
                "begin_ms": summary(line.begin), "node_ms": summary(line.node),
                "tree_ms": summary(line.tree), "tree_nodes": line.nodes})
        )?;
    }
    Ok(())
}

fn cases() -> Vec<MaskCase> {
    let shaped = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}});
    let person = json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "age", "email", "tags"], "additionalProperties": false});
    let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"title": {"type": "string"},
        "kind": {"enum": ["folder", "file"]}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": ["title", "kind", "children"], "additionalProperties": false}}});
    let prose = "The harbour lay still under a low sun; \\\"nothing moves\\\", she wrote, and 東京 was far away. ";
    let tool = json!([{"type": "function", "function": {"name": "edit_file", "strict": true, "parameters": {"type": "object",
        "properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "text": {"type": "string"}, "force": {"type": "boolean"}},
        "required": ["path", "line", "text", "force"], "additionalProperties": false}}}]);
    vec![
        MaskCase {
            name: "person",
            request: shaped(person),
            reply: r#"{"name": "Ada Lovelace-Byron", "age": 36, "email": "ada.lovelace@analytical.example", "tags": ["mathematics", "poetical science", "エイダ"]}"#.to_owned(),
        },
        MaskCase {
            name: "long string",
            request: shaped(json!({"type": "object", "properties": {"story": {"type": "string"}}, "required": ["story"], "additionalProperties": false})),
            reply: format!(r#"{{"story": "{}"}}"#, prose.repeat(4)),
        },
        MaskCase {
            name: "bounded string",
            request: shaped(json!({"type": "object", "properties": {"story": {"type": "string", "minLength": 20, "maxLength": 600}}, "required": ["story"], "additionalProperties": false})),
            reply: format!(r#"{{"story": "{}"}}"#, prose.repeat(4)),
        },
        MaskCase {
            name: "recursive",
            request: shaped(tree),
            reply: r#"{"title": "home", "kind": "folder", "children": [{"title": "notes", "kind": "folder", "children": [{"title": "june.txt", "kind": "file", "children": []}]}]}"#.to_owned(),
        },
        MaskCase {
            name: "json_object",
            request: json!({"response_format": {"type": "json_object"}}),
            reply: r#"{"a": [1, 2.5e3, true, null], "nested": {"text": "some words in a row", "more": [{"x": -1}, {"y": "z"}]}}"#.to_owned(),
        },
        MaskCase {
            name: "json_object, long",
            request: json!({"response_format": {"type": "json_object"}}),
            reply: format!(
                "[{}]",
                r#"{"name": "a few words", "size": 120}, "#.repeat(150).trim_end_matches(", ")
            )
            .replacen('[', "{\"all\": [", 1)
                + "}",
        },
        MaskCase {
            name: "regex",
            request: json!({"regex": "([a-z]+ ){3,12}[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
            reply: "the meeting was moved to the morning of 2026-11-22".to_owned(),
        },
        MaskCase {
            name: "forced call",
            request: json!({"tools": tool, "tool_choice": "required"}),
            reply: "<tool_call>\n<function=edit_file>\n<parameter=path>\nsrc/main.rs\n</parameter>\n<parameter=line>\n120\n</parameter>\n<parameter=text>\nfn main() {\n    println!(\"{}\", 1 + 1);\n}\n</parameter>\n<parameter=force>\ntrue\n</parameter>\n</function>\n</tool_call>".to_owned(),
        },
        MaskCase {
            name: "text with strict calls",
            request: json!({"tools": tool}),
            reply: prose.repeat(4),
        },
    ]
}

/// Adds two-word tokens to the vocabulary until it has `tokens`.
fn enlarge(vocab: &mut Vocab, tokens: usize) {
    let ordinary: Vec<String> = vocab
        .tokens
        .iter()
        .zip(&vocab.kinds)
        .filter(|(text, kind)| **kind == TokenKind::Normal && text.len() > 3)
        .map(|(text, _)| text.clone())
        .collect();
    let mut known: HashSet<String> = vocab.tokens.iter().cloned().collect();
    let mut state = 0_u64;
    while vocab.tokens.len() < tokens {
        let mut pick = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            &ordinary[(state >> 33) as usize % ordinary.len()]
        };
        let word = format!("{}{}", pick(), pick());
        if known.insert(word.clone()) {
            vocab.tokens.push(word);
            vocab.kinds.push(TokenKind::Normal);
        }
    }
}

#[derive(Default)]
struct Times {
    compile: f64,
    tokens: usize,
    nodes: usize,
    begin: Vec<f64>,
    node: Vec<f64>,
    tree: Vec<f64>,
}

fn measure(
    constraints_of_model: &ModelConstraints,
    tokenizer: &Tokenizer,
    case: &MaskCase,
    requests: usize,
) -> Result<Times> {
    let mut body = case.request.clone();
    body["messages"] = json!([{"role": "user", "content": "x"}]);
    let request = chat_request(body.to_string().as_bytes())?;
    let markup = ToolCallMarkup {
        tokenizer,
        format: ToolCallFormat::XmlParameters,
    };
    let shape = request
        .output_grammar(markup)?
        .context("the request asks for no shape")?;
    let mut times = Times::default();
    let begun = Instant::now();
    let grammar = constraints_of_model.compile(&shape)?.grammar;
    times.compile = ms(begun);
    let constraints = constraints_of_model.for_text(grammar);

    let mut alone = constraints.begin(0);
    let reply = follow(&mut *alone, tokenizer, &case.reply)?;
    times.tokens = reply.len();
    let mut alone = constraints.begin(0);
    let mut trees = Vec::new();
    for (at, token) in reply.iter().enumerate() {
        trees.push(tree(&mut *alone, &reply, at));
        alone.advance(&[*token]);
    }
    times.nodes = trees.iter().map(Vec::len).max().unwrap_or(0);
    for _ in 0..requests {
        let begun = Instant::now();
        let mut constraint = constraints.begin(0);
        times.begin.push(ms(begun));
        for token in &reply {
            let begun = Instant::now();
            let _answer = ask(&mut *constraint, &[]);
            times.node.push(ms(begun));
            constraint.advance(&[*token]);
        }
        ensure!(constraint.error().is_none(), "{:?}", constraint.error());
        let mut constraint = constraints.begin(0);
        for (token, paths) in reply.iter().zip(&trees) {
            let begun = Instant::now();
            for path in paths {
                let _answer = ask(&mut *constraint, path);
            }
            times.tree.push(ms(begun));
            constraint.advance(&[*token]);
        }
        ensure!(constraint.error().is_none(), "{:?}", constraint.error());
    }
    Ok(times)
}

/// Computes the masks that the engine requests at a node.
fn ask(
    constraint: &mut dyn Constraint,
    path: &[TokenId],
) -> (Option<TokenId>, Option<Arc<TokenMask>>) {
    match constraint.forced(path) {
        Some(token) => (Some(token), None),
        None => (None, constraint.allowed(path)),
    }
}

/// The tokens of `reply` that the constraint allows, in order.
fn follow(
    constraint: &mut dyn Constraint,
    tokenizer: &Tokenizer,
    reply: &str,
) -> Result<Vec<TokenId>> {
    let mut rest = reply.as_bytes();
    let mut tokens = Vec::new();
    while !rest.is_empty() {
        let (forced, mask) = ask(constraint, &[]);
        let fits = |id: &TokenId| {
            let bytes = tokenizer.bytes(*id);
            !bytes.is_empty() && rest.starts_with(bytes)
        };
        let token = match forced {
            Some(token) => Some(token).filter(fits),
            None => ids(tokenizer)
                .filter(|id| mask.as_ref().is_none_or(|mask| mask.contains(*id)))
                .filter(fits)
                .max_by_key(|id| tokenizer.bytes(*id).len()),
        };
        let token = token.with_context(|| {
            format!(
                "the reply may not go on with {:?}",
                String::from_utf8_lossy(rest)
            )
        })?;
        rest = &rest[tokenizer.bytes(token).len()..];
        constraint.advance(&[token]);
        tokens.push(token);
    }
    Ok(tokens)
}

/// The paths to a tree's nodes along `reply[at..]`, level by level. Siblings are other words of the
/// reply, as a draft would propose.
fn tree(constraint: &mut dyn Constraint, reply: &[TokenId], at: usize) -> Vec<Vec<TokenId>> {
    let mut paths = vec![Vec::new()];
    let ahead = &reply[at..reply.len().min(at + DEPTH)];
    for (depth, token) in ahead.iter().enumerate() {
        let path = &ahead[..depth];
        paths.push(ahead[..=depth].to_vec());
        if let (None, Some(mask)) = ask(constraint, path) {
            let others = reply[at + depth..].iter().chain(&reply[..at + depth]);
            let others = others.filter(|id| *id != token && mask.contains(**id));
            let mut siblings: Vec<TokenId> = Vec::new();
            for id in others {
                if siblings.len() < CHILDREN - 1 && !siblings.contains(id) {
                    siblings.push(*id);
                }
            }
            paths.extend(siblings.into_iter().map(|id| [path, &[id]].concat()));
        }
    }
    paths
}

fn ids(tokenizer: &Tokenizer) -> impl Iterator<Item = TokenId> {
    (0..tokenizer.n_tokens()).filter_map(|id| u32::try_from(id).ok().map(TokenId))
}

fn ms(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

fn summary(mut samples: Vec<f64>) -> Value {
    samples.sort_by(f64::total_cmp);
    let at = |part: f64| {
        let place = (part * (samples.len() - 1) as f64).round() as usize;
        (samples[place] * 1e4).round() / 1e4
    };
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    json!({"median": at(0.5), "mean": (mean * 1e4).round() / 1e4, "p95": at(0.95), "p99": at(0.99), "max": at(1.0)})
}
