//! Names the commit that is built, for `hearth --version` and bug reports.
//!
//! A debug build names none, so that a commit does not compile the crate again.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "this is how cargo and a build script talk"
)]

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=SOURCE_COMMIT");
    let target = env::var("TARGET").unwrap_or_default();
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let source = match env::var("SOURCE_COMMIT") {
        Ok(named) if !named.is_empty() => named,
        _ if is_release => commit().unwrap_or_else(|| "unknown commit".to_owned()),
        _ => "debug build".to_owned(),
    };
    println!("cargo::rustc-env=BUILD={source}, {target}");
}

/// The commit and its date, with a mark if tracked files differ from it; `None` outside a
/// repository.
fn commit() -> Option<String> {
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--path-format=absolute", "--git-path", name])?;
        println!("cargo::rerun-if-changed={path}");
    }
    println!("cargo::rerun-if-changed=..");
    println!("cargo::rerun-if-changed=../../kernels");
    let id = git(&[
        "describe",
        "--always",
        "--dirty=-changed",
        "--exclude=*",
        "--abbrev=10",
    ])?;
    let date = git(&["show", "--no-patch", "--format=%cs", "HEAD"])?;
    Some(format!("{id} of {date}"))
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.trim();
    (output.status.success() && !line.is_empty()).then(|| line.to_owned())
}
