//! The tables of `benches/README.md`, generated from the JSON lines in `benches/results`.
//!
//! A results file is read top to bottom. A line with `command` and without a measurement is a run header:
//! its `utc`, `commit`, `machine` and `command` hold for the lines after it. Each table keeps, per row
//! label, the last line that passes its filter, so a table always shows the current measurements.

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
    /// Its name in the README's markers.
    pub name: &'static str,
    /// The file under `benches/results`.
    pub file: &'static str,
    /// Whether a measurement belongs into the table.
    pub filter: fn(&Measurement) -> bool,
    /// Fields whose values label a row; two measurements with the same label are the same row.
    pub label: &'static [(&'static str, &'static str)],
    /// Measured columns.
    pub columns: &'static [Column],
    /// Measurements that describe the table's rows rather than each row, stated once below it.
    pub sources: bool,
}

/// One measured column.
pub struct Column {
    /// Its heading, with the unit.
    pub heading: &'static str,
    /// The field of the measurement; `a.b` reads the field `b` of the object `a`.
    pub field: &'static str,
    /// Factor from the field's unit to the heading's.
    pub scale: f64,
    /// Digits after the point.
    pub decimals: usize,
}

/// The README with every generated table replaced by the current one.
///
/// A table stands between `<!-- table NAME -->` and `<!-- end NAME -->`.
///
/// # Errors
/// Names the marker that is missing, unknown or unclosed, or the results file and line that cannot be read.
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

#[cfg(test)]
mod tests;
