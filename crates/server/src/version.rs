//! What was built: version, commit and target.

/// The version, the commit with its date, and the target, as `hearth --version` prints them.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD"), ")");
