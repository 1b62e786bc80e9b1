//! The tables of `benches/README.md`, generated from the JSON lines in `benches/results`.
//!
//! A results file is read top to bottom. A line with `"bench": "run"` is a run header: its `utc`,
//! `commit`, `machine` and `command` apply to the lines after it. Each table shows, per row label,
//! the last line that passes its filter.

mod catalogue;
mod measurement;
mod render;

use std::path::Path;

use anyhow::Context;

pub use catalogue::TABLES;
pub use measurement::{Measurement, read_results};
pub use render::render;

/// One generated table.
pub struct Table {
    /// The name in the README's markers.
    pub name: &'static str,
    /// The file under `benches/results`.
    pub file: &'static str,
    /// Whether the table has the measurement.
    pub filter: fn(&Measurement) -> bool,
    /// Heading and field of each row label; measurements with equal labels are the same row.
    pub label: &'static [(&'static str, &'static str)],
    /// Measured columns.
    pub columns: &'static [Column],
    /// Whether a line below the table names file, commits and commands.
    pub sources: bool,
}

/// One measured column.
pub struct Column {
    /// The heading, with the unit.
    pub heading: &'static str,
    /// The field of the measurement; `a.b` reads the field `b` of the object `a`.
    pub field: &'static str,
    /// Factor from the field's unit to the heading's.
    pub scale: f64,
    /// Digits after the decimal point.
    pub decimals: usize,
}

/// The README with every generated table brought up to date.
///
/// A table stands between `<!-- table NAME -->` and `<!-- end NAME -->`.
///
/// # Errors
/// Names the marker that is missing, unknown or unclosed, the results file and line that is
/// invalid, or the table without rows.
pub fn update(readme: &str, results: &Path) -> anyhow::Result<String> {
    let mut text = readme.to_owned();
    for table in TABLES {
        let (begin, end) = (
            format!("<!-- table {} -->\n", table.name),
            format!("<!-- end {} -->", table.name),
        );
        let start = text
            .find(&begin)
            .with_context(|| format!("README.md has no line `{}`", begin.trim_end()))?
            + begin.len();
        let length = text[start..]
            .find(&end)
            .with_context(|| format!("README.md has no line `{end}` after its table begins"))?;
        let measurements = read_results(&results.join(table.file))?;
        check_rows(table, &measurements)?;
        text.replace_range(start..start + length, &render(table, &measurements));
    }
    let known = |name: &str| TABLES.iter().any(|table| table.name == name);
    for line in text.lines() {
        let name = line
            .strip_prefix("<!-- table ")
            .and_then(|rest| rest.strip_suffix(" -->"));
        if let Some(name) = name.filter(|name| !known(name)) {
            anyhow::bail!("README.md has a marker for the unknown table `{name}`");
        }
    }
    Ok(text)
}

/// Fails if no measurement passes the table's filter.
fn check_rows(table: &Table, measurements: &[Measurement]) -> anyhow::Result<()> {
    if measurements.iter().any(|m| (table.filter)(m)) {
        return Ok(());
    }
    let uncommitted = measurements.iter().filter(|m| !m.is_of_a_commit()).count();
    anyhow::bail!(
        "table `{}` has no rows: its filter drops all {} measurements of results/{}, \
         of which {uncommitted} are not of a plain commit",
        table.name,
        measurements.len(),
        table.file
    )
}

#[cfg(test)]
mod tests;
