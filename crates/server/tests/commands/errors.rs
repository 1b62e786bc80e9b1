//! Tests of errors: each names what is wrong, where, and what to do.

use std::fs;

use crate::process::{hearth, ids, model, models};

/// Runs a command line that must fail with `code` and an error that contains `parts`.
fn check_refused(args: &[&str], code: i32, parts: &[&str]) {
    let done = hearth(args);
    assert_eq!(done.code, Some(code), "{args:?}: {}", done.err);
    assert_eq!(done.out, "", "{args:?}");
    let first = done.err.lines().find(|line| line.starts_with("error: "));
    let first = first.unwrap_or_else(|| panic!("{args:?}: {}", done.err));
    assert!(!done.err.contains("panicked"), "{}", done.err);
    for part in parts {
        assert!(done.err.contains(part), "{part} in {first}");
    }
}

#[test]
fn unreadable_files_are_named_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let whole = fs::read(model()).unwrap();
    let missing = dir.path().join("missing.gguf");
    let cases = [
        (
            missing.to_str().unwrap().to_owned(),
            vec!["missing.gguf", "No such file"],
        ),
        (write("empty.gguf", b""), vec!["empty.gguf"]),
        (write("cut.gguf", &whole[..100]), vec!["cut.gguf"]),
        (
            write("cut-late.gguf", &whole[..whole.len() - 100_000]),
            vec!["cut-late.gguf", "tensor"],
        ),
        (
            write("picture.gguf", b"\x89PNG\r\n\x1a\n and more"),
            vec!["picture.gguf", "not a GGUF file"],
        ),
        (
            dir.path().to_str().unwrap().to_owned(),
            vec!["not a plain file"],
        ),
    ];
    for (path, parts) in &cases {
        check_refused(&["inspect", path], 1, parts);
        check_refused(&["run", path, "Hello"], 1, parts);
        check_refused(&["serve", path, "--dry-run"], 1, parts);
        check_refused(&["quantize", path, "out.gguf", "q8_0"], 1, parts);
        check_refused(&["tokenize", path], 1, parts);
    }
}

#[test]
fn unusable_tokenizer_is_refused_with_its_file_and_key() {
    let mut bytes = fs::read(model()).unwrap();
    let key = b"tokenizer.ggml.merges";
    let after = bytes.windows(key.len()).position(|part| part == key);
    // The types of array and items, the count of items, and the length of the first.
    let first_merge = after.unwrap() + key.len() + 4 + 4 + 8 + 8;
    bytes[first_merge] = 1;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("merges.gguf");
    fs::write(&path, bytes).unwrap();
    let path = path.to_str().unwrap();
    let parts = ["merges.gguf: tokenizer.ggml", "is not a token"];
    check_refused(&["tokenize", path], 1, &parts);
    check_refused(&["run", path, "Hello"], 1, &parts);
    check_refused(&["serve", "--port", "0", path], 1, &parts);
}

#[test]
fn unsupported_architecture_is_inspected_and_tokenized_but_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other.gguf");
    let whole = fs::read(model()).unwrap();
    // A replacement of equal length in the metadata keeps all offsets.
    let at = whole
        .windows(6)
        .position(|bytes| bytes == b"qwen35")
        .unwrap();
    let mut other = whole;
    other[at..at + 6].copy_from_slice(b"llamas");
    fs::write(&path, other).unwrap();
    let done = hearth(&["inspect", path.to_str().unwrap()]);
    assert_eq!(done.code, Some(1));
    assert!(
        done.out.contains("architecture        llamas"),
        "{}",
        done.out
    );
    assert!(
        done.err.contains("llamas") && done.err.contains("not supported"),
        "{}",
        done.err
    );
    let ids = crate::process::hearth_with(b"Hello", &["tokenize", path.to_str().unwrap()]);
    assert_eq!(ids.code, Some(0), "{}", ids.err);
    check_refused(&["run", path.to_str().unwrap(), "Hello"], 1, &["llamas"]);
}

