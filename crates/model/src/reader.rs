//! Typed access to a file as a model of one family: prefixed keys and named tensors, with every
//! shape checked.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use contract::{ExpertStack, QuantType, WeightRef};
use gguf::{GgufError, GgufFile, TensorType};

use crate::ModelError;
use crate::names::{block_of, in_block};

/// A file as a model of its architecture.
pub(crate) struct Reader<'a> {
    pub(crate) file: &'a GgufFile,
    pub(crate) architecture: &'a str,
    /// Names of the tensors that were requested and found.
    used: RefCell<HashSet<Arc<str>>>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(file: &'a GgufFile) -> Result<Reader<'a>, ModelError> {
        const KEY: &str = "general.architecture";
        let architecture = file
            .meta()
            .text(KEY)
            .map_err(|e| key_error(file, e))?
            .ok_or_else(|| missing(file, KEY))?;
        Ok(Reader {
            file,
            architecture,
            used: RefCell::default(),
        })
    }

    /// `qwen35.block_count` for `block_count`.
    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.architecture)
    }

    pub(crate) fn refuse_key(&self, suffix: &str, detail: String) -> ModelError {
        ModelError::Key {
            file: self.file.name().to_owned(),
            key: self.key(suffix),
            detail,
        }
    }

    pub(crate) fn refuse_tensor(&self, tensor: &str, detail: String) -> ModelError {
        ModelError::Tensor {
            file: self.file.name().to_owned(),
            tensor: tensor.escape_debug().to_string(),
            detail,
        }
    }

    pub(crate) fn unsupported(&self, what: String, instead: &str) -> ModelError {
        ModelError::Unsupported {
            file: self.file.name().to_owned(),
            what,
            instead: instead.to_owned(),
        }
    }

    pub(crate) fn optional(&self, suffix: &str) -> Result<Option<usize>, ModelError> {
        let found = self
            .file
            .meta()
            .integer(&self.key(suffix))
            .map_err(|e| key_error(self.file, e))?;
        let Some(found) = found else { return Ok(None) };
        match u32::try_from(found) {
            Ok(value) => Ok(Some(value as usize)),
            Err(_) => Err(self.refuse_key(suffix, format!("{found} is beyond any model"))),
        }
    }

    /// A required positive integer.
    pub(crate) fn count(&self, suffix: &str) -> Result<usize, ModelError> {
        match self.optional(suffix)? {
            Some(0) => Err(self.refuse_key(suffix, "0 where at least 1 is expected".to_owned())),
            Some(value) => Ok(value),
            None => Err(missing(self.file, &self.key(suffix))),
        }
    }

    /// A required positive finite float.
    pub(crate) fn float(&self, suffix: &str) -> Result<f64, ModelError> {
        let found = self
            .file
            .meta()
            .float(&self.key(suffix))
            .map_err(|e| key_error(self.file, e))?;
        match found {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => Err(self.refuse_key(
                suffix,
                format!("{value} where a positive float is expected"),
            )),
            None => Err(missing(self.file, &self.key(suffix))),
        }
    }

    /// A float that may be absent and may have any value.
    pub(crate) fn number(&self, suffix: &str) -> Result<Option<f64>, ModelError> {
        let found = self.file.meta().float(&self.key(suffix));
        found.map_err(|e| key_error(self.file, e))
    }

    /// [`Reader::float`] of a key that may be absent.
    pub(crate) fn optional_float(&self, suffix: &str) -> Result<Option<f64>, ModelError> {
        self.has_key(suffix).then(|| self.float(suffix)).transpose()
    }

    pub(crate) fn has_key(&self, suffix: &str) -> bool {
        self.file.meta().get(&self.key(suffix)).is_some()
    }

    /// One number per block, stored as an array or as one number for all.
    pub(crate) fn per_block(&self, suffix: &str, blocks: usize) -> Result<Vec<usize>, ModelError> {
        let key = self.key(suffix);
        let meta = self.file.meta();
        let found = meta.integers(&key).map_err(|e| key_error(self.file, e))?;
        let found = found.ok_or_else(|| missing(self.file, &key))?;
        let narrow = |value: u64| {
            u32::try_from(value)
                .map(|v| v as usize)
                .map_err(|_| self.refuse_key(suffix, format!("{value} is beyond any model")))
        };
        match found[..] {
            [one] if meta.integer(&key).is_ok() => Ok(vec![narrow(one)?; blocks]),
            _ if found.len() == blocks => found.into_iter().map(narrow).collect(),
            _ => Err(self.refuse_key(
                suffix,
                format!("{} numbers for {blocks} blocks", found.len()),
            )),
        }
    }

    pub(crate) fn flags(&self, suffix: &str) -> Result<Option<&'a [bool]>, ModelError> {
        self.file
            .meta()
            .booleans(&self.key(suffix))
            .map_err(|e| key_error(self.file, e))
    }

    pub(crate) fn text(&self, suffix: &str) -> Result<Option<&'a str>, ModelError> {
        self.file
            .meta()
            .text(&self.key(suffix))
            .map_err(|e| key_error(self.file, e))
    }

    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.file.tensor(tensor).is_some()
    }

    /// A matrix of exactly this shape, of any supported type.
    pub(crate) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        let Some(info) = self.file.tensor(name) else {
            return Err(self.refuse_tensor(
                name,
                format!("missing; a matrix of {cols} x {rows} is expected"),
            ));
        };
        let weight = match (info.ty(), info.weight()) {
            (TensorType::Known(_), Some(weight)) => weight,
            (ty, _) => {
                let known: Vec<&str> = QuantType::ALL.iter().map(|ty| ty.name()).collect();
                return Err(self.refuse_tensor(
                    name,
                    format!(
                        "stored as {ty}; types that can be read: {}",
                        known.join(", ")
                    ),
                ));
            }
        };
        if (weight.rows, weight.cols) != (rows, cols) {
            return Err(self.refuse_tensor(
                name,
                format!("of shape {}, {cols} x {rows} is expected", info.shape()),
            ));
        }
        self.used.borrow_mut().insert(Arc::clone(&weight.name));
        Ok(weight)
    }

    /// One matrix of exactly this shape for each of `n_experts` experts.
    pub(crate) fn stack(
        &self,
        name: &str,
        n_experts: usize,
        (rows, cols): (usize, usize),
    ) -> Result<ExpertStack, ModelError> {
        let expected = || format!("{cols} x {rows} x {n_experts} (experts last) is expected");
        let Some(info) = self.file.tensor(name) else {
            return Err(self.refuse_tensor(name, format!("missing; {}", expected())));
        };
        // The third dimension decides, so that a matrix of as many rows is not taken for experts.
        let same = |dim: Option<&u64>, n: usize| dim.is_some_and(|&dim| dim == n as u64);
        let dims = info.dims();
        let experts = if n_experts == 1 && dims.len() == 2 {
            Some(&1)
        } else {
            dims.get(2)
        };
        let fits = same(dims.first(), cols) && same(dims.get(1), rows) && same(experts, n_experts);
        if !fits || dims.len() > 3 {
            let detail = format!("of shape {}, {}", info.shape(), expected());
            return Err(self.refuse_tensor(name, detail));
        }
        let all = rows.checked_mul(n_experts).ok_or_else(|| {
            self.refuse_tensor(name, format!("{rows} x {n_experts} rows overflow"))
        })?;
        Ok(ExpertStack {
            weight: self.matrix(name, all, cols)?,
            n_experts,
        })
    }

    /// A matrix or vector that is never quantized.
    pub(crate) fn plain(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        let weight = self.matrix(name, rows, cols)?;
        match weight.ty {
            QuantType::F32 | QuantType::F16 | QuantType::BF16 => Ok(weight),
            other => Err(self.refuse_tensor(
                name,
                format!(
                    "stored as {}, one of F32, F16, BF16 is expected",
                    other.name()
                ),
            )),
        }
    }

    /// A vector, which is never quantized.
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<WeightRef, ModelError> {
        self.plain(name, 1, len)
    }

    /// Refuses unrequested tensors of the first `blocks` blocks, because they would change the
    /// result. Returns the names of all other ignored tensors.
    pub(crate) fn unused_tensors(&self, blocks: usize) -> Result<Vec<Arc<str>>, ModelError> {
        let used = self.used.borrow();
        let mut ignored = Vec::new();
        for info in self.file.tensors() {
            let name = info.name();
            if used.contains(name) {
                continue;
            }
            let in_model = block_of(name).is_some_and(|(block, _)| block < blocks);
            if in_model || name.starts_with("rope_") {
                return Err(self.refuse_tensor(
                    name,
                    format!(
                        "not known in {} models; ignoring it would change the result",
                        self.architecture
                    ),
                ));
            }
            ignored.push(Arc::clone(name));
        }
        Ok(ignored)
    }
}

