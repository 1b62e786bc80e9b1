//! Paths and test commands in the documents for developers: what they name is there.

use std::collections::BTreeSet;

use super::{check, read, tracked};

/// Endings by which a word without a slash is a file name.
const FILE_ENDINGS: [&str; 8] = [".rs", ".cu", ".cuh", ".py", ".sh", ".md", ".c", ".txt"];
/// Parts of a path that stand for any name.
const PLACEHOLDERS: [&str; 2] = ["NAME", "OPERATION"];

fn is_checked(name: &str) -> bool {
    let is_in = |folder: &str| {
        name.strip_prefix(folder)
            .is_some_and(|rest| !rest.contains('/') && rest.ends_with(".md"))
    };
    let is_note = name.starts_with("kernels/") && name.ends_with(".md");
    let is_readme = name.ends_with("README.md") && !name.starts_with("models/");
    is_in("crates/") || is_in(".github/") || is_note || is_readme
}

/// The first word of each `code span` of a line, if it has the form of a path in the repository.
fn paths(line: &str) -> Vec<&str> {
    let spans = line.split('`').skip(1).step_by(2);
    let words = spans.filter_map(|span| span.split_whitespace().next());
    words.filter(|word| is_path(word)).collect()
}

fn is_path(word: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let has_placeholder = || {
        let mut parts = word.split(['/', '.']);
        parts.any(|part| PLACEHOLDERS.contains(&part))
    };
    word.chars().all(is_plain)
        // Routes begin with a slash.
        && !word.starts_with('/')
        && (word.contains('/') || FILE_ENDINGS.iter().any(|ending| word.ends_with(ending)))
        && !has_placeholder()
}

/// All files and folders, and their ends: `a/b/c.rs` is also `b/c.rs` and `c.rs`. Kernels are
/// named with and without their ending.
fn known_paths(files: &[String]) -> BTreeSet<&str> {
    let mut known = BTreeSet::new();
    for file in files {
        let ends = file.match_indices('/').map(|(at, _)| at);
        let with_itself = ends.chain([file.len()]);
        for end in with_itself {
            let name = &file[..end];
            let starts = name.match_indices('/').map(|(at, _)| at + 1);
            for start in std::iter::once(0).chain(starts) {
                let path = &name[start..];
                known.insert(path);
                known.extend(path.strip_suffix(".cu"));
            }
        }
    }
    known
}

#[test]
fn documented_paths_exist() {
    let files = tracked();
    let known = known_paths(&files);
    let mut missing = Vec::new();
    let mut checked = 0;
    for name in files.iter().filter(|name| is_checked(name)) {
        for (index, line) in read(name).lines().enumerate() {
            for path in paths(line) {
                checked += 1;
                let plain = path.trim_start_matches("../").trim_end_matches('/');
                if !known.contains(plain) {
                    missing.push(format!("{name}:{}: {path}", index + 1));
                }
            }
        }
    }
    assert!(checked > 200, "only {checked} paths were found");
    check("documents name files and folders that exist", missing);
}

/// The package and the test file of each `cargo test -p PACKAGE --test NAME` of a text; a package
/// holds until the next one.
fn test_targets(text: &str) -> Vec<(&str, &str)> {
    let mut targets = Vec::new();
    let mut package = "";
    let mut before = "";
    for word in text.split(|c: char| c.is_whitespace() || c == '`') {
        match before {
            "-p" => package = word,
            "--test" => targets.push((package, word)),
            _ => {}
        }
        before = word;
    }
    targets
}

#[test]
fn documented_test_files_exist() {
    let files = tracked();
    let mut missing = Vec::new();
    let mut checked = 0;
    for name in files.iter().filter(|name| is_checked(name)) {
        let text = read(name);
        for (package, target) in test_targets(&text) {
            checked += 1;
            let tests = format!("crates/{package}/tests/{target}");
            if !files.contains(&format!("{tests}.rs"))
                && !files.contains(&format!("{tests}/main.rs"))
            {
                missing.push(format!("{name}: cargo test -p {package} --test {target}"));
            }
        }
    }
    assert!(checked > 5, "only {checked} commands were found");
    check("documents name tests that exist", missing);
}

#[test]
fn only_paths_are_read_from_code_spans() {
    let line = "`a/b.rs --flag`, `c.cu`, `K_HEADS`, `/v1/chat`, `a b/c`, `x/NAME.rs`, `f(x)/y`";
    assert_eq!(paths(line), ["a/b.rs", "c.cu"]);
    let files = ["kernels/gemm/gemv.cu".to_owned()];
    let known = known_paths(&files);
    for path in ["kernels/gemm", "gemm/gemv", "gemv.cu", "gemm"] {
        assert!(known.contains(path), "{path}");
    }
    assert!(!known.contains("gemm/gem"));
    let line = "cargo test -p a && cargo test -p b --test c --test d";
    assert_eq!(test_targets(line), [("b", "c"), ("b", "d")]);
}
