//! Names and shapes of code: type names, retired words, widths, `if` for booleans.

use std::collections::BTreeMap;

use super::source::{bool_matches, defined_types, sources};
use super::{check, is_code, read, tracked};

/// How often a type name may be defined in the workspace.
const MAX_DEFINITIONS: usize = 2;
const RUST_COLUMNS: usize = 100;
const KERNEL_COLUMNS: usize = 120;

#[test]
fn no_type_name_is_defined_more_than_twice() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources() {
        for name in defined_types(&source.file) {
            places.entry(name).or_default().push(source.name.clone());
        }
    }
    let often: Vec<String> = places
        .into_iter()
        .filter(|(_, files)| files.len() > MAX_DEFINITIONS)
        .map(|(name, files)| format!("{name}: {}", files.join(", ")))
        .collect();
    check("a type name has at most two definitions", often);
}

#[test]
fn booleans_are_branched_on_with_if() {
    let matches: Vec<String> = sources()
        .iter()
        .flat_map(|source| {
            let lines = bool_matches(&source.file);
            lines
                .into_iter()
                .map(|line| format!("{}:{line}", source.name))
        })
        .collect();
    check("`if`, not `match`, for a boolean", matches);
}

#[test]
fn lines_end_at_the_column_limit() {
    let limit = |name: &str| match name.rsplit('.').next() {
        Some("rs") => Some(RUST_COLUMNS),
        Some("cu" | "cuh") => Some(KERNEL_COLUMNS),
        _ => None,
    };
    let mut long = Vec::new();
    for name in tracked() {
        let Some(limit) = limit(&name) else { continue };
        for (index, line) in read(&name).lines().enumerate() {
            // A long string literal stays on one line, so that it can be searched for.
            let is_text = line.contains('"') && !line.trim_start().starts_with("//");
            if line.chars().count() > limit && !(is_text && name.ends_with(".rs")) {
                long.push(format!("{name}:{}", index + 1));
            }
        }
    }
    check("lines end at column 100 (Rust) or 120 (CUDA)", long);
}

#[test]
fn no_retired_word_is_used() {
    let table = include_str!("retired_words.txt");
    let words: Vec<(&str, &str)> = table
        .lines()
        .filter(|line| !line.starts_with('#') && !line.starts_with("keep ") && !line.is_empty())
        .map(|line| line.split_once(" -> ").expect("a line is `word -> use`"))
        .collect();
    // Public names that clients use.
    let kept: Vec<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("keep "))
        .collect();
    let mut found = Vec::new();
    let is_read = |name: &String| {
        let is_text = is_code(name) || name.ends_with(".md") || name.ends_with(".mjs");
        let is_data =
            name.starts_with("crates/conformance/fixtures/") || name.starts_with("models/");
        // A changelog names the old spelling of a renamed flag.
        let is_history = name.ends_with("CHANGELOG.md");
        is_text && !is_data && !is_history && !name.starts_with("harness/fuzz/corpus")
    };
    // An alias that keeps an old flag working spells it.
    let is_alias = |line: &str| {
        line.trim_start()
            .trim_start_matches("#[value(")
            .starts_with("alias = ")
    };
    for name in tracked().into_iter().filter(is_read) {
        let text = read(&name);
        let lines = text.lines().enumerate();
        for (index, line) in lines.filter(|(_, line)| !is_alias(line)) {
            let line = kept
                .iter()
                .fold(line.to_lowercase(), |line, name| line.replace(name, ""));
            for (word, use_) in &words {
                if contains_word(&line, word) {
                    found.push(format!("{name}:{}: `{word}`, use {use_}", index + 1));
                }
            }
        }
    }
    check("retired words stay retired", found);
}

/// Whether `line` contains `word` as a whole word; `_` separates the words of an identifier.
fn contains_word(line: &str, word: &str) -> bool {
    let is_letter = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    line.match_indices(word).any(|(at, _)| {
        !is_letter(line[..at].chars().next_back())
            && !is_letter(line[at + word.len()..].chars().next())
    })
}

#[test]
fn a_retired_word_is_found_inside_identifiers_and_not_inside_words() {
    assert!(contains_word("let first_step = 1;", "step"));
    assert!(!contains_word("steps", "step"));
    assert!(contains_word("a step, twice", "step"));
}
