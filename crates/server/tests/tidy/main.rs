//! House rules that the compiler does not check: top-level names, file lengths, words, and where
//! `unsafe` is allowed.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod cycles;
mod names;
mod paths;
mod source;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const TOP_LEVEL: [&str; 9] = [
    "Cargo.toml",
    "Cargo.lock",
    "crates",
    "kernels",
    "models",
    "harness",
    "benches",
    "README.md",
    "LICENSE",
];
const MAX_LINES: usize = 600;
const VAGUE_NAMES: [&str; 5] = ["utils", "util", "common", "helpers", "misc"];
/// `kernels/common` holds what several kernels include.
const VAGUE_EXCEPTIONS: [&str; 1] = ["kernels/common"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// Files that git tracks, relative to the root, with forward slashes.
fn tracked() -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let names = String::from_utf8(output.stdout).unwrap();
    let files: Vec<String> = names
        .split('\0')
        .filter(|n| !n.is_empty())
        .map(str::to_owned)
        .collect();
    // A file may be deleted in the working tree but not in the index.
    files
        .into_iter()
        .filter(|name| root().join(name).exists())
        .collect()
}

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap()
}

fn is_code(name: &str) -> bool {
    [".rs", ".cu", ".cuh", ".py", ".sh", ".c"]
        .iter()
        .any(|ending| name.ends_with(ending))
}

fn check(rule: &str, offenders: Vec<String>) {
    assert!(offenders.is_empty(), "{rule}:\n{}", offenders.join("\n"));
}

#[test]
fn the_top_level_is_the_agreed_list() {
    let mut extra: Vec<String> = tracked()
        .iter()
        .filter_map(|name| name.split('/').next().map(str::to_owned))
        .filter(|top| !top.starts_with('.') && !TOP_LEVEL.contains(&top.as_str()))
        .collect();
    extra.dedup();
    check("only the agreed names stand at the top level", extra);
    let files = tracked();
    let missing = TOP_LEVEL
        .iter()
        .filter(|top| {
            !files
                .iter()
                .any(|f| f == *top || f.starts_with(&format!("{top}/")))
        })
        .map(|top| (*top).to_owned())
        .collect();
    check("every agreed name is there", missing);
}

#[test]
fn no_code_file_is_longer_than_the_limit() {
    let long: Vec<String> = tracked()
        .into_iter()
        .filter(|name| is_code(name) && !name.ends_with("_table.rs"))
        .filter_map(|name| {
            let lines = read(&name).lines().count();
            (lines > MAX_LINES).then(|| format!("{name}: {lines} lines"))
        })
        .collect();
    check("files stay under 600 lines", long);
}

#[test]
fn no_file_or_folder_has_a_vague_name() {
    let vague = tracked()
        .into_iter()
        .filter(|name| {
            !VAGUE_EXCEPTIONS
                .iter()
                .any(|allowed| name.starts_with(allowed))
        })
        .filter(|name| {
            name.split('/').any(|part| {
                let stem = part.split('.').next().unwrap_or(part);
                VAGUE_NAMES.contains(&stem)
            })
        })
        .collect();
    check("names say what is inside", vague);
}

#[test]
fn unsafe_stands_only_where_it_is_allowed() {
    let may = |name: &str| {
        name.starts_with("crates/cuda/")
            || name.starts_with("crates/gguf/")
            || name.starts_with("crates/cpu/src/simd/")
            || name.starts_with("crates/cpu/src/matmul/")
            // The pool passes borrowed closures to its workers and waits for them.
            || name == "crates/cpu/src/workers.rs"
    };
    let offenders = tracked()
        .into_iter()
        .filter(|name| name.starts_with("crates/") && name.ends_with(".rs") && !may(name))
        .filter(|name| {
            read(name).lines().any(|line| {
                let code = line.split("//").next().unwrap_or("");
                ["unsafe {", "unsafe fn", "unsafe impl"]
                    .iter()
                    .any(|word| code.contains(word))
                    && !code.contains('"')
            })
        })
        .collect();
    check("unsafe is for gguf, cpu's SIMD files and cuda", offenders);
    let open: Vec<String> = [
        "contract",
        "model",
        "chat",
        "decode",
        "conformance",
        "server",
    ]
    .iter()
    .map(|name| format!("crates/{name}/src/lib.rs"))
    .filter(|lib| !read(lib).contains("#![forbid(unsafe_code)]"))
    .collect();
    check("these crates forbid unsafe", open);
}

#[test]
fn devices_and_the_algorithm_name_no_family() {
    let blind = [
        "crates/decode/src",
        "crates/cpu/src",
        "crates/cuda/src",
        "kernels/",
    ];
    let families = ["qwen", "llama", "gemma"];
    let offenders = tracked()
        .into_iter()
        .filter(|name| is_code(name) && blind.iter().any(|part| name.starts_with(part)))
        .filter(|name| {
            let text = read(name).to_lowercase();
            families.iter().any(|family| text.contains(family))
        })
        .collect();
    check(
        "a family's name stands only in model, models and harness",
        offenders,
    );
}

#[test]
fn no_unfinished_work_is_checked_in() {
    // Concatenated, so that this file does not match itself.
    let marks = [
        ["TO", "DO"].concat(),
        ["FIX", "ME"].concat(),
        ["todo", "!("].concat(),
        ["unimplemented", "!("].concat(),
        ["#[ig", "nore"].concat(),
    ];
    let offenders = tracked()
        .into_iter()
        .filter(|name| is_code(name))
        .filter(|name| marks.iter().any(|mark| read(name).contains(mark)))
        .collect();
    check("nothing unfinished, nothing ignored", offenders);
}

#[test]
fn no_machine_path_is_checked_in() {
    let paths = [
        ["/ho", "me/"].concat(),
        ["/ro", "ot/"].concat(),
        ["/wo", "rk/"].concat(),
        ["/t", "mp/"].concat(),
    ];
    let text = |name: &str| {
        is_code(name)
            || [".md", ".toml", ".json", ".jsonl", ".txt", ".log"]
                .iter()
                .any(|e| name.ends_with(e))
    };
    let offenders = tracked()
        .into_iter()
        .filter(|name| text(name) && !name.starts_with("crates/conformance/fixtures/templates/"))
        .filter(|name| {
            let Ok(text) = fs::read_to_string(root().join(name)) else {
                return false;
            };
            paths.iter().any(|path| text.contains(path))
        })
        .collect();
    check("no path of somebody's machine", offenders);
}
