//! Runs the executable, with a tiny model for its tests.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;

/// Exit code and output of a run.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// The executable, without the settings of this process's environment.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("HEARTH_") || text.starts_with("DFLASH") {
            command.env_remove(name);
        }
    }
    // No test asks the real hub.
    command.env("HF_HUB_OFFLINE", "1");
    command
}

/// Runs the executable to its end, with `input` on its standard input.
pub(crate) fn hearth_with<S: AsRef<std::ffi::OsStr>>(input: &[u8], args: &[S]) -> Done {
    let mut child = command()
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that reads no input may have exited already.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    Done {
        code: output.status.code(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs the executable with an empty standard input.
pub(crate) fn hearth<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Done {
    hearth_with(b"", args)
}

/// Runs a command line that must succeed; words are separated by spaces, and each `{}` stands for a
/// path.
pub(crate) fn good(line: &str, paths: &[&Path]) -> Done {
    let mut paths = paths.iter();
    let words: Vec<String> = line
        .split(' ')
        .map(|word| match word {
            "{}" => paths.next().unwrap().display().to_string(),
            word => word.to_owned(),
        })
        .collect();
    let done = hearth(&words);
    assert_eq!(done.code, Some(0), "{line}: {}", done.err);
    done
}

/// A directory with `bf16.gguf`, a tiny hybrid model with random weights, and `ids.json`.
pub(crate) fn models() -> &'static Path {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        good(
            "synth tiny-hybrid:bf16 {}",
            &[&dir.path().join("bf16.gguf")],
        );
        let ids: Vec<u32> = (0..70).map(|i| i * 7 % 1000).collect();
        std::fs::write(dir.path().join("ids.json"), format!("{ids:?}")).unwrap();
        dir
    })
    .path()
}

/// The tiny model's file.
pub(crate) fn model() -> PathBuf {
    models().join("bf16.gguf")
}

/// The file of input ids.
pub(crate) fn ids() -> PathBuf {
    models().join("ids.json")
}
