//! Saved committed states: shared page references, and a copy of the non-paged state.
//!
//! The non-paged state holds the delta states, the convolution windows, the hidden row of a
//! multi-token-prediction head and the used part of the draft rings, as
//! [`NonPagedLayout`](non_paged::NonPagedLayout) orders them. The copy is in page-locked or device
//! memory. A restore shares full pages and copies the last page and the non-paged state, so it is
//! bit-identical.

mod export;
mod import;
mod neutral;
mod non_paged;
mod page_layout;
mod saved;
mod sections;

pub(crate) use export::{CudaDetachedSnapshot, ExportContext};
pub(crate) use import::ImportTarget;
pub(crate) use page_layout::{GpuPageCopier, PageLayout};
pub(crate) use saved::Snapshot;

#[cfg(feature = "inspect")]
pub(crate) use neutral::{append_neutral, neutral_bytes, neutral_states, runs};
