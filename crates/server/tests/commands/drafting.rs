//! Tests of drafts on the command line: flags, logits of a block, trees, and draft files.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::client::ServerProcess;
use crate::process::{good, hearth, ids, model};

fn ember(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models/ember")
        .join(name)
}

/// Writes a NumPy file of f32 `[rows, cols]`.
fn write_npy(path: &Path, rows: usize, values: &[f32]) {
    let cols = values.len() / rows;
    let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((dict.len() as u16).to_le_bytes());
    bytes.extend(dict.as_bytes());
    bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    fs::write(path, bytes).unwrap();
}

fn numbers(tree: &Value, key: &str) -> Vec<f64> {
    let list = tree[key].as_array().unwrap();
    list.iter().map(|n| n.as_f64().unwrap()).collect()
}

#[test]
fn tree_command_prints_nodes_in_creation_order() {
    let dir = tempfile::tempdir().unwrap();
    let logits = dir.path().join("logits.npy");
    let ln = |p: f32| p.ln();
    // Probabilities of three tokens at two positions.
    let rows = [ln(0.5), ln(0.4), ln(0.1), ln(0.1), ln(0.1), ln(0.8)];
    write_npy(&logits, 2, &rows);
    let done = good(
        "tree --logits {} --budget 4 --top-k 2 --no-chain-seed",
        &[&logits],
    );
    let tree: Value = serde_json::from_str(&done.out).unwrap();
    // Probabilities 0.5, 0.4 (sibling), 0.4 (child; ties go to the sibling), 0.32.
    assert_eq!(numbers(&tree, "token"), [0.0, 1.0, 2.0, 2.0]);
    assert_eq!(numbers(&tree, "depth"), [1.0, 1.0, 2.0, 2.0]);
    assert_eq!(numbers(&tree, "parent"), [0.0, 0.0, 1.0, 2.0]);
    for (found, probability) in numbers(&tree, "weight")
        .iter()
        .zip([0.5_f64, 0.4, 0.4, 0.32])
    {
        assert!(
            (found - probability.ln()).abs() < 1e-5,
            "{found} for {probability}"
        );
    }
    let done = good("tree --logits {} --budget 3 --top-k 2", &[&logits]);
    let tree: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(
        numbers(&tree, "token"),
        [0.0, 2.0, 1.0],
        "the greedy chain comes first"
    );
    let empty = good("tree --logits {} --budget 0", &[&logits]);
    assert_eq!(
        empty.out.trim(),
        r#"{"token":[],"depth":[],"parent":[],"weight":[]}"#
    );
    fs::write(&logits, b"no numbers").unwrap();
    let words = ["tree", "--logits", logits.to_str().unwrap()];
    let done = hearth(&words);
    assert_eq!(done.code, Some(1));
    assert!(done.err.contains("not a NumPy array"), "{}", done.err);
}

#[test]
fn draft_logits_agree_between_reference_and_simd() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("ids.json");
    let list: Vec<u32> = (0..60).map(|i| (i * 37 + 11) % 8000).collect();
    fs::write(&tokens, serde_json::to_string(&list).unwrap()).unwrap();
    let mut found = Vec::new();
    for flag in ["--device cpu", "--cpu-reference"] {
        let out = dir.path().join("block.npy");
        let line = format!("eval {{}} {flag} --draft {{}} --ids {{}} --at 41 --draft-logits {{}}");
        let (target, draft) = (ember("ember.gguf"), ember("ember-draft.gguf"));
        good(&line, &[&target, &draft, &tokens, &out]);
        let bytes = fs::read(&out).unwrap();
        let values: Vec<f32> = bytes[bytes.len() - 4 * 15 * 8192..]
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| f32::from_le_bytes(*word))
            .collect();
        assert!(String::from_utf8_lossy(&bytes[..128]).contains("(15, 8192)"));
        found.push(values);
    }
    let size = found[1].iter().map(|x| f64::from(x.abs())).sum::<f64>();
    let pairs = found[0].iter().zip(&found[1]);
    let off = pairs.map(|(a, b)| f64::from((a - b).abs())).sum::<f64>();
    assert!(off > 0.0 && off < 0.05 * size, "{off} of {size}");
}

