//! Tests of tables over small results, and of the README against its results.

use std::fs;
use std::path::Path;

use super::{Column, Table, check_rows, read_results, render, update};

const TIMES: Table = Table {
    name: "times",
    file: "unused",
    filter: |m| m.begins("bench", "step"),
    label: &[("case", "case")],
    columns: &[Column {
        heading: "ms",
        field: "ms",
        scale: 1.0,
        decimals: 1,
    }],
    sources: true,
};

#[test]
fn table_shows_the_last_measurement_of_each_row_and_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.jsonl");
    let lines = [
        r#"{"bench":"run","commit":"aaaaaaa","utc":"2026-01-01T00:00","command":"old"}"#,
        r#"{"bench":"step","case":"verify 16","ms":9.0}"#,
        r#"{"bench":"run","commit":"bbbbbbb","utc":"2026-01-02T00:00","command":"new"}"#,
        r#"{"bench":"step","case":"verify 16","ms":1234.56}"#,
        r#"{"bench":"step","case":"verify 8","ms":3.04}"#,
        r#"{"bench":"other","case":"verify 1","ms":1.0}"#,
    ];
    fs::write(&path, lines.join("\n")).unwrap();
    let text = render(&TIMES, &read_results(&path).unwrap());
    let expected = "| case | ms |\n|---|---|\n| verify 8 | 3.0 |\n| verify 16 | 1,234.6 |\n\n\
        Source: `results/unused`; bbbbbbb (2026-01-02) `new`.\n";
    assert_eq!(text, expected);
}

#[test]
fn table_without_rows_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.jsonl");
    let lines = [
        r#"{"bench":"other","commit":"aaaaaaa"}"#,
        r#"{"bench":"other","commit":"aaaaaaa, with changes"}"#,
    ];
    fs::write(&path, lines.join("\n")).unwrap();
    let error = check_rows(&TIMES, &read_results(&path).unwrap()).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("`times`") && error.contains("all 2 measurements"),
        "{error}"
    );
    assert!(error.contains("1 are not of a plain commit"), "{error}");
}

#[test]
fn invalid_line_is_named_with_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.jsonl");
    fs::write(&path, "{}\nnot json\n").unwrap();
    let error = format!("{:#}", read_results(&path).unwrap_err());
    assert!(error.contains("results.jsonl:2"), "{error}");
}

#[test]
fn readme_shows_the_current_results() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(folder.join("README.md")).unwrap();
    let current = update(&readme, &folder.join("results")).unwrap();
    assert!(
        readme == current,
        "benches/README.md is out of date: run `cargo run -p benches --bin tables`"
    );
}
