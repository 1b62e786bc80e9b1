//! Saved committed states: the pages of their rows, which others share, and a copy of what is non_paged.
//!
//! PartKind is non_paged is the delta states, the windows, and the draft's rings as far as they are in use, one after another
//! as [`NonPagedLayout`] says, in page-locked memory or on the card. Restoring shares the full pages, copies the last one and
//! what is non_paged, so it is identity bit for bit.

mod export;
mod import;
mod neutral;
mod non_paged;
mod page_layout;
mod saved;
mod sections;

pub(crate) use export::{CudaDetachedSnapshot, ExportContext};
pub(crate) use page_layout::{GpuPageCopier, PageLayout};
pub(crate) use saved::Snapshot;

#[cfg(feature = "inspect")]
pub(crate) use neutral::{append_neutral, neutral_bytes, neutral_states, runs};
