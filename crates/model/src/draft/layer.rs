//! The tensors of a draft's layer, checked against each other and against the metadata.

use contract::{
    AttentionBiases, AttentionSpec, BlockMask, DenseSpec, DraftLayer, DraftValues, DynamicConv,
    GateActivation, OutputGate, RopeSpec, WeightRef,
};

use super::tensor_names::LayerTensor;
use super::tensors::DraftTensors;
use super::{DraftKind, DraftMetadata};
use crate::ModelError;
use crate::family::{attention_scale, check_head_dim};

/// The tensors of one layer.
pub(super) struct LayerTensors<'a> {
    pub(super) directory: &'a DraftTensors,
    pub(super) metadata: &'a DraftMetadata,
    pub(super) index: usize,
    pub(super) hidden: usize,
}

impl LayerTensors<'_> {
    /// The checked layer.
    ///
    /// # Errors
    /// Names the tensor that is missing or wrong.
    pub(super) fn spec(
        &self,
        rope: RopeSpec,
        window: usize,
        block_mask: BlockMask,
    ) -> Result<DraftLayer, ModelError> {
        let hidden = self.hidden;
        let (attention, values) = self.attention(rope)?;
        let (ffn_norm, post_attention_norm) =
            match self.optional(LayerTensor::PreFfnNorm, hidden)? {
                Some(norm) => (norm, self.optional(LayerTensor::PostAttentionNorm, hidden)?),
                None => (self.vector(LayerTensor::FfnNorm, hidden)?, None),
            };
        let conv = |base, projection| match self.metadata.kind {
            DraftKind::Dflash2 => self.conv(base, projection).map(Some),
            DraftKind::Dflash | DraftKind::Dspark => Ok(None),
        };
        Ok(DraftLayer {
            attention_norm: self.vector(LayerTensor::AttentionNorm, hidden)?,
            sinks: match self.metadata.has_sinks {
                Some(true) => Some(self.vector(LayerTensor::Sinks, attention.n_heads)?),
                _ => self.optional(LayerTensor::Sinks, attention.n_heads)?,
            },
            attention,
            values,
            attention_conv: conv(
                LayerTensor::AttentionConvBase,
                LayerTensor::AttentionConvProjection,
            )?,
            post_attention_norm,
            window,
            block_mask,
            ffn_norm,
            ffn: self.ffn()?,
            ffn_conv: conv(LayerTensor::FfnConvBase, LayerTensor::FfnConvProjection)?,
            post_ffn_norm: self.optional(LayerTensor::PostFfnNorm, hidden)?,
        })
    }

    fn optional(&self, tensor: LayerTensor, len: usize) -> Result<Option<WeightRef>, ModelError> {
        let found = self
            .directory
            .optional_inner(self.metadata.format, self.index, tensor)?;
        let found = found.map(|weight| self.directory.vector(weight, len));
        found.transpose()
    }

    /// A convolution. The tensors' shapes give its taps and groups, which the keys must not
    /// contradict.
    fn conv(&self, base: LayerTensor, projection: LayerTensor) -> Result<DynamicConv, ModelError> {
        let (directory, metadata, hidden) = (self.directory, self.metadata, self.hidden);
        let (base, projection) = (self.get(base)?, self.get(projection)?);
        let taps = base.rows / 2;
        let said = metadata.conv_taps.unwrap_or(taps);
        if taps == 0 || taps != said {
            let detail = format!("{} rows, two sides of {said} taps are expected", base.rows);
            return Err(directory.refuse(&base.name, detail));
        }
        let groups = projection.rows / (2 * taps);
        let group = metadata.conv_group.unwrap_or(hidden / groups.max(1));
        if group == 0 || !hidden.is_multiple_of(group) {
            let detail = format!("groups of {group} channels do not divide {hidden}");
            return Err(directory.refuse(&projection.name, detail));
        }
        let base = directory.unquantized(directory.shaped(base, (2 * taps, hidden))?)?;
        let projection = directory.shaped(projection, (2 * taps * (hidden / group), hidden))?;
        Ok(DynamicConv {
            base,
            projection,
            taps,
            group,
        })
    }

    fn get(&self, tensor: LayerTensor) -> Result<WeightRef, ModelError> {
        self.directory
            .inner(self.metadata.format, self.index, tensor)
    }

    fn matrix(
        &self,
        tensor: LayerTensor,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        self.directory.shaped(self.get(tensor)?, (rows, cols))
    }

    fn vector(&self, tensor: LayerTensor, len: usize) -> Result<WeightRef, ModelError> {
        self.directory.vector(self.get(tensor)?, len)
    }

    /// Number of heads of a weight. Refuses rows that are not whole heads or contradict the
    /// metadata.
    fn heads(
        &self,
        weight: &WeightRef,
        head_dim: usize,
        said: Option<usize>,
    ) -> Result<usize, ModelError> {
        let n = weight.rows / head_dim;
        if !weight.rows.is_multiple_of(head_dim) || said.is_some_and(|said| said != n) {
            let said = said.map_or("whole heads".to_owned(), |said| format!("{said} heads"));
            let rows = weight.rows;
            let detail = format!("{rows} rows, {said} of {head_dim} are expected");
            return Err(self.directory.refuse(&weight.name, detail));
        }
        Ok(n)
    }

    fn attention(&self, rope: RopeSpec) -> Result<(AttentionSpec, DraftValues), ModelError> {
        let metadata = self.metadata;
        // The norm of a head has the length of a head.
        let head_dim = self.get(LayerTensor::QNorm)?.cols;
        check_head_dim(head_dim)
            .and_then(|()| match metadata.head_dim {
                Some(said) if said != head_dim => Err(format!("{head_dim} long, {said} expected")),
                _ => Ok(()),
            })
            .map_err(|detail| {
                let name = self.get(LayerTensor::QNorm).map(|w| w.name.to_string());
                self.directory.refuse(&name.unwrap_or_default(), detail)
            })?;
        let (q, k) = (self.get(LayerTensor::Q)?, self.get(LayerTensor::K)?);
        let n_heads = self.heads(&q, head_dim, metadata.heads)?;
        let n_kv_heads = self.heads(&k, head_dim, metadata.kv_heads)?;
        if n_heads == 0 || n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
            let detail = format!("{n_heads} query heads for {n_kv_heads} key heads");
            return Err(self.directory.refuse(&q.name, detail));
        }
        let dims = metadata.rope_dims.unwrap_or(head_dim);
        if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
            let detail = format!("{dims} rotary values in heads of {head_dim}");
            return Err(self.directory.refuse(&q.name, detail));
        }
        let directory = self.directory;
        let (q_rows, kv_rows) = (q.rows, k.rows);
        // A later kind may derive its values from the key projection.
        let values = match metadata.kind {
            DraftKind::Dflash => DraftValues::Projection,
            DraftKind::Dflash2 | DraftKind::Dspark => self.values()?,
        };
        let k = directory.shaped(k, (kv_rows, self.hidden))?;
        let spec = AttentionSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            rope: RopeSpec { dims, ..rope },
            rope_factors: None,
            window: None,
            scale: attention_scale(head_dim),
            gate: OutputGate::None,
            q_norm: Some(self.vector(LayerTensor::QNorm, head_dim)?),
            k_norm: Some(self.vector(LayerTensor::KNorm, head_dim)?),
            q: directory.shaped(q, (q_rows, self.hidden))?,
            v: match values {
                DraftValues::Projection => self.matrix(LayerTensor::V, kv_rows, self.hidden)?,
                DraftValues::Keys => k.clone(),
            },
            k,
            o: self.matrix(LayerTensor::O, self.hidden, q_rows)?,
            biases: AttentionBiases::default(),
        };
        Ok((spec, values))
    }

    fn values(&self) -> Result<DraftValues, ModelError> {
        let own =
            self.directory
                .optional_inner(self.metadata.format, self.index, LayerTensor::V)?;
        Ok(if own.is_some() {
            DraftValues::Projection
        } else {
            DraftValues::Keys
        })
    }

    fn ffn(&self) -> Result<DenseSpec, ModelError> {
        let gate = self.get(LayerTensor::Gate)?;
        let ffn = gate.rows;
        if let Some(said) = self.metadata.ffn.filter(|said| *said != ffn) {
            let detail = format!("{ffn} rows, the file says {said}");
            return Err(self.directory.refuse(&gate.name, detail));
        }
        Ok(DenseSpec {
            activation: GateActivation::Silu,
            gate: self.directory.shaped(gate, (ffn, self.hidden))?,
            up: self.matrix(LayerTensor::Up, ffn, self.hidden)?,
            down: self.matrix(LayerTensor::Down, self.hidden, ffn)?,
        })
    }
}
