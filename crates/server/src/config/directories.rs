//! Where other programs keep their settings, by the variables that those programs read.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use std::env;
use std::path::PathBuf;

/// Settings directories of one user.
#[derive(Debug, Clone)]
pub struct Directories {
    /// The home directory.
    pub home: PathBuf,
    /// The directory of programs' settings (`XDG_CONFIG_HOME`).
    pub config: PathBuf,
    /// Codex's settings.
    pub codex: PathBuf,
    /// Claude Code's settings.
    pub claude: PathBuf,
    /// Settings of `llm`.
    pub llm: PathBuf,
}

/// The directory of what this program keeps for this user; `None` without a home directory.
pub fn state() -> Option<PathBuf> {
    let state = env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.filter(|path| path.is_absolute());
    let state = state.or_else(|| Some(of_user()?.home.join(".local/state")))?;
    Some(state.join("hearth"))
}

/// The directories of this user; `None` without a home directory.
pub fn of_user() -> Option<Directories> {
    let dir = |name: &str| {
        let value = env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    let home = dir("HOME")?;
    let config = dir("XDG_CONFIG_HOME")
        .filter(|path| path.is_absolute())
        .unwrap_or_else(|| home.join(".config"));
    Some(Directories {
        codex: dir("CODEX_HOME").unwrap_or_else(|| home.join(".codex")),
        claude: dir("CLAUDE_CONFIG_DIR").unwrap_or_else(|| home.join(".claude")),
        llm: dir("LLM_USER_PATH").unwrap_or_else(|| config.join("io.datasette.llm")),
        home,
        config,
    })
}
