//! The tensors of a draft's file by role, under any of their names.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use contract::{QuantType, WeightRef};
use gguf::GgufFile;

use super::tensor_names::{LayerTensor, ModelTensor, inner_names, outer_names};
use super::{DraftFormat, DraftKind};
use crate::ModelError;

/// Names of tensors that drafts of the first kind share with the target. Copies in the draft's file
/// are ignored.
const BORROWED: [&str; 6] = [
    "token_embd.weight",
    "output.weight",
    "embed_tokens.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.lm_head.weight",
];

/// All tensors of a file, and the requested ones among them.
pub(super) struct DraftTensors {
    pub(super) file: String,
    /// Name to weight, or to the name of an unsupported type.
    tensors: BTreeMap<Arc<str>, Result<WeightRef, String>>,
    used: RefCell<HashSet<Arc<str>>>,
}

impl DraftTensors {
    pub(super) fn new(file: String) -> DraftTensors {
        DraftTensors {
            file,
            tensors: BTreeMap::new(),
            used: RefCell::default(),
        }
    }

    pub(super) fn of_gguf(file: &GgufFile) -> DraftTensors {
        let mut directory = DraftTensors::new(file.name().to_owned());
        for info in file.tensors() {
            let weight = info.weight().ok_or_else(|| info.ty().to_string());
            directory.insert(Arc::clone(info.name()), weight);
        }
        directory
    }

    pub(super) fn insert(&mut self, name: Arc<str>, weight: Result<WeightRef, String>) {
        self.tensors.insert(name, weight);
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(|name| &**name)
    }

    pub(super) fn bytes(&self) -> u64 {
        let known = self
            .tensors
            .values()
            .filter_map(|weight| weight.as_ref().ok());
        known.map(|weight| weight.bytes() as u64).sum()
    }

    pub(super) fn outer(
        &self,
        format: DraftFormat,
        tensor: ModelTensor,
    ) -> Result<WeightRef, ModelError> {
        self.first(&outer_names(format, tensor))
    }

    pub(super) fn inner(
        &self,
        format: DraftFormat,
        layer: usize,
        tensor: LayerTensor,
    ) -> Result<WeightRef, ModelError> {
        self.first(&inner_names(format, layer, tensor))
    }

    /// A tensor outside the layers that a draft may lack.
    pub(super) fn optional_outer(
        &self,
        format: DraftFormat,
        tensor: ModelTensor,
    ) -> Result<Option<WeightRef>, ModelError> {
        self.optional(&outer_names(format, tensor))
    }

    /// A tensor of a layer that a draft may lack.
    pub(super) fn optional_inner(
        &self,
        format: DraftFormat,
        layer: usize,
        tensor: LayerTensor,
    ) -> Result<Option<WeightRef>, ModelError> {
        self.optional(&inner_names(format, layer, tensor))
    }

    /// The name of a tensor that is not a weight, which counts as used.
    pub(super) fn name_of(&self, format: DraftFormat, tensor: ModelTensor) -> Option<Arc<str>> {
        let names = outer_names(format, tensor);
        let found = names
            .iter()
            .find_map(|name| self.tensors.get_key_value(&**name));
        let (name, _) = found?;
        self.used.borrow_mut().insert(Arc::clone(name));
        Some(Arc::clone(name))
    }

    fn optional(&self, names: &[String]) -> Result<Option<WeightRef>, ModelError> {
        if names.iter().any(|name| self.tensors.contains_key(&**name)) {
            self.first(names).map(Some)
        } else {
            Ok(None)
        }
    }

    /// The tensor under the first existing name.
    fn first(&self, names: &[String]) -> Result<WeightRef, ModelError> {
        let found = names
            .iter()
            .find_map(|name| self.tensors.get_key_value(&**name));
        match found {
            None => Err(self.refuse(&names[0], "missing".to_owned())),
            Some((name, Err(ty))) => {
                let known: Vec<&str> = QuantType::ALL.iter().map(|ty| ty.name()).collect();
                let known = known.join(", ");
                Err(self.refuse(
                    name,
                    format!("stored as {ty}; types that can be read: {known}"),
                ))
            }
            Some((name, Ok(weight))) => {
                self.used.borrow_mut().insert(Arc::clone(name));
                Ok(weight.clone())
            }
        }
    }

    pub(super) fn refuse(&self, tensor: &str, detail: String) -> ModelError {
        ModelError::Tensor {
            file: self.file.clone(),
            tensor: tensor.escape_debug().to_string(),
            detail,
        }
    }

    /// Refuses a weight of another shape.
    pub(super) fn shaped(
        &self,
        weight: WeightRef,
        (rows, cols): (usize, usize),
    ) -> Result<WeightRef, ModelError> {
        if (weight.rows, weight.cols) == (rows, cols) {
            return Ok(weight);
        }
        let detail = format!(
            "of shape {} x {}, {cols} x {rows} is expected",
            weight.cols, weight.rows
        );
        Err(self.refuse(&weight.name, detail))
    }

    /// Refuses a vector of another length or a quantized one.
    pub(super) fn vector(&self, weight: WeightRef, len: usize) -> Result<WeightRef, ModelError> {
        self.unquantized(self.shaped(weight, (1, len))?)
    }

    /// Refuses a quantized weight.
    pub(super) fn unquantized(&self, weight: WeightRef) -> Result<WeightRef, ModelError> {
        match weight.ty {
            QuantType::F32 | QuantType::F16 | QuantType::BF16 => Ok(weight),
            other => {
                let detail = format!(
                    "stored as {}, one of F32, F16, BF16 is expected",
                    other.name()
                );
                Err(self.refuse(&weight.name, detail))
            }
        }
    }

    /// Refuses tensors that were not requested, except copies of the target's shared tensors,
    /// `[vocab, hidden]`.
    pub(super) fn unused_tensors(
        &self,
        kind: DraftKind,
        (vocab, hidden): (usize, usize),
    ) -> Result<(), ModelError> {
        let used = self.used.borrow();
        for (name, weight) in &self.tensors {
            if used.contains(name) {
                continue;
            }
            let shape = weight.as_ref().ok().map(|w| (w.rows, w.cols));
            if BORROWED.contains(&&**name) {
                if shape.is_some_and(|shape| shape != (vocab, hidden)) {
                    let detail = "a draft with an embedding or head of its own is not supported; \
                                  use one that borrows the target's";
                    return Err(self.refuse(name, detail.to_owned()));
                }
                tracing::info!(tensor = &**name, "the target's own is used instead");
                continue;
            }
            // The inverse of `d2t`, which nothing reads.
            if &**name == "t2d" {
                continue;
            }
            let detail = format!(
                "not known in {} drafts; ignoring it would change what is drafted",
                kind.name()
            );
            return Err(self.refuse(name, detail));
        }
        Ok(())
    }
}
