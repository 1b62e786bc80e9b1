//! Pages of the KV cache: who holds which, and where it is.

mod pool;
mod shared;

pub(crate) use pool::{PageCopier, PageId, PagePool};
pub(crate) use shared::SharedPagePool;
