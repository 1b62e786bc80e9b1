//! Sums of squared inputs of every matrix, from which importance matrices are made.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// The inputs that a matrix had.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InputSums {
    /// Sum over the rows of the square of each input, `[cols]`.
    pub squares: Vec<f32>,
    /// Number of rows.
    pub rows: usize,
}

/// The sums of each matrix by its name.
pub type Sums = HashMap<Arc<str>, InputSums>;

thread_local! {
    /// The sums of the calling thread while [`collect`] runs; products are started by the thread
    /// that calls the runner.
    static SUMS: RefCell<Option<Sums>> = const { RefCell::new(None) };
}

/// Runs `work`, which calls a runner on this thread, and gives the sums of its products.
pub fn collect<T>(work: impl FnOnce() -> T) -> (T, Sums) {
    SUMS.with_borrow_mut(|sums| *sums = Some(Sums::default()));
    let result = work();
    let sums = SUMS.with_borrow_mut(Option::take).unwrap_or_default();
    (result, sums)
}

/// Adds rows of inputs `x` `[rows, cols]` of matrix `name` when sums are collected.
pub(crate) fn add(name: &Arc<str>, x: &[f32], cols: usize) {
    SUMS.with_borrow_mut(|sums| {
        let Some(sums) = sums else { return };
        let own = sums.entry(Arc::clone(name)).or_default();
        own.squares.resize(cols, 0.0);
        for row in x.chunks_exact(cols) {
            own.rows += 1;
            for (sum, v) in own.squares.iter_mut().zip(row) {
                *sum += v * v;
            }
        }
    });
}
