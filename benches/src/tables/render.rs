//! A table as Markdown.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::{Column, Measurement, Table};

/// The Markdown of `table` over all measurements of its file.
pub fn render(table: &Table, measurements: &[Measurement]) -> String {
    let rows = current(table, measurements);
    let headings = table.label.iter().map(|(heading, _)| *heading);
    let headings: Vec<&str> = headings
        .chain(table.columns.iter().map(|c| c.heading))
        .collect();
    let mut out = format!(
        "| {} |\n|{}\n",
        headings.join(" | "),
        "---|".repeat(headings.len())
    );
    for row in &rows {
        let labels = table.label.iter().map(|(_, field)| row.text(field));
        let cells: Vec<String> = labels
            .chain(table.columns.iter().map(|c| cell(c, row)))
            .collect();
        let _ = writeln!(out, "| {} |", cells.join(" | "));
    }
    if table.sources {
        let sources: BTreeSet<String> = rows.iter().map(source).collect();
        let sources: Vec<String> = sources.into_iter().collect();
        let _ = writeln!(
            out,
            "\nSource: `results/{}`; {}.",
            table.file,
            sources.join("; ")
        );
    }
    out
}

/// The last measurement of every row label, in order of first appearance.
fn current(table: &Table, measurements: &[Measurement]) -> Vec<Measurement> {
    let label = |m: &Measurement| -> Vec<String> {
        table.label.iter().map(|(_, field)| m.text(field)).collect()
    };
    let mut rows: Vec<(Vec<String>, Measurement)> = Vec::new();
    for measurement in measurements.iter().filter(|m| (table.filter)(m)) {
        let key = label(measurement);
        match rows.iter_mut().find(|(known, _)| *known == key) {
            Some((_, row)) => *row = measurement.clone(),
            None => rows.push((key, measurement.clone())),
        }
    }
    // Numbers in labels sort by value: `verify 8` comes before `verify 16`.
    rows.sort_by_key(|(key, _)| key.iter().map(|text| natural(text)).collect::<Vec<_>>());
    rows.into_iter().map(|(_, row)| row).collect()
}

/// A sort key: the text without its digits, then the numbers in it.
fn natural(text: &str) -> (String, Vec<u64>) {
    let words = text.chars().filter(|c| !c.is_ascii_digit()).collect();
    let numbers = text.split(|c: char| !c.is_ascii_digit());
    (
        words,
        numbers.filter_map(|part| part.parse().ok()).collect(),
    )
}

fn cell(column: &Column, row: &Measurement) -> String {
    let Some(number) = row.number(column.field) else {
        return "-".to_owned();
    };
    let rounded = format!("{:.*}", column.decimals, number * column.scale);
    let (whole, rest) = rounded.split_once('.').unwrap_or((&rounded, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) && digit.is_ascii_digit() {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if rest.is_empty() {
        grouped
    } else {
        format!("{grouped}.{rest}")
    }
}

fn source(row: &Measurement) -> String {
    let day = [row.text("utc"), row.text("date")].concat();
    let day = day.split('T').next().unwrap_or_default().to_owned();
    let mut text = row.text("commit");
    if !day.is_empty() {
        let _ = write!(text, " ({day})");
    }
    let command = row.text("command");
    let command = command.split(", ").next().unwrap_or_default();
    if command.is_empty() {
        text
    } else {
        format!("{text} `{command}`")
    }
}
