//! Embedded kernel sources and their expansion.
//!
//! NVRTC finds no headers, so an include such as `#include "common/prelude.cuh"` is replaced by the
//! file's text. Paths are relative to `kernels/`, and each file is included once. `#line` keeps
//! file and line in compiler messages.

use std::collections::HashSet;
use std::fmt::Write as _;

use super::error::CompileError;
use crate::driver::Arch;

/// `(path under kernels/, text)` in path order. The build script writes it.
const SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// All embedded files as `(path under kernels/, text)`, in path order.
pub fn sources() -> &'static [(&'static str, &'static str)] {
    SOURCES
}

/// The oldest supported architecture: the line `// min_arch sm_75` of the file, else sm_80.
pub fn min_arch(file: &str) -> Arch {
    let marked = text(file).and_then(|text| {
        text.lines()
            .find_map(|line| Arch::parse(line.trim().strip_prefix("// min_arch ")?))
    });
    marked.unwrap_or(Arch { number: 80 })
}

fn text(file: &str) -> Option<&'static str> {
    SOURCES
        .iter()
        .find(|(name, _)| *name == file)
        .map(|(_, text)| *text)
}

/// The text of `file` with all includes expanded.
///
/// # Errors
/// [`CompileError::MissingSource`] for a file that is not embedded.
pub fn expand(file: &str) -> Result<String, CompileError> {
    let mut out = String::new();
    let mut seen = HashSet::from([file.to_owned()]);
    append(file, "the launch table", &text, &mut seen, &mut out)?;
    Ok(out)
}

/// Appends a file with its includes expanded.
fn append(
    file: &str,
    from: &str,
    find: &dyn Fn(&str) -> Option<&'static str>,
    seen: &mut HashSet<String>,
    out: &mut String,
) -> Result<(), CompileError> {
    let text = find(file).ok_or_else(|| CompileError::MissingSource {
        from: from.to_owned(),
        name: file.to_owned(),
    })?;
    let _ = writeln!(out, "#line 1 \"{file}\"");
    for (index, line) in text.lines().enumerate() {
        match included(line) {
            Some(name) => {
                if seen.insert(name.to_owned()) {
                    append(name, file, find, seen, out)?;
                }
                let _ = writeln!(out, "#line {} \"{file}\"", index + 2);
            }
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    Ok(())
}

/// The name in `#include "name"`.
fn included(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start();
    let rest = rest.strip_prefix("include")?.trim_start();
    rest.strip_prefix('"')?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_expand_once_and_keep_line_numbers() {
        let find = |name: &str| match name {
            "a.cu" => Some("#include \"b.cuh\"\n#include \"c.cuh\"\nint a;\n"),
            "b.cuh" => Some("#pragma once\n#include \"c.cuh\"\nint b;\n"),
            "c.cuh" => Some("int c;\n"),
            _ => None,
        };
        let mut out = String::new();
        let mut seen = HashSet::from(["a.cu".to_owned()]);
        append("a.cu", "", &find, &mut seen, &mut out).unwrap();
        assert_eq!(out.matches("int c;").count(), 1);
        assert!(out.contains("#line 3 \"b.cuh\"\nint b;\n"), "{out}");
        assert!(out.ends_with("#line 3 \"a.cu\"\nint a;\n"), "{out}");
    }

    #[test]
    fn missing_include_names_both_files() {
        let find = |name: &str| (name == "a.cu").then_some("#include \"gone.cuh\"\n");
        let mut out = String::new();
        let error = append("a.cu", "", &find, &mut HashSet::new(), &mut out).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("a.cu") && text.contains("gone.cuh"), "{text}");
    }

    #[test]
    fn min_arch_is_read_from_the_source() {
        assert_eq!(min_arch("common/bandwidth.cu").number, 75);
        assert_eq!(min_arch("no such file").number, 80);
    }

    #[test]
    fn every_embedded_source_expands() {
        assert!(!sources().is_empty());
        for (file, _) in sources() {
            let text = expand(file).unwrap();
            assert!(text.contains(file), "{file}");
        }
    }
}