fn check_refused(line: &str, parts: &[&str]) {
    let words: Vec<&str> = line.split(' ').collect();
    let done = hearth(&words);
    assert!(
        done.code.is_some_and(|code| code > 0),
        "{line} was accepted"
    );
    for part in parts {
        assert!(
            done.err.contains(part),
            "{line}: no '{part}' in {}",
            done.err
        );
    }
}

#[test]
fn invalid_draft_flags_are_refused_by_name() {
    let (model, ids) = (model(), ids());
    let (model, ids) = (model.display(), ids.display());
    let draft = ember("ember-draft.gguf");
    let draft = draft.display();
    let eval = format!("eval {model} --ids {ids} --draft-logits x.npy");
    check_refused(
        &format!("{eval} --draft {draft} --at 3"),
        &["ember-draft.gguf", "does not draft for"],
    );
    check_refused(&eval, &["--draft"]);
    let serve = "serve --dry-run --device cpu";
    check_refused(
        &format!("{serve} --draft-device cup"),
        &["--draft-device", "cup", "unknown device"],
    );
    check_refused(&format!("{serve} --ddtree-budget 64"), &["64", "0..=63"]);
    check_refused(
        &format!("{serve} --ddtree --no-ddtree"),
        &["cannot be used with"],
    );
    check_refused(&format!("{serve} --draft {model}"), &["as a draft"]);
    check_refused(&format!("{serve} --draft nowhere.gguf"), &["nowhere.gguf"]);
}

#[test]
fn dry_run_reports_the_draft() {
    let with = good("serve --dry-run --device cpu --max-ctx 1024", &[]);
    assert!(
        with.out.contains("draft ember-draft: 4 layers"),
        "{}",
        with.out
    );
    assert!(with.out.contains("trees of up to 22"), "{}", with.out);
    let chain = good(
        "serve --dry-run --device cpu --max-ctx 1024 --no-ddtree --ddtree-budget 9",
        &[],
    );
    assert!(chain.out.contains("chains of up to 9"), "{}", chain.out);
    let of_sources = |flags: &str| {
        let line = format!("serve --dry-run --device cpu --max-ctx 1024 {flags}");
        let out = good(line.trim_end(), &[]).out;
        (
            out.contains("draft ember-draft"),
            out.contains("suffix matches"),
        )
    };
    assert_eq!(of_sources(""), (true, true));
    assert_eq!(of_sources("--draft-sources suffix"), (false, true));
    assert_eq!(of_sources("--lookup 0"), (true, false));
    check_refused(
        "serve --dry-run --device cpu --draft-sources suffix --lookup 0",
        &["--draft-sources", "--lookup-ngram"],
    );
    let without = good(
        "serve --dry-run --device cpu --max-ctx 1024 --no-speculation",
        &[],
    );
    assert!(!without.out.contains("ember-draft"), "{}", without.out);
    let apart = good(
        "serve --dry-run --device cpu --max-ctx 1024 --draft-device cpu:1",
        &[],
    );
    assert!(apart.out.contains("cpu: the draft; "), "{}", apart.out);
}

#[test]
fn inspect_reads_a_draft_alone_and_with_its_model() {
    let alone = good("inspect {}", &[&ember("ember-draft.gguf")]);
    for part in ["dflash-draft", "taps", "block", "mask token"] {
        assert!(alone.out.contains(part), "no '{part}' in {}", alone.out);
    }
    let line = "inspect {} --draft {} --device cpu --max-ctx 1024 --json";
    let beside = good(line, &[&ember("ember.gguf"), &ember("ember-draft.gguf")]);
    let report: Value = serde_json::from_str(&beside.out).unwrap();
    assert_eq!(report["draft"]["layers"], 4);
    assert!(report["plan"]["draft_bytes"].as_u64().unwrap() > 5_000_000);
    let line = "inspect {} --draft {} --json --plan --vram 24GiB,12GiB --draft-device cuda:1 --max-ctx 1024";
    let apart = good(line, &[&ember("ember.gguf"), &ember("ember-draft.gguf")]);
    let report: Value = serde_json::from_str(&apart.out).unwrap();
    let part = |i: usize| {
        let part = &report["placement"][i];
        ["device", "head", "draft"].map(|key| part[key].clone())
    };
    assert_eq!(part(0), [json!("cuda:0"), json!(true), json!(false)]);
    assert_eq!(part(1), [json!("cuda:1"), json!(false), json!(true)]);
}

