//! DFlash2 and DSpark drafts on the command line and in the server: logits and chains, memory by
//! source, refusals, and replies that drafting does not change.

use std::fs;
use std::path::{Path, PathBuf};

use conformance::drafts2::{Draft2Case, NAMES, TARGET};
use serde_json::Value;

use crate::client::ServerProcess;
use crate::process::{good, hearth};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../conformance/fixtures/models")
        .join(name)
}

fn target() -> PathBuf {
    fixture(&format!("{TARGET}.gguf"))
}

/// Writes a case's draft as a GGUF file.
fn write_draft(dir: &Path, case: &Draft2Case) -> PathBuf {
    let path = dir.join(format!("{}.gguf", case.name));
    fs::write(&path, case.gguf().unwrap()).unwrap();
    path
}

#[test]
fn eval_writes_the_logits_and_the_chain_of_an_independent_implementation() {
    let dir = tempfile::tempdir().unwrap();
    let described: Value =
        serde_json::from_slice(&fs::read(fixture(&format!("{TARGET}.json"))).unwrap()).unwrap();
    let ids = dir.path().join("ids.json");
    fs::write(&ids, described["ids"].to_string()).unwrap();
    let (logits, chain) = (dir.path().join("l.npy"), dir.path().join("chain.json"));
    for name in NAMES {
        let case = Draft2Case::open(name).unwrap();
        let draft = write_draft(dir.path(), &case);
        let result = &case.results[1];
        let line = format!(
            "eval {{}} --cpu-reference --draft {{}} --draft-width {} --ids {{}} --at {} \
             --draft-logits {{}} --draft-chain {{}}",
            case.rows, result.at
        );
        good(&line, &[&target(), &draft, &ids, &logits, &chain]);
        let found: Vec<u32> = serde_json::from_slice(&fs::read(&chain).unwrap()).unwrap();
        let expected: Vec<u32> = result.chain.iter().map(|token| token.0).collect();
        assert_eq!(found, expected, "{name}");
        let bytes = fs::read(&logits).unwrap();
        let shape = format!("({}, 512)", expected.len());
        assert!(
            String::from_utf8_lossy(&bytes[..128]).contains(&shape),
            "{name}"
        );
        let values = bytes[bytes.len() - 4 * result.logits.len()..]
            .as_chunks::<4>()
            .0;
        for (expected, found) in result.logits.iter().zip(values) {
            let found = f32::from_le_bytes(*found);
            let same = !expected.is_finite() && !found.is_finite();
            assert!(
                same || (expected - found).abs() < 1e-3,
                "{name}: {expected} {found}"
            );
        }
    }
    let case = Draft2Case::open(NAMES[0]).unwrap();
    let draft = write_draft(dir.path(), &case);
    let line = [
        "eval",
        target().to_str().unwrap(),
        "--draft",
        draft.to_str().unwrap(),
        "--ids",
        ids.to_str().unwrap(),
        "--at",
        "9",
        "--logits",
        logits.to_str().unwrap(),
    ]
    .map(str::to_owned);
    let done = hearth(&line.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(done.err.contains("--draft-chain"), "{}", done.err);
}

#[test]
fn a_quantised_draft_with_a_confidence_head_loads() {
    let dir = tempfile::tempdir().unwrap();
    let name = NAMES.iter().find(|name| **name == "markov").unwrap();
    let draft = write_draft(dir.path(), &Draft2Case::open(name).unwrap());
    let small = dir.path().join("small.gguf");
    good("quantize {} {} q8_0", &[&draft, &small]);
    let line = "inspect {} --draft {} --device cpu --max-ctx 256 --json";
    let report: Value = serde_json::from_str(&good(line, &[&target(), &small]).out).unwrap();
    let block = report["draft_sources"]["block"].as_str().unwrap();
    assert!(block.starts_with("DSpark fits"), "{block}");
}

#[test]
fn inspect_says_which_sources_fit_and_what_each_costs() {
    let dir = tempfile::tempdir().unwrap();
    for (name, kind) in [("pairs", "DFlash2"), ("markov", "DSpark")] {
        let name = NAMES.iter().find(|other| **other == name).unwrap();
        let draft = write_draft(dir.path(), &Draft2Case::open(name).unwrap());
        let line = "inspect {} --draft {} --device cpu --max-ctx 256 --json";
        let report: Value = serde_json::from_str(&good(line, &[&target(), &draft]).out).unwrap();
        assert_eq!(report["draft"]["kind"], kind);
        let sources = &report["draft_sources"];
        assert!(
            sources["block"]
                .as_str()
                .unwrap()
                .starts_with(&format!("{kind} fits"))
        );
        assert!(
            sources["block_bytes"].as_u64().unwrap() > 100_000,
            "{sources}"
        );
        assert!(
            sources["mtp"]
                .as_str()
                .unwrap()
                .contains("no multi-token-prediction head")
        );
        assert!(sources["suffix"].as_str().unwrap().contains("fits"));
        let alone: Value = serde_json::from_str(&good("inspect {} --json", &[&draft]).out).unwrap();
        assert_eq!(alone["draft"]["kind"], kind);
    }
    // A draft of another model is named with the reason, behind the report.
    let draft = write_draft(dir.path(), &Draft2Case::open(NAMES[0]).unwrap());
    let other = dir.path().join("other.gguf");
    good("synth tiny-hybrid+mtp:q8_0 {}", &[&other]);
    let line = [
        "inspect",
        other.to_str().unwrap(),
        "--draft",
        draft.to_str().unwrap(),
        "--device",
        "cpu",
        "--max-ctx",
        "256",
    ];
    let done = hearth(&line);
    assert_eq!(done.code, Some(1));
    for part in ["does not fit:", "draft sources", "mtp bytes"] {
        assert!(done.out.contains(part), "no '{part}' in {}", done.out);
    }
    assert!(!done.err.is_empty());
}

#[test]
fn replies_are_the_same_with_and_without_the_later_drafts() {
    let dir = tempfile::tempdir().unwrap();
    let target = target();
    let bodies = [
        r#""temperature":0,"max_tokens":40"#,
        r#""temperature":0.8,"seed":11,"n":3,"max_tokens":40"#,
        r#""temperature":1,"seed":5,"max_tokens":60,"response_format":{"type":"json_schema",
            "json_schema":{"name":"codes","schema":{"type":"array","minItems":6,"maxItems":6,
            "items":{"type":"integer","minimum":100,"maximum":999}}}}"#,
    ];
    let served = |flags: &[&str]| {
        let common = [
            target.to_str().unwrap(),
            "--device",
            "cpu",
            "--max-ctx",
            "512",
        ];
        let server = ServerProcess::start(&[&common[..], flags].concat());
        bodies.map(|more| {
            let body =
                format!(r#"{{"messages":[{{"role":"user","content":"Say it twice."}}],{more}}}"#);
            server.request("/v1/chat/completions", &body).json()
        })
    };
    let plain = served(&["--no-speculation"]);
    for (name, width) in [
        ("pairs", "0"),
        ("pairs", "14"),
        ("markov", "0"),
        ("markov_part", "9"),
    ] {
        let name = NAMES.iter().find(|other| **other == name).unwrap();
        let draft = write_draft(dir.path(), &Draft2Case::open(name).unwrap());
        let draft = ["--draft", draft.to_str().unwrap(), "--draft-width", width];
        let flags = [&["--ddtree-cost-stop", "off"][..], &draft].concat();
        let drafted = served(&flags);
        for (drafted, plain) in drafted.iter().zip(&plain) {
            assert_eq!(drafted["choices"], plain["choices"], "{name}");
            let draft_ms = drafted["timings"]["draft_ms"].as_f64();
            assert!(draft_ms > Some(0.0), "{name}: {drafted}");
        }
        // The grammar drops what a random draft proposes.
        for drafted in &drafted[..2] {
            let drafts = drafted["timings"]["draft_n"].as_u64();
            assert!(drafts > Some(0), "{name}: {drafted}");
        }
    }
}
