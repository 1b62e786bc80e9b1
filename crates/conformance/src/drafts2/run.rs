//! A device's drafts against the results of a case.

use contract::{
    Backend, CommitItem, DeviceError, DraftItem, DraftLoad, DraftLoadConfig, KvFormat, LoadConfig,
    LogitsRequest, NodeIdx, Runner, SeqId, TokenId, Tree, VerifyItem,
};
use model::LoadedDraft;

use super::{Draft2Case, Draft2Result};

/// Candidates of a list.
const K: usize = 8;

impl Draft2Case {
    /// Opens the target `config` with a draft of the case, loaded at its first use.
    ///
    /// # Errors
    /// Those of the device.
    pub fn open_on(
        backend: &dyn Backend,
        config: LoadConfig,
        (draft, kv): (LoadedDraft, KvFormat),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        let draft = Some(DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv,
            load: DraftLoad::AtFirstUse,
        });
        backend.open(LoadConfig { draft, ..config }, &mut |_| {})
    }

    /// The largest differences of logits and of candidates at all positions of the text `ids`,
    /// each reached from the one before by commits. Infinite if the chains differ.
    ///
    /// # Errors
    /// Those of the runner.
    ///
    /// # Panics
    /// If candidates are malformed, or the text has fewer tokens than the case.
    pub fn worst_on(
        &self,
        runner: &mut dyn Runner,
        ids: &[TokenId],
    ) -> Result<(f32, f32), DeviceError> {
        let seq = runner.open(180)?;
        let (mut position, mut all) = (0, (0.0_f32, 0.0_f32));
        for result in &self.results {
            let tokens = &ids[position..result.at];
            if position == 0 {
                runner.prefill(seq, tokens, &[])?;
            } else {
                commit(runner, seq, tokens)?;
            }
            position = result.at;
            let item = DraftItem {
                seq,
                root: ids[position],
            };
            let found = worst_at(runner, item, result)?;
            all = (all.0.max(found.0), all.1.max(found.1));
        }
        runner.close(seq);
        Ok(all)
    }
}

/// Commits tokens along trees with a wrong branch at every node.
fn commit(runner: &mut dyn Runner, seq: SeqId, tokens: &[TokenId]) -> Result<(), DeviceError> {
    let vocab = runner.info().vocab as u32;
    for tokens in tokens.chunks(4) {
        let mut tree = Tree::root(tokens[0]);
        let mut at = NodeIdx::ROOT;
        for token in &tokens[1..] {
            let wrong = TokenId((token.0 + 1) % vocab);
            tree.push(at, wrong).expect("few nodes");
            at = tree.push(at, *token).expect("few nodes");
        }
        let requests = vec![LogitsRequest::NONE; tree.len()];
        let item = VerifyItem {
            seq,
            tree: &tree,
            requests: &requests,
        };
        runner.verify(&[item])?;
        let path = &tree.path_to(at);
        runner.commit(&[CommitItem { seq, path }])?;
    }
    Ok(())
}

/// The largest differences of logits and candidates from a result.
///
/// # Errors
/// Those of the runner.
///
/// # Panics
/// If candidates are malformed.
pub fn worst_at(
    runner: &mut dyn Runner,
    item: DraftItem,
    expected: &Draft2Result,
) -> Result<(f32, f32), DeviceError> {
    let found = runner.draft_logits(item)?;
    let logits = Draft2Case::worst(expected, &found);
    let chain = if found.chain == expected.chain {
        0.0
    } else {
        f32::INFINITY
    };
    let depth = runner.info().draft_depth.unwrap_or(0);
    let drafted = runner.draft(&[item], depth, K)?.remove(0);
    assert!(drafted.is_well_formed(), "{drafted:?}");
    let candidates = Draft2Case::worst_candidates(expected, &drafted);
    Ok((logits.max(chain), candidates))
}
