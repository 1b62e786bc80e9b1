//! Generates a table of all files under `kernels/`, so that the executable embeds its sources.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "this is how cargo and a build script talk"
)]

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> io::Result<()> {
    // Read at run time: `env!` would keep the path of a checkout that has moved since.
    let own = env::var_os("CARGO_MANIFEST_DIR")
        .ok_or_else(|| io::Error::other("cargo set no CARGO_MANIFEST_DIR"))?;
    let root = Path::new(&own).join("../../kernels");
    let mut files = Vec::new();
    collect(&root, &mut files)?;
    files.sort();
    let mut table = String::from("&[\n");
    for file in &files {
        let name = file.strip_prefix(&root).unwrap_or(file);
        let name = name.to_string_lossy().replace('\\', "/");
        let path = file.display().to_string();
        let _ = writeln!(table, "    ({name:?}, include_str!({path:?})),");
    }
    table.push(']');
    let out = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("cargo set no OUT_DIR"))?;
    fs::write(Path::new(&out).join("sources.rs"), table)?;
    println!("cargo::rerun-if-changed={}", root.display());
    Ok(())
}

/// Adds the `.cu` and `.cuh` files below `folder`.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    let entries = fs::read_dir(folder)
        .map_err(|e| io::Error::new(e.kind(), format!("kernels in {}: {e}", folder.display())))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "cu" || e == "cuh") {
            files.push(path);
        }
    }
    Ok(())
}
