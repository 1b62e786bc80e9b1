//! The multi-token-prediction head, in the block behind the trunk.
//!
//! `nextn_predict_layers` promises it; its tensors decide where it is. Published files count its
//! block in `block_count`, others do not.

use std::collections::BTreeSet;

use contract::{LayerSpec, MtpSpec};

use crate::ModelError;
use crate::names::{
    EMBEDDING, FINAL_NORM, MIXER_NORM, MTP_EH_PROJ, MTP_EMBEDDING, MTP_EMBEDDING_NORM,
    MTP_FINAL_NORM, MTP_HEAD, MTP_HIDDEN_NORM, MTP_PREFIX, block_of, in_block,
};
use crate::reader::{BlockReader, Reader};

const KEY: &str = "nextn_predict_layers";

/// The index of the head's block in a file that counts `blocks`; `None` without a head.
///
/// # Errors
/// [`ModelError`] for a file with the head alone, a promised head without tensors, a head that is
/// not behind the trunk, or more than one.
pub(super) fn block(reader: &Reader<'_>, blocks: usize) -> Result<Option<usize>, ModelError> {
    let promised = reader.optional(KEY)?.unwrap_or(0);
    let of_heads = reader.file.tensors().iter().filter_map(|tensor| {
        let (block, rest) = block_of(tensor.name())?;
        rest.starts_with(MTP_PREFIX).then_some(block)
    });
    let found: BTreeSet<usize> = of_heads.collect();
    let has_trunk = reader.has(&in_block(0, MIXER_NORM));
    if !has_trunk && (promised > 0 || !found.is_empty()) {
        return Err(reader.unsupported(
            "a file with a multi-token prediction head alone".to_owned(),
            "it lacks the model that the head belongs to; use the file of the model itself",
        ));
    }
    if promised > 1 || found.len() > 1 {
        let (listed, n) = (listed(&found), promised.max(found.len()));
        let detail = format!(
            "{n} multi-token prediction blocks (tensors in blocks: {listed}), at most 1 is \
             supported"
        );
        return Err(reader.refuse_key(KEY, detail));
    }
    match found.first() {
        // The trunk ends where the head begins, whether the count includes it or not.
        Some(&block) if block > 0 && (block == blocks || block + 1 == blocks) => Ok(Some(block)),
        Some(block) => {
            let detail = format!(
                "the multi-token prediction head is block {block} of {blocks}, it is expected \
                 behind all others"
            );
            Err(reader.refuse_key("block_count", detail))
        }
        None if promised > 0 => {
            let detail = format!(
                "{promised}, but no block has the tensors of a multi-token prediction head \
                 (blk.N.{MTP_EH_PROJ}); convert the model again, or remove the key"
            );
            Err(reader.refuse_key(KEY, detail))
        }
        None => Ok(None),
    }
}

fn listed(blocks: &BTreeSet<usize>) -> String {
    let all: Vec<String> = blocks.iter().map(usize::to_string).collect();
    if all.is_empty() {
        return "none".to_owned();
    }
    all.join(", ")
}

/// The head whose block is `block` and whose layer is `layer`.
pub(super) fn read(
    block: &BlockReader<'_>,
    layer: LayerSpec,
    hidden: usize,
) -> Result<MtpSpec, ModelError> {
    let reader = block.reader;
    // Every family's embedding has one row per token.
    let embedding = reader.file.tensor(EMBEDDING);
    let vocab = embedding.and_then(|tensor| tensor.dims().get(1).copied());
    let vocab = vocab.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let own = |name: &str| {
        let found = block.has(name).then(|| block.matrix(name, vocab, hidden));
        found.transpose()
    };
    let wide = hidden
        .checked_mul(2)
        .ok_or_else(|| reader.refuse_key("embedding_length", format!("{hidden}: too large")))?;
    Ok(MtpSpec {
        eh_proj: block.matrix(MTP_EH_PROJ, hidden, wide)?,
        embedding_norm: block.vector(MTP_EMBEDDING_NORM, hidden)?,
        hidden_norm: block.vector(MTP_HIDDEN_NORM, hidden)?,
        embedding: own(MTP_EMBEDDING)?,
        layer,
        final_norm: if block.has(MTP_FINAL_NORM) {
            block.vector(MTP_FINAL_NORM, hidden)?
        } else {
            reader.vector(FINAL_NORM, hidden)?
        },
        head: own(MTP_HEAD)?,
    })
}