#[test]
fn unknown_names_are_refused_with_the_known_names() {
    let model = model();
    let name = model.to_str().unwrap();
    check_refused(
        &["quantize", name, "out.gguf", "q4_k_x"],
        1,
        &["recipe q4_k_x", "q4_k_m"],
    );
    check_refused(
        &["synth", "qwen9-1b:q8_0", "out.gguf"],
        1,
        &["qwen9-1b", "qwen3.5-0.8b"],
    );
    check_refused(&["synth", "tiny-dense:q9", "out.gguf"], 1, &["q9", "q8_0"]);
    check_refused(
        &["run", name, "Hello", "--device", "gpu"],
        1,
        &["--device gpu", "cuda:N"],
    );
    check_refused(
        &["run", name, "Hello", "--kv-type", "q9"],
        1,
        &["--kv-type q9", "q8_0"],
    );
    check_refused(&["serve", "--prot", "1"], 2, &["--prot", "--port"]);
    check_refused(&["server"], 2, &["server", "serve"]);
    check_refused(
        &["serve", "--late-system", "maybe"],
        2,
        &["--late-system", "hoist"],
    );
}

#[test]
fn numbers_out_of_range_name_their_flag() {
    let model = model();
    let name = model.to_str().unwrap();
    let huge = [
        "serve",
        name,
        "--dry-run",
        "--max-ctx",
        "16777216",
        "--max-sequences",
        "4096",
        "--kv-pool",
        "68719476736",
    ];
    check_refused(&huge, 1, &["--max-ctx 16777216", "fewer sequences", "free"]);
    check_refused(
        &["run", name, "Hi", "--max-ctx", "99999999999999"],
        1,
        &["--max-ctx", "at most"],
    );
    check_refused(
        &["run", name, "Hi", "--max-ctx", "0"],
        2,
        &["--max-ctx", "at least 1"],
    );
    check_refused(
        &["run", name, "Hi", "--max-ctx", "8"],
        1,
        &["maximum context length", "8 tokens"],
    );
    check_refused(
        &["run", name, "Hi", "--chunk", "100"],
        1,
        &["--chunk 100", "64"],
    );
    check_refused(
        &["run", name, "Hi", "--temperature", "3"],
        2,
        &["--temperature", "0 to 2"],
    );
    check_refused(&["serve", "--port", "70000"], 2, &["--port"]);
    check_refused(
        &["serve", "--sse-ping-interval", "0"],
        2,
        &["--sse-ping-interval"],
    );
    for flag in [
        "--queue-timeout",
        "--request-timeout",
        "--read-timeout",
        "--write-timeout",
        "--shutdown-timeout",
        "--sse-ping-interval",
    ] {
        check_refused(&["serve", flag, "18446744073709551615"], 2, &[flag]);
    }
    let small_pool = ["serve", name, "--dry-run", "--kv-pool", "64"];
    check_refused(&small_pool, 1, &["--kv-pool 64", "512"]);
}

#[test]
fn invalid_ids_are_named_with_their_index() {
    let dir = tempfile::tempdir().unwrap();
    let model = model();
    let name = model.to_str().unwrap();
    let check = |text: &str, parts: &[&str]| {
        let path = dir.path().join("bad.json");
        fs::write(&path, text).unwrap();
        check_refused(
            &[
                "eval",
                name,
                "--ids",
                path.to_str().unwrap(),
                "--logits",
                "no.npy",
            ],
            1,
            parts,
        );
    };
    check(
        "[1, 2, 1024]",
        &["bad.json", "id 1024 at index 2", "vocabulary of 1024"],
    );
    check("[]", &["bad.json", "no ids"]);
    check("[1, -2]", &["bad.json", "JSON array of token ids"]);
    check("{\"ids\": [1]}", &["bad.json", "JSON array of token ids"]);
    let ids = ids();
    let ids = ids.to_str().unwrap();
    check_refused(&["eval", name, "--ids", ids], 2, &["--logits"]);
    check_refused(
        &["eval", name, "--ids", ids, "--greedy", "3"],
        2,
        &["--out-ids"],
    );
    check_refused(
        &[
            "eval",
            name,
            "--ids",
            ids,
            "--logits",
            "x.npy",
            "--max-ctx",
            "64",
        ],
        1,
        &["70 ids", "--max-ctx 64"],
    );
    let nowhere = models().join("no-such-dir/l.npy");
    check_refused(
        &[
            "eval",
            name,
            "--ids",
            ids,
            "--logits",
            nowhere.to_str().unwrap(),
        ],
        1,
        &["no-such-dir", "cannot write"],
    );
}

#[test]
fn input_that_is_not_utf8_is_refused() {
    let model = model();
    let done = crate::process::hearth_with(b"\xff\xfe", &["tokenize", model.to_str().unwrap()]);
    assert_eq!(done.code, Some(1));
    assert!(done.err.contains("not UTF-8"), "{}", done.err);
}
