//! What happens during a pull.

use std::time::Duration;

use crate::HubError;

/// What happens during a pull.
#[derive(Debug)]
pub enum PullEvent<'a> {
    /// A download begins, or continues one that was cut.
    Start {
        /// The file.
        file: &'a str,
        /// Its bytes.
        size_bytes: u64,
        /// Bytes of an earlier download.
        have_bytes: u64,
        /// The hub's hash of its content in hexadecimal digits, if the hub gives one: SHA-256, or
        /// Git's SHA-1 of small files.
        hash: Option<&'a str>,
    },
    /// Bytes came. Calls are frequent, and from several threads.
    Progress {
        /// The file.
        file: &'a str,
        /// Its bytes.
        size_bytes: u64,
        /// Those that are there.
        done_bytes: u64,
    },
    /// Another program downloads the same file.
    Waiting {
        /// The file.
        file: &'a str,
    },
    /// A request failed and is sent again.
    Retrying {
        /// How it failed.
        error: &'a HubError,
        /// The time until then.
        wait: Duration,
    },
    /// The hash is computed.
    Checking {
        /// The file.
        file: &'a str,
        /// Its bytes.
        size_bytes: u64,
        /// Those that are hashed.
        done_bytes: u64,
    },
    /// A file is complete.
    Done {
        /// The file.
        file: &'a str,
    },
}

/// Receives the events of a pull.
pub type OnEvent<'a> = &'a (dyn Fn(PullEvent<'_>) + Sync);
