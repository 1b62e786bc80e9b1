//! Everything that can go wrong, by what the user can do.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// An error of a name, a request, a download or the cache.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A word that is no name of a model.
    #[error(
        "{word}: not a model's name; use OWNER/REPO, OWNER/REPO:QUANT, hf://OWNER/REPO/FILE.gguf or the \
         https address of a GGUF file"
    )]
    NotAName {
        /// The word.
        word: String,
    },
    /// No folder for the cache.
    #[error("no folder for downloads: set HF_HOME or HOME")]
    NoHome,
    /// A proxy variable that is no address.
    #[error("{variable}: not the address of a proxy ({detail}); use http://HOST:PORT")]
    ProxySetting {
        /// The variable.
        variable: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// Not in the cache, and no request may leave the machine.
    #[error(
        "{name} is not in the cache at {cache}, and no request may be sent (--offline, HEARTH_OFFLINE or \
         HF_HUB_OFFLINE); pull it while online",
        cache = cache.display()
    )]
    Offline {
        /// The model.
        name: String,
        /// The cache.
        cache: PathBuf,
    },
    /// Not in the cache.
    #[error(
        "{name} is not in the cache at {cache}; `hearth list` shows what is, `hearth pull {name}` downloads it",
        cache = cache.display()
    )]
    NotCached {
        /// The model.
        name: String,
        /// The cache.
        cache: PathBuf,
    },
    /// The hub has no such repository, or hides it.
    #[error("{repo}: no such repository at {endpoint}, or a private one{hint}")]
    RepoNotFound {
        /// The repository.
        repo: String,
        /// The hub.
        endpoint: String,
        /// Similar names, or how to send a token.
        hint: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repo}: no branch, tag or commit {revision}{hint}")]
    RevisionNotFound {
        /// The repository.
        repo: String,
        /// The revision.
        revision: String,
        /// Those that it has.
        hint: String,
    },
    /// The repository or the server has no such file.
    #[error("{place}: no file {file}{hint}")]
    FileNotFound {
        /// The repository or the server.
        place: String,
        /// The file.
        file: String,
        /// The nearest names.
        hint: String,
    },
    /// The repository has no file of this quantisation.
    #[error("{repo}: no GGUF file of type {quant}; it has {available}")]
    QuantNotFound {
        /// The repository.
        repo: String,
        /// The quantisation.
        quant: String,
        /// Those that it has.
        available: String,
    },
    /// The repository has no model that can be opened.
    #[error("{repo}: {what}")]
    NoModel {
        /// The repository.
        repo: String,
        /// What it has instead, and where models are.
        what: String,
    },
    /// A part of a split model is not there.
    #[error("{place}: {file} is part of a split model, and {missing} is not there")]
    MissingPart {
        /// The repository.
        place: String,
        /// A part that is there.
        file: String,
        /// The part that is not.
        missing: String,
    },
    /// The repository's terms must be accepted first.
    #[error(
        "{repo} is gated: accept its terms at {endpoint}/{repo}, then set HF_TOKEN to a token of that account \
         (or run `hf auth login`){detail}"
    )]
    Gated {
        /// The repository.
        repo: String,
        /// The hub.
        endpoint: String,
        /// Whether a token was sent.
        detail: &'static str,
    },
    /// The server refuses this user.
    #[error(
        "{url}: refused with status {status}{sentence}; set HF_TOKEN to a token that may read it (or run \
         `hf auth login`)"
    )]
    Refused {
        /// The address, without its query.
        url: String,
        /// 401 or 403.
        status: u16,
        /// The hub's code of the reason, or nothing.
        code: String,
        /// The server's sentence in parentheses, or nothing.
        sentence: String,
    },
    /// The server has nothing at an address.
    #[error("{url}: not there (status 404); check the address")]
    NotFound {
        /// The address, without its query.
        url: String,
        /// The hub's code of the reason, or nothing.
        code: String,
    },
    /// Too many requests.
    #[error("{url}: too many requests (status 429); try again {}", when(*retry_after))]
    RateLimited {
        /// The address, without its query.
        url: String,
        /// What the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// The server failed.
    #[error("{url}: the server failed with status {status}; try again {}", when(*retry_after))]
    Server {
        /// The address, without its query.
        url: String,
        /// From 500.
        status: u16,
        /// What the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// No connection, or it broke.
    #[error(
        "{url}: {detail}; check the network, or set HF_ENDPOINT to a mirror; what is there is kept, and the same \
         command continues"
    )]
    Unreachable {
        /// The address, without its query.
        url: String,
        /// The system's error.
        detail: String,
    },
    /// No connection through the proxy.
    #[error(
        "{url}: no connection through the proxy {proxy}: {detail}; check HTTPS_PROXY and ALL_PROXY, or add the host \
         to NO_PROXY"
    )]
    Proxy {
        /// The address, without its query.
        url: String,
        /// The proxy's host and port.
        proxy: String,
        /// What the proxy answered, or the system's error.
        detail: String,
    },
    /// The server's certificate is not trusted.
    #[error(
        "{url}: {detail}; install the package ca-certificates, or name the certificates of your network in \
         SSL_CERT_FILE"
    )]
    Certificate {
        /// The address, without its query.
        url: String,
        /// What is wrong.
        detail: String,
    },
    /// An answer that breaks the protocol.
    #[error("{url}: unexpected answer: {detail}; is it a server of models, and HF_ENDPOINT right?")]
    Protocol {
        /// The address, without its query.
        url: String,
        /// What is wrong.
        detail: String,
    },
    /// The downloaded bytes are not those that the hub describes.
    #[error(
        "{file}: the downloaded bytes have the hash {found} and should have {expected}; they were deleted; pull \
         again, and if it repeats, a proxy or the mirror changes the file"
    )]
    WrongHash {
        /// The file.
        file: String,
        /// The hub's hash.
        expected: String,
        /// The hash of the bytes.
        found: String,
    },
    /// The disk has no room.
    #[error(
        "{path}: the disk is full: {needed} more are needed and {free} are free; free some space, or set HF_HOME \
         to another disk; what is there is kept",
        path = path.display(), needed = gib(*needed_bytes), free = gib(*free_bytes)
    )]
    DiskFull {
        /// The folder.
        path: PathBuf,
        /// Bytes still to write.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// A file of the cache cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl HubError {
    /// Whether the same request may succeed a moment later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self,
            HubError::RateLimited { .. }
                | HubError::Server { .. }
                | HubError::Unreachable { .. }
                | HubError::Proxy { .. }
        )
    }

    /// What the server asks to wait.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            HubError::RateLimited { retry_after, .. } | HubError::Server { retry_after, .. } => {
                *retry_after
            }
            _ => None,
        }
    }
}

/// Adds the file to an error of the system.
pub(crate) fn at(path: &std::path::Path) -> impl FnOnce(io::Error) -> HubError {
    let path = path.to_owned();
    move |source| HubError::File { path, source }
}

fn when(retry_after: Option<Duration>) -> String {
    match retry_after {
        Some(wait) => format!("in {} s", wait.as_secs().max(1)),
        None => "later".to_owned(),
    }
}

fn gib(bytes: u64) -> String {
    if bytes < 1 << 20 {
        return format!("{bytes} bytes");
    }
    format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64)
}
