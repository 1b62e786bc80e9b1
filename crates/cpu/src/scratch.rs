//! Working memory of parallel items, handed out and taken back so that a pass allocates nothing.

use std::sync::{Mutex, PoisonError};

/// A stack of buffers, as many as there were items at once.
#[derive(Default)]
pub(crate) struct ScratchPool {
    free: Mutex<Vec<Vec<f32>>>,
}

impl ScratchPool {
    /// Lends `len` floats of unspecified content to `work`.
    pub(crate) fn with<R>(&self, len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
        let mut buffer = self.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
        let result = work(&mut buffer[..len]);
        self.lock().push(buffer);
        result
    }

    /// A panic elsewhere leaves the stack as good as it was.
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Vec<f32>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the first `len` floats off `buffer`.
pub(crate) fn take<'a>(buffer: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(buffer).split_at_mut(len);
    *buffer = rest;
    taken
}
