//! A GGUF file as the families read it: typed keys under the architecture's prefix, tensors of checked shape,
//! and errors that name file, key and tensor.

use std::sync::Arc;

use contract::WeightRef;
use gguf::{GgufError, GgufFile, Meta, TensorType};

use crate::error::ModelError;

/// No dimension of a real model comes near this; a larger count is damage.
const MOST: u64 = 1 << 32;

/// One file and its architecture's name.
pub(crate) struct Source<'a> {
    file: &'a GgufFile,
    name: String,
    architecture: String,
}

impl<'a> Source<'a> {
    /// Reads the architecture's name, the prefix of all other keys.
    pub(crate) fn new(file: &'a GgufFile) -> Result<Source<'a>, ModelError> {
        const KEY: &str = "general.architecture";
        let mut source = Source {
            file,
            name: file.name().to_owned(),
            architecture: String::new(),
        };
        source.architecture = source
            .read(|meta| meta.text(KEY))?
            .ok_or_else(|| source.full_key(KEY, "is missing, so this is no model".to_owned()))?
            .to_owned();
        Ok(source)
    }

    pub(crate) fn architecture(&self) -> &str {
        &self.architecture
    }

    pub(crate) fn file_name(&self) -> &str {
        &self.name
    }

    pub(crate) fn file(&self) -> &'a GgufFile {
        self.file
    }

    /// An error about a key of the architecture.
    pub(crate) fn key(&self, key: &str, detail: String) -> ModelError {
        self.full_key(&self.full(key), detail)
    }

    /// An error about a key by its full name.
    pub(crate) fn full_key(&self, key: &str, detail: String) -> ModelError {
        ModelError::Key {
            file: self.name.clone(),
            key: key.to_owned(),
            detail,
        }
    }

    pub(crate) fn unsupported(&self, what: String, instead: &str) -> ModelError {
        ModelError::Unsupported {
            file: self.name.clone(),
            what,
            instead: instead.to_owned(),
        }
    }

    fn tensor_error(&self, tensor: &str, detail: String) -> ModelError {
        ModelError::Tensor {
            file: self.name.clone(),
            tensor: tensor.to_owned(),
            detail,
        }
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A whole number, `None` when the key is absent. A per-layer list counts if all entries that are not 0
    /// agree, since some converters write lists for what is the same in every layer.
    pub(crate) fn optional_usize(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(entries) = self.read(|meta| meta.integers(&self.full(key)))? else {
            return Ok(None);
        };
        let mut found = None;
        for number in entries {
            if number > MOST {
                return Err(self.key(key, format!("is {number}, which no model comes near")));
            }
            match found {
                None | Some(0) => found = Some(number),
                Some(before) if number != 0 && number != before => {
                    return Err(self.key(key, format!("differs by layer ({before} and {number})")));
                }
                Some(_) => {}
            }
        }
        match found.map(usize::try_from).transpose() {
            Ok(Some(number)) => Ok(Some(number)),
            _ => Err(self.key(key, "holds no number".to_owned())),
        }
    }

    /// A whole number of at least 1.
    pub(crate) fn count(&self, key: &str) -> Result<usize, ModelError> {
        match self.optional_usize(key)? {
            None => Err(self.key(key, "is missing".to_owned())),
            Some(0) => Err(self.key(key, "is 0, expected at least 1".to_owned())),
            Some(count) => Ok(count),
        }
    }

    /// A number, or `default` when the key is absent.
    pub(crate) fn float(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        Ok(self
            .read(|meta| meta.float(&self.full(key)))?
            .unwrap_or(default))
    }

    /// A list of switches, `None` when the key is absent.
    pub(crate) fn bools(&self, key: &str) -> Result<Option<&'a [bool]>, ModelError> {
        self.read(|meta| meta.booleans(&self.full(key)))
    }

    /// Reads metadata, and puts the file's name on what goes wrong.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&'a Meta) -> Result<Option<T>, GgufError>,
    ) -> Result<Option<T>, ModelError> {
        read(self.file.meta()).map_err(|error| match error {
            GgufError::Meta {
                key,
                expected,
                found,
            } => self.full_key(&key, format!("is {found}, expected {expected}")),
            other => ModelError::Container(other),
        })
    }

    /// Whether a tensor is there.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.file.tensor(tensor).is_some()
    }

    /// The dimensions of a tensor, fastest first, without trailing ones.
    pub(crate) fn dims(&self, tensor: &str) -> Option<Vec<u64>> {
        let mut dims = self.file.tensor(tensor)?.dims().to_vec();
        while dims.len() > 1 && dims.last() == Some(&1) {
            dims.pop();
        }
        Some(dims)
    }

    /// A vector of `len` values.
    pub(crate) fn vector(&self, tensor: &str, len: usize) -> Result<WeightRef, ModelError> {
        self.weight(tensor, 1, len)
    }

    /// A matrix of `rows` rows of `cols` contiguous values.
    pub(crate) fn matrix(
        &self,
        tensor: &str,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        self.weight(tensor, rows, cols)
    }

    fn weight(&self, tensor: &str, rows: usize, cols: usize) -> Result<WeightRef, ModelError> {
        let info = self.file.tensor(tensor).ok_or_else(|| {
            self.tensor_error(tensor, format!("is missing, expected {rows} x {cols}"))
        })?;
        let found = self.dims(tensor).unwrap_or_default();
        let expected: &[u64] = if rows == 1 {
            &[cols as u64]
        } else {
            &[cols as u64, rows as u64]
        };
        if found != expected {
            let detail = format!("has dimensions {found:?}, expected {expected:?} (fastest first)");
            return Err(self.tensor_error(tensor, detail));
        }
        match info.ty() {
            TensorType::Known(ty) => Ok(WeightRef {
                name: Arc::clone(info.name()),
                ty,
                rows,
                cols,
            }),
            TensorType::Foreign(_) => Err(self.tensor_error(
                tensor,
                format!(
                    "is stored as {}, which is not supported; use a file without it",
                    info.ty()
                ),
            )),
        }
    }
}
