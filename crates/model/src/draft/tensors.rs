//! The tensors of a draft's file by role, under any of their names.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use contract::{QuantType, WeightRef};
use gguf::GgufFile;

use super::DraftFormat;
use crate::ModelError;

/// A tensor outside the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelTensor {
    Fc,
    HiddenNorm,
    FinalNorm,
}

/// A tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerTensor {
    AttentionNorm,
    FfnNorm,
    Q,
    K,
    V,
    O,
    QNorm,
    KNorm,
    Gate,
    Up,
    Down,
}

/// Names of tensors that drafts share with the target. Copies in the draft's file are ignored.
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
        let weight = self.shaped(weight, (1, len))?;
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
    pub(super) fn unused_tensors(&self, vocab: usize, hidden: usize) -> Result<(), ModelError> {
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
            let detail = "not known in DFlash drafts; ignoring it would change what is drafted";
            return Err(self.refuse(name, detail.to_owned()));
        }
        Ok(())
    }
}

fn outer_names(format: DraftFormat, tensor: ModelTensor) -> Vec<String> {
    let names: &[&str] = match (format, tensor) {
        (DraftFormat::GgufC, ModelTensor::Fc) => &["fc.weight"],
        (DraftFormat::GgufC, ModelTensor::HiddenNorm) => &["enc.output_norm.weight"],
        (DraftFormat::GgufA | DraftFormat::GgufB, ModelTensor::Fc) => {
            &["dflash.fc.weight", "dflash_fc.weight"]
        }
        (DraftFormat::GgufA | DraftFormat::GgufB, ModelTensor::HiddenNorm) => {
            &["dflash.hidden_norm.weight", "dflash_hidden_norm.weight"]
        }
        (DraftFormat::Safetensors, ModelTensor::Fc) => &["fc.weight", "model.fc.weight"],
        (DraftFormat::Safetensors, ModelTensor::HiddenNorm) => {
            &["hidden_norm.weight", "model.hidden_norm.weight"]
        }
        (DraftFormat::Safetensors, ModelTensor::FinalNorm) => &["norm.weight", "model.norm.weight"],
        (_, ModelTensor::FinalNorm) => &["output_norm.weight"],
    };
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn inner_names(format: DraftFormat, layer: usize, tensor: LayerTensor) -> Vec<String> {
    if format == DraftFormat::Safetensors {
        let name = match tensor {
            LayerTensor::AttentionNorm => "input_layernorm",
            LayerTensor::FfnNorm => "post_attention_layernorm",
            LayerTensor::Q => "self_attn.q_proj",
            LayerTensor::K => "self_attn.k_proj",
            LayerTensor::V => "self_attn.v_proj",
            LayerTensor::O => "self_attn.o_proj",
            LayerTensor::QNorm => "self_attn.q_norm",
            LayerTensor::KNorm => "self_attn.k_norm",
            LayerTensor::Gate => "mlp.gate_proj",
            LayerTensor::Up => "mlp.up_proj",
            LayerTensor::Down => "mlp.down_proj",
        };
        let plain = format!("layers.{layer}.{name}.weight");
        return vec![plain.clone(), format!("model.{plain}")];
    }
    let names: &[&str] = match tensor {
        LayerTensor::AttentionNorm => &["attn_norm"],
        LayerTensor::FfnNorm => &["ffn_norm", "post_attention_norm"],
        LayerTensor::Q => &["attn_q"],
        LayerTensor::K => &["attn_k"],
        LayerTensor::V => &["attn_v"],
        LayerTensor::O => &["attn_output"],
        LayerTensor::QNorm => &["attn_q_norm"],
        LayerTensor::KNorm => &["attn_k_norm"],
        LayerTensor::Gate => &["ffn_gate"],
        LayerTensor::Up => &["ffn_up"],
        LayerTensor::Down => &["ffn_down"],
    };
    let names = names.iter();
    names
        .map(|name| format!("blk.{layer}.{name}.weight"))
        .collect()
}
