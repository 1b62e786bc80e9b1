//! Access to weight bytes, independent of the file they come from.

use std::sync::Arc;

use crate::QuantType;

/// A reference to one stored matrix or vector of a [`ModelSpec`](crate::ModelSpec).
///
/// A matrix has `rows` outputs of `cols` contiguous inputs; a vector has one row.
/// Rows are whole numbers of blocks of `ty`, with no padding between rows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WeightRef {
    /// The name in the file, which is also the key for [`WeightSource::bytes`].
    pub name: Arc<str>,
    /// The storage format.
    pub ty: QuantType,
    /// Number of rows (outputs).
    pub rows: usize,
    /// Number of columns (inputs), the contiguous dimension.
    pub cols: usize,
}

impl WeightRef {
    /// Bytes of the whole weight. Cannot overflow for a reference from a checked file.
    pub fn bytes(&self) -> usize {
        self.rows * self.ty.row_bytes(self.cols)
    }

    /// Number of values.
    pub fn values(&self) -> usize {
        self.rows * self.cols
    }

    /// Checks the dimensions, and that rows are whole blocks. A vector has one row.
    ///
    /// # Errors
    /// [`WeightError::Mismatch`] with what was found and what was expected.
    pub fn require_shape(&self, rows: usize, cols: usize) -> Result<(), WeightError> {
        if (self.rows, self.cols) != (rows, cols) {
            let found = format!("[{}, {}] found", self.rows, self.cols);
            return Err(self.mismatch(&format!("{found}, [{rows}, {cols}] expected")));
        }
        if rows == 0 || cols == 0 || !cols.is_multiple_of(self.ty.block_values()) {
            let detail = format!("[{rows}, {cols}] cannot be stored as {}", self.ty.name());
            return Err(self.mismatch(&detail));
        }
        Ok(())
    }

    /// The error of a weight that differs from what its model needs.
    pub fn mismatch(&self, detail: &str) -> WeightError {
        WeightError::Mismatch {
            name: Arc::clone(&self.name),
            detail: detail.to_owned(),
        }
    }
}

/// A source of weight bytes: a mapped file, an embedded model, or a test's vectors.
pub trait WeightSource: Send + Sync {
    /// The bytes of `weight`, exactly [`WeightRef::bytes`] long, valid as long as the source.
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError>;
}

/// Why the bytes of a weight are not available.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// No tensor has this name.
    #[error("tensor {name} is missing")]
    Missing {
        /// The tensor's name.
        name: Arc<str>,
    },
    /// The tensor's shape, type or size differs from the reference.
    #[error("tensor {name}: {detail}")]
    Mismatch {
        /// The tensor's name.
        name: Arc<str>,
        /// What was expected and what was found.
        detail: String,
    },
}
