//! The tensor directory: types, shapes and positions.

use std::fmt;
use std::sync::Arc;

use contract::{QuantType, WeightRef};

/// A tensor's storage type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// A supported type.
    Known(QuantType),
    /// 64-bit integers, such as token ids; not a weight.
    I64,
    /// An unsupported type with its id. A file may contain such a tensor as long as it is not read.
    Foreign(u32),
}

/// GGUF's id of 64-bit integers.
pub(crate) const I64_ID: u32 = 27;

impl TensorType {
    /// The type of a GGUF id.
    pub fn from_id(id: u32) -> TensorType {
        match (QuantType::from_id(id), id) {
            (Some(ty), _) => TensorType::Known(ty),
            (None, I64_ID) => TensorType::I64,
            (None, _) => TensorType::Foreign(id),
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorType::Known(ty) => f.write_str(ty.name()),
            TensorType::I64 => f.write_str("I64"),
            TensorType::Foreign(id) => match foreign_name(*id) {
                Some(name) => write!(f, "{name} (type id {id})"),
                None => write!(f, "type id {id}"),
            },
        }
    }
}

/// Names of GGUF types that [`QuantType`] lacks, for messages.
fn foreign_name(id: u32) -> Option<&'static str> {
    Some(match id {
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        28 => "F64",
        41 => "Q1_0",
        42 => "Q2_0",
        _ => return None,
    })
}

/// One checked entry of the tensor directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub(crate) name: Arc<str>,
    pub(crate) ty: TensorType,
    pub(crate) dims: Vec<u64>,
    /// Index of the file among the parts of a split model.
    pub(crate) part: usize,
    /// Bytes from the start of that file.
    pub(crate) start: usize,
    /// 0 for a foreign type, because its size is unknown.
    pub(crate) n_bytes: usize,
}

impl TensorInfo {
    /// The name, unique in the model, at most 63 bytes.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The storage type.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// The dimensions, the contiguous one first; one to four of them, none zero.
    pub fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// Number of values. Cannot overflow, because the parser has checked the product.
    pub fn values(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Bytes in the file; `None` for a foreign type.
    pub fn n_bytes(&self) -> Option<usize> {
        match self.ty {
            TensorType::Known(_) | TensorType::I64 => Some(self.n_bytes),
            TensorType::Foreign(_) => None,
        }
    }

    /// The tensor as a matrix of `dims[0]` columns, with all other dimensions as rows; `None` for a
    /// foreign type.
    pub fn weight(&self) -> Option<WeightRef> {
        let TensorType::Known(ty) = self.ty else {
            return None;
        };
        let cols = usize::try_from(self.dims[0]).ok()?;
        let rows = usize::try_from(self.values() / self.dims[0]).ok()?;
        Some(WeightRef {
            name: Arc::clone(&self.name),
            ty,
            rows,
            cols,
        })
    }

    /// The dimensions as text, such as `1024 x 3584`.
    pub fn shape(&self) -> String {
        shape(&self.dims)
    }
}

pub(crate) fn shape(dims: &[u64]) -> String {
    dims.iter()
        .map(u64::to_string)
        .collect::<Vec<_>>()
        .join(" x ")
}
