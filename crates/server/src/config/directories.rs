//! Where other programs keep their settings, by the variables that they themselves go by.

#![allow(
    clippy::disallowed_methods,
    reason = "this is where the environment is read"
)]

use std::env;
use std::path::PathBuf;

/// Folders of one user.
#[derive(Debug, Clone)]
pub struct Directories {
    /// The user's home.
    pub home: PathBuf,
    /// Where programs keep settings.
    pub config: PathBuf,
    /// Where Codex does.
    pub codex: PathBuf,
    /// Where Claude Code does.
    pub claude: PathBuf,
    /// Where `llm` does.
    pub llm: PathBuf,
}

/// The folders of this user; `None` where there is no home.
pub fn places() -> Option<Directories> {
    let folder = |name: &str| {
        let value = env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    let home = folder("HOME")?;
    let config = folder("XDG_CONFIG_HOME")
        .filter(|path| path.is_absolute())
        .unwrap_or_else(|| home.join(".config"));
    Some(Directories {
        codex: folder("CODEX_HOME").unwrap_or_else(|| home.join(".codex")),
        claude: folder("CLAUDE_CONFIG_DIR").unwrap_or_else(|| home.join(".claude")),
        llm: folder("LLM_USER_PATH").unwrap_or_else(|| config.join("io.datasette.llm")),
        home,
        config,
    })
}
