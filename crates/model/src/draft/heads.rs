//! The tensors outside a draft's layers that only some drafts have: embedding, LM head, and what
//! makes candidates depend on the token before.

use std::sync::Arc;

use contract::{
    Conditioning, ConfidenceHead, DraftHead, MarkovHead, ModelSpec, PairwiseSelector, TokenId,
    WeightRef,
};

use super::tensor_names::ModelTensor;
use super::{DraftFile, DraftKind};
use crate::ModelError;

/// Largest number of candidates that a pairwise selector scores; published drafts have 16.
const MAX_TOP_K: usize = 64;

/// A draft, its target and their width.
pub(super) struct HeadTensors<'a> {
    pub(super) draft: &'a DraftFile,
    pub(super) target: &'a ModelSpec,
    pub(super) hidden: usize,
}

impl HeadTensors<'_> {
    fn optional(&self, tensor: ModelTensor) -> Result<Option<WeightRef>, ModelError> {
        let draft = self.draft;
        draft
            .directory
            .optional_outer(draft.metadata.format, tensor)
    }

    /// A required matrix of exactly this shape.
    fn matrix(
        &self,
        tensor: ModelTensor,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        let directory = &self.draft.directory;
        directory.shaped(self.get(tensor)?, (rows, cols))
    }

    fn get(&self, tensor: ModelTensor) -> Result<WeightRef, ModelError> {
        let draft = self.draft;
        draft.directory.outer(draft.metadata.format, tensor)
    }

    /// The draft's own embedding. Drafts of the first kind share the target's, whatever they hold.
    pub(super) fn embedding(&self) -> Result<Option<WeightRef>, ModelError> {
        if self.draft.metadata.kind == DraftKind::Dflash {
            return Ok(None);
        }
        let shape = (self.target.vocab, self.hidden);
        let own = self.optional(ModelTensor::Embedding)?;
        let own = own.map(|weight| self.draft.directory.shaped(weight, shape));
        own.transpose()
    }

    /// The draft's own LM head, over the target's vocabulary or a part of it.
    pub(super) fn head(&self) -> Result<Option<DraftHead>, ModelError> {
        let draft = self.draft;
        if draft.metadata.kind == DraftKind::Dflash {
            return Ok(None);
        }
        let ids = self.vocab_map()?;
        let rows = ids.as_ref().map_or(self.target.vocab, |ids| ids.len());
        let Some(weight) = self.optional(ModelTensor::Head)? else {
            if ids.is_none() {
                return Ok(None);
            }
            // A part of the vocabulary needs a head of its own; this names it.
            return Err(self.get(ModelTensor::Head).err().unwrap_or_else(|| {
                draft
                    .directory
                    .refuse("d2t", "without an LM head".to_owned())
            }));
        };
        Ok(Some(DraftHead {
            weight: draft.directory.shaped(weight, (rows, self.hidden))?,
            ids,
        }))
    }

    /// The target's ids of the rows of the draft's own head.
    fn vocab_map(&self) -> Result<Option<Arc<[TokenId]>>, ModelError> {
        const NAME: &str = "d2t";
        let (draft, vocab) = (self.draft, self.target.vocab);
        let refuse = |detail: String| Err(draft.directory.refuse(NAME, detail));
        let named = draft
            .directory
            .name_of(draft.metadata.format, ModelTensor::VocabMap);
        let Some(map) = &draft.vocab_map else {
            return match named {
                Some(_) => refuse("64-bit integers are expected".to_owned()),
                None => Ok(None),
            };
        };
        if draft.metadata.kind == DraftKind::Dflash2 {
            return refuse("a pairwise selector scores the whole vocabulary".to_owned());
        }
        let mut seen = vec![false; vocab];
        let mut ids = Vec::with_capacity(map.len());
        for (row, id) in map.iter().enumerate() {
            let known = usize::try_from(*id).ok().filter(|id| *id < vocab);
            let Some(id) = known else {
                return refuse(format!(
                    "row {row} is token {id}, beyond the target's {vocab}"
                ));
            };
            if std::mem::replace(&mut seen[id], true) {
                return refuse(format!("token {id} occurs twice"));
            }
            ids.push(TokenId(id as u32));
        }
        Ok(Some(ids.into()))
    }

    /// What makes candidates depend on the token before.
    pub(super) fn conditioning(&self) -> Result<Conditioning, ModelError> {
        match self.draft.metadata.kind {
            DraftKind::Dflash => Ok(Conditioning::Independent),
            DraftKind::Dflash2 => self.selector().map(Conditioning::Pairwise),
            DraftKind::Dspark => self.markov().map(Conditioning::Markov),
        }
    }

    fn selector(&self) -> Result<PairwiseSelector, ModelError> {
        let (metadata, vocab) = (&self.draft.metadata, self.target.vocab);
        let hidden = self.get(ModelTensor::SelectorHidden)?;
        let rank = self.rank(&hidden, hidden.rows)?;
        let Some(top_k) = metadata.selector_top_k else {
            return Err(self.key("selector_top_k", "missing".to_owned()));
        };
        if !(1..=MAX_TOP_K.min(vocab)).contains(&top_k) {
            let detail = format!("{top_k}, 1 to {} is expected", MAX_TOP_K.min(vocab));
            return Err(self.key("selector_top_k", detail));
        }
        Ok(PairwiseSelector {
            hidden: self.draft.directory.shaped(hidden, (rank, self.hidden))?,
            predecessor: self.matrix(ModelTensor::SelectorPredecessor, vocab, rank)?,
            successor: self.matrix(ModelTensor::SelectorSuccessor, vocab, rank)?,
            top_k,
        })
    }

    fn markov(&self) -> Result<MarkovHead, ModelError> {
        let (directory, vocab) = (&self.draft.directory, self.target.vocab);
        let previous = self.get(ModelTensor::MarkovPrevious)?;
        let rank = self.rank(&previous, previous.cols)?;
        let draft_vocab = self.draft.vocab_map.as_ref().map_or(vocab, Vec::len);
        let said = self.draft.metadata.has_confidence;
        let weight = match (said, self.optional(ModelTensor::Confidence)?) {
            (Some(true), None) => Some(self.get(ModelTensor::Confidence)?),
            (_, found) => found,
        };
        let bias = self.optional(ModelTensor::ConfidenceBias)?;
        let bias = bias.map(|bias| directory.vector(bias, 1)).transpose()?;
        let confidence = match weight {
            // A head that the file calls absent is not used.
            Some(_) if said == Some(false) => None,
            Some(weight) => Some(ConfidenceHead {
                weight: directory.vector(weight, self.hidden + rank)?,
                bias,
            }),
            None => None,
        };
        Ok(MarkovHead {
            previous: directory.shaped(previous, (vocab, rank))?,
            next: self.matrix(ModelTensor::MarkovNext, draft_vocab, rank)?,
            confidence,
        })
    }

    /// The rank that a tensor shows, which the key must not contradict.
    fn rank(&self, weight: &WeightRef, shown: usize) -> Result<usize, ModelError> {
        match self.draft.metadata.rank {
            Some(said) if said != shown => {
                let detail = format!("of rank {shown}, the file says {said}");
                Err(self.draft.directory.refuse(&weight.name, detail))
            }
            _ => Ok(shown),
        }
    }

    fn key(&self, key: &str, detail: String) -> ModelError {
        ModelError::Key {
            file: self.draft.file.clone(),
            key: key.to_owned(),
            detail,
        }
    }
}
