//! The bytes of a shard's weights, cut from those of the whole model.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::{WeightError, WeightRef, WeightSource};

/// What a shard has of a weight: rows and columns of it, each as ranges that follow one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSlice {
    whole: WeightRef,
    rows: Vec<Range<usize>>,
    /// Whole quantisation blocks.
    columns: Vec<Range<usize>>,
}

impl WeightSlice {
    /// Columns must be whole blocks.
    pub(super) fn new(
        whole: &WeightRef,
        rows: Vec<Range<usize>>,
        columns: Vec<Range<usize>>,
    ) -> WeightSlice {
        WeightSlice {
            whole: whole.clone(),
            rows,
            columns,
        }
    }

    /// The rows, in the order in which the shard has them.
    pub fn rows(&self) -> &[Range<usize>] {
        &self.rows
    }

    /// The columns, in the order in which the shard has them.
    pub fn columns(&self) -> &[Range<usize>] {
        &self.columns
    }

    /// The slice as a weight of its own.
    pub fn weight(&self) -> WeightRef {
        let length = |ranges: &[Range<usize>]| ranges.iter().map(ExactSizeIterator::len).sum();
        WeightRef {
            rows: length(&self.rows),
            cols: length(&self.columns),
            ..self.whole.clone()
        }
    }

    /// Where the slice is in the bytes of the whole weight, if it is in one piece.
    fn contiguous(&self) -> Option<Range<usize>> {
        let [rows] = &self.rows[..] else {
            return None;
        };
        let row_bytes = self.whole.ty.row_bytes(self.whole.cols);
        let [columns] = &self.columns[..] else {
            return None;
        };
        (columns.len() == self.whole.cols).then(|| rows.start * row_bytes..rows.end * row_bytes)
    }

    /// The slice's bytes from those of the whole weight.
    fn gather(&self, whole: &[u8]) -> Box<[u8]> {
        let ty = self.whole.ty;
        let row_bytes = ty.row_bytes(self.whole.cols);
        let mut bytes = Vec::with_capacity(self.weight().bytes());
        for row in self.rows.iter().cloned().flatten() {
            let row = &whole[row * row_bytes..(row + 1) * row_bytes];
            for columns in &self.columns {
                let columns = ty.row_bytes(columns.start)..ty.row_bytes(columns.end);
                bytes.extend_from_slice(&row[columns]);
            }
        }
        bytes.into()
    }
}

/// The weights of a shard. Slices in several pieces are copied to host memory at first use, where
/// they stay as long as the source.
pub(super) struct ShardWeights {
    whole: Arc<dyn WeightSource>,
    slices: BTreeMap<Arc<str>, KeptSlice>,
}

/// A slice, and its bytes if they had to be gathered.
struct KeptSlice {
    slice: WeightSlice,
    gathered: OnceLock<Box<[u8]>>,
}

impl ShardWeights {
    pub(super) fn new(
        whole: Arc<dyn WeightSource>,
        slices: &BTreeMap<Arc<str>, WeightSlice>,
    ) -> ShardWeights {
        let kept = |slice: &WeightSlice| KeptSlice {
            slice: slice.clone(),
            gathered: OnceLock::new(),
        };
        let slices = slices.iter();
        let slices = slices.map(|(name, slice)| (Arc::clone(name), kept(slice)));
        ShardWeights {
            whole,
            slices: slices.collect(),
        }
    }
}

impl WeightSource for ShardWeights {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        let Some(KeptSlice { slice, gathered }) = self.slices.get(&weight.name) else {
            return self.whole.bytes(weight);
        };
        if *weight != slice.weight() {
            let expected = slice.weight();
            let shape = format!("[{}, {}]", expected.rows, expected.cols);
            return Err(weight.mismatch(&format!("the shard has {shape} of it")));
        }
        let whole = self.whole.bytes(&slice.whole)?;
        Ok(match slice.contiguous() {
            Some(range) => &whole[range],
            None => gathered.get_or_init(|| slice.gather(whole)),
        })
    }
}