#[test]
fn greedy_replies_are_identical_with_trees_chains_and_no_draft() {
    let reply = |flags: &str| {
        let line = format!(
            "run {flags} --device cpu --max-ctx 1024 --temperature 0 --thinking off -n 40 Hello!"
        );
        good(&line, &[]).out
    };
    let plain = reply("--no-speculation");
    assert!(!plain.trim().is_empty());
    for flags in [
        "--ddtree-cost-stop off",
        "--ddtree-cost-stop off --no-ddtree",
        "--ddtree-cost-stop off --ddtree-chain-seed --ddtree-budget 40 --lazy-draft --batch-invariant",
        "--ddtree-cost-stop off --draft-sources suffix --lookup 1",
        "--ddtree-cost-stop off --lookup 0",
        "--ddtree-cost-stop off --lookup 0 --draft-device cpu:1",
    ] {
        assert_eq!(reply(flags), plain, "{flags}");
    }
}

#[test]
fn replies_and_metrics_report_acceptance_and_requests_can_disable_drafting() {
    let flags = ["--ddtree-cost-stop", "off", "--max-ctx", "2048"];
    let server = ServerProcess::start(&flags);
    let send = |more: &str| {
        let turn = "Write a Rust function count_lamps that counts how often each entry occurs.";
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":"{turn}"}}],"temperature":0,"max_tokens":60{more}}}"#
        );
        server.request("/v1/chat/completions", &body).json()
    };
    let drafted = send("");
    let (usage, timings) = (&drafted["usage"], &drafted["timings"]);
    let details = &usage["completion_tokens_details"];
    let accepted = details["accepted_prediction_tokens"].as_u64().unwrap();
    let rejected = details["rejected_prediction_tokens"].as_u64().unwrap();
    assert!(accepted > 10 && rejected > 0, "{usage}");
    assert_eq!(
        timings["draft_n"].as_u64(),
        Some(accepted + rejected),
        "{timings}"
    );
    assert_eq!(timings["draft_n_accepted"].as_u64(), Some(accepted));
    let by_block = &timings["draft_by_source"]["block"];
    let block = by_block["draft_n_accepted"].as_u64().unwrap();
    assert!((1..=accepted).contains(&block), "{timings}");
    // The bundled model's own head drafts beside the block draft.
    let by_head = timings["draft_by_source"]["mtp"]["draft_n"]
        .as_u64()
        .unwrap();
    assert!(
        timings["tokens_per_step"].as_f64().unwrap() > 1.5,
        "{timings}"
    );
    assert!(timings["draft_ms"].as_f64().unwrap() > 0.0, "{timings}");
    assert!(timings["verify_ms"].as_f64().unwrap() > 0.0, "{timings}");
    let by_depth = timings["accept_by_depth"].as_array().unwrap();
    let falls = by_depth
        .windows(2)
        .all(|pair| pair[0].as_f64() >= pair[1].as_f64());
    assert!(!by_depth.is_empty() && falls, "{timings}");
    let plain = send(r#","speculative":false"#);
    assert_eq!(plain["choices"], drafted["choices"]);
    assert_eq!(plain["timings"]["draft_n"], 0);
    assert!(plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].is_null());
    let metrics = server.request("/metrics", "").body;
    for line in [
        format!("hearth_draft_tokens_total {}", accepted + rejected),
        format!("hearth_draft_tokens_accepted_total {accepted}"),
        "hearth_undrafted_steps_total 0".to_owned(),
        format!(r#"hearth_draft_tokens_accepted_by_source_total{{source="block"}} {block}"#),
        format!(r#"hearth_draft_tokens_by_source_total{{source="mtp"}} {by_head}"#),
        r#"hearth_draft_tokens_accepted_by_depth_total{depth="1"}"#.to_owned(),
        r#"hearth_decode_step_seconds_sum{part="verify"}"#.to_owned(),
    ] {
        assert!(metrics.contains(&line), "no '{line}' in\n{metrics}");
    }
}

/// A tiny model with random weights and a multi-token-prediction head.
fn model_with_head(dir: &Path) -> PathBuf {
    let path = dir.join("head.gguf");
    good("synth tiny-hybrid+mtp:q8_0 {}", &[&path]);
    path
}

#[test]
fn models_with_a_head_draft_by_themselves_and_give_the_same_replies() {
    let dir = tempfile::tempdir().unwrap();
    let path = model_with_head(dir.path());
    let path = path.to_str().unwrap();
    let bodies = [
        r#""temperature":0,"max_tokens":40"#,
        r#""temperature":0.8,"seed":11,"n":3,"max_tokens":40"#,
        r#""temperature":1,"seed":5,"response_format":{"type":"json_object"},"max_tokens":30"#,
    ];
    let served = |flags: &[&str]| {
        let common = [path, "--device", "cpu", "--max-ctx", "1024"];
        let server = ServerProcess::start(&[&common[..], flags].concat());
        let replies = bodies.map(|more| {
            let body =
                format!(r#"{{"messages":[{{"role":"user","content":"Say it twice."}}],{more}}}"#);
            server.request("/v1/chat/completions", &body).json()
        });
        (server.request("/props", "").json(), replies)
    };
    let (props, drafted) = served(&["--ddtree-cost-stop", "off"]);
    assert_eq!(props["speculative"]["source"], "mtp");
    assert_eq!(props["speculative"]["draft_depth"], 7);
    assert_eq!(props["speculative_mode"], "mtp");
    assert_eq!(props["speculative"]["sources"], json!(["mtp", "suffix"]));
    let (props, _) = served(&["--no-mtp"]);
    assert_eq!(props["speculative"]["sources"], json!(["suffix"]));
    let (props, plain) = served(&["--no-speculation"]);
    assert_eq!(props["speculative"]["enabled"], false);
    for (drafted, plain) in drafted.iter().zip(&plain) {
        assert_eq!(drafted["choices"], plain["choices"]);
        assert!(
            drafted["timings"]["draft_n"].as_u64() > Some(0),
            "{drafted}"
        );
        assert_eq!(plain["timings"]["draft_n"], 0);
    }
}

#[test]
fn head_is_described_and_its_logits_follow_its_greedy_chain() {
    let dir = tempfile::tempdir().unwrap();
    let path = model_with_head(dir.path());
    let shown = good("inspect {}", &[&path]);
    assert!(shown.out.contains("mtp head"), "{}", shown.out);
    let rows = ["--device cpu", "--cpu-reference"].map(|flag| {
        let out = dir.path().join("head.npy");
        let chain = dir.path().join("chain.json");
        let line = format!(
            "eval {{}} {flag} --draft mtp --ids {{}} --at 41 --draft-depth 3 --draft-logits {{}} \
             --draft-chain {{}}"
        );
        good(&line, &[&path, &ids(), &out, &chain]);
        let chain: Vec<usize> = serde_json::from_slice(&fs::read(&chain).unwrap()).unwrap();
        let bytes = fs::read(&out).unwrap();
        assert!(String::from_utf8_lossy(&bytes[..128]).contains("(3, 1024)"));
        let values = bytes[bytes.len() - 4 * 3 * 1024..].as_chunks::<4>().0;
        let values = values.iter().map(|word| f32::from_le_bytes(*word));
        let values: Vec<f32> = values.collect();
        let best = values.chunks(1024).map(|row| {
            let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter().position(|logit| *logit == highest).unwrap()
        });
        assert_eq!(best.collect::<Vec<_>>(), chain);
        values
    });
    let size: f32 = rows[1].iter().map(|x| x.abs()).sum();
    let off: f32 = rows[0]
        .iter()
        .zip(&rows[1])
        .map(|(a, b)| (a - b).abs())
        .sum();
    assert!(off < 0.05 * size, "{off} of {size}");
    let (path, ids) = (path.display(), ids());
    let serve = format!("serve {path} --dry-run --device cpu --max-ctx 1024");
    let line = good(&serve, &[]).out;
    assert!(
        line.contains("multi-token-prediction head drafts"),
        "{line}"
    );
    check_refused(
        &format!("{serve} --draft-sources block"),
        &["--draft-sources", "--draft"],
    );
    check_refused(
        &format!("{serve} --no-mtp --draft-sources mtp"),
        &["--draft-sources", "--no-mtp"],
    );
    let (model, ids) = (model(), ids.display().to_string());
    check_refused(
        &format!(
            "eval {} --device cpu --draft mtp --ids {ids} --at 3 --draft-logits x.npy",
            model.display()
        ),
        &["--draft mtp", "no multi-token-prediction head"],
    );
}