/// A block of a file, whose index is part of its tensor names.
pub(crate) struct BlockReader<'a> {
    pub(crate) reader: &'a Reader<'a>,
    pub(crate) index: usize,
}

impl BlockReader<'_> {
    pub(crate) fn stack(
        &self,
        name: &str,
        n_experts: usize,
        shape: (usize, usize),
    ) -> Result<ExpertStack, ModelError> {
        self.reader.stack(&self.name(name), n_experts, shape)
    }

    pub(crate) fn name(&self, name: &str) -> String {
        in_block(self.index, name)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.reader.has(&self.name(name))
    }

    pub(crate) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        self.reader.matrix(&self.name(name), rows, cols)
    }

    pub(crate) fn plain(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        self.reader.plain(&self.name(name), rows, cols)
    }

    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<WeightRef, ModelError> {
        self.reader.vector(&self.name(name), len)
    }

    /// A vector that may be absent.
    pub(crate) fn optional_vector(
        &self,
        name: &str,
        len: usize,
    ) -> Result<Option<WeightRef>, ModelError> {
        self.has(name).then(|| self.vector(name, len)).transpose()
    }

    pub(crate) fn refuse(&self, name: &str, detail: &str) -> ModelError {
        self.reader
            .refuse_tensor(&self.name(name), detail.to_owned())
    }
}

pub(crate) fn missing(file: &GgufFile, key: &str) -> ModelError {
    ModelError::Key {
        file: file.name().to_owned(),
        key: key.to_owned(),
        detail: "missing".to_owned(),
    }
}

/// Adds the file's name to an error of a key.
pub(crate) fn key_error(file: &GgufFile, error: GgufError) -> ModelError {
    match error {
        GgufError::Meta {
            key,
            expected,
            found,
        } => ModelError::Key {
            file: file.name().to_owned(),
            key,
            detail: format!("holds {found}, expected {expected}"),
        },
        other => other.into(),
    }
}
