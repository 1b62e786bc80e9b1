//! Reusable scratch buffers of parallel items, so that a pass allocates nothing.

use std::sync::{Mutex, PoisonError};

/// A stack of buffers, one per concurrent item.
#[derive(Default)]
pub(crate) struct ScratchPool {
    free: Mutex<Vec<Vec<f32>>>,
}

impl ScratchPool {
    /// Calls `work` with `len` floats of unspecified content.
    pub(crate) fn with<R>(&self, len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
        let mut buffer = self.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
        let result = work(&mut buffer[..len]);
        self.lock().push(buffer);
        result
    }

    /// A panic elsewhere leaves the stack usable.
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Vec<f32>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Splits the first `len` floats off `buffer`.
pub(crate) fn take<'a>(buffer: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(buffer).split_at_mut(len);
    *buffer = rest;
    taken
}
