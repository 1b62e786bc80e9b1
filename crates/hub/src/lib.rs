//! Models by name: the Hugging Face hub's protocol, its cache on disk, and downloads.
//!
//! [`ModelName`] parses what a user types, [`Hub::find`] looks it up in the cache without the
//! network, [`Hub::pull`] downloads what is missing, [`Hub::preview`]
//! reads headers only, [`HubCache`] lists and removes.
//! The cache has the layout of `huggingface_hub`, so that other programs share the files.
//!
//! The client is our own, on `ureq`: the crate `hf-hub` checks no hash, reads no missing ranges in
//! parallel and has no errors by cause, and its version 1 brings three hundred packages.
//!
//! This crate knows nothing of models beyond their file names, reads no environment and prints
//! nothing. Start reading at [`Hub`].

#![forbid(unsafe_code)]

mod cache;
mod choose;
mod client;
mod digest;
mod download;
mod error;
mod event;
mod list;
mod name;
mod partial;
mod preview;
mod pull;
mod ranges;
mod repository;
mod settings;

pub use cache::HubCache;
pub use choose::{DRAFT_PREFIXES, quant_of};
pub use error::HubError;
pub use event::{OnEvent, PullEvent};
pub use list::{CachedModel, Removed};
pub use name::{HubName, ModelName, Pick, RepoId};
pub use pull::{Hub, Pulled};
pub use settings::{FreeSpace, HubSettings, Tuning};
