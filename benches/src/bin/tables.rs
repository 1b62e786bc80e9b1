//! Writes the tables of `benches/README.md` from `benches/results`; `--check` only compares them.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

fn main() -> anyhow::Result<()> {
    let check = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--check") => true,
        Some(other) => bail!("unknown argument `{other}`; usage: tables [--check]"),
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = folder.join("README.md");
    let readme = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let current = benches::tables::update(&readme, &folder.join("results"))?;
    if readme == current {
        return Ok(());
    }
    if check {
        bail!(
            "benches/README.md is older than its results: run `cargo run -p benches --bin tables`"
        );
    }
    fs::write(&path, current).with_context(|| path.display().to_string())
}
