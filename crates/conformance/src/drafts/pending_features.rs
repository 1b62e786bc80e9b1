//! The property that projection times of pending features do not matter.

use contract::{
    Backend, CommitItem, DraftCandidates, DraftItem, KvFormat, LoadConfig, LogitsRequest, NodeIdx,
    Runner, SnapshotLocation, TokenId, Tree, VerifyItem,
};
use model::LoadedDraft;

use super::{RandomDraft, open_with};

/// Times of draft calls during decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DraftTiming {
    /// After every decode step.
    Always,
    /// At the end only.
    Never,
    /// After some steps.
    Sometimes,
    /// At the end, with snapshots and restores in between.
    Saved,
}

impl RandomDraft {
    /// Checks that candidates are bit-identical however many features were pending. They may be
    /// projected at each draft call, or many at once after tokens, prompts and snapshots that
    /// exceed the maximum.
    ///
    /// # Errors
    /// Errors of the loader or the device, or the difference.
    pub fn check_waiting(
        &self,
        backend: &dyn Backend,
        (mut config, ids): (LoadConfig, &[TokenId]),
        draft: (LoadedDraft, KvFormat),
    ) -> Result<(), Box<dyn std::error::Error>> {
        config.limits.tree_nodes = 4;
        let mut runner = open_with(backend, config, draft)?;
        let mut said = |timing: DraftTiming| self.after_rounds(&mut *runner, ids, timing);
        let at_once = said(DraftTiming::Always)?;
        for timing in [
            DraftTiming::Never,
            DraftTiming::Sometimes,
            DraftTiming::Saved,
        ] {
            if said(timing)? != at_once {
                return Err(
                    format!("{}: {timing:?} differs from a draft a round", self.name).into(),
                );
            }
        }
        Ok(())
    }

    /// Candidates after some hundred tokens, decoded as single tokens and trees, with a prompt in
    /// between.
    fn after_rounds(
        &self,
        runner: &mut dyn Runner,
        ids: &[TokenId],
        timing: DraftTiming,
    ) -> Result<Vec<DraftCandidates>, Box<dyn std::error::Error>> {
        const ROUNDS: usize = 100;
        let mut text = ids.iter().copied().cycle();
        let mut next = |n: usize| -> Vec<TokenId> { text.by_ref().take(n).collect() };
        let seq = runner.open(254)?;
        runner.prefill(seq, &next(20), &[])?;
        let depth = self.block - 1;
        for round in 0..ROUNDS {
            if round == 20 {
                runner.prefill(seq, &next(40), &[])?;
            }
            // Some trees have a fork whose second branch is accepted.
            let tokens = next(if round % 4 == 1 { 4 } else { 1 });
            let parents = [0, 0, 2].map(NodeIdx);
            let tree = Tree::new(&tokens, &parents[..tokens.len() - 1])?;
            let requests = vec![LogitsRequest::NONE; tree.len()];
            let (tree, requests) = (&tree, &requests[..]);
            runner.verify(&[VerifyItem {
                seq,
                tree,
                requests,
            }])?;
            let path = &tree.path_to(NodeIdx(tokens.len() as u16 - 1));
            runner.commit(&[CommitItem { seq, path }])?;
            let drafts = match timing {
                DraftTiming::Always => true,
                DraftTiming::Sometimes => round % 9 == 3,
                DraftTiming::Never | DraftTiming::Saved => false,
            };
            if drafts {
                let root = tokens[0];
                runner.draft(&[DraftItem { seq, root }], depth, 1)?;
            }
            if timing == DraftTiming::Saved && round % 30 == 11 {
                let saved = runner.snapshot(seq, SnapshotLocation::Host)?.id;
                runner.restore(seq, saved)?;
                runner.free_snapshot(saved);
            }
        }
        let root = ids[0];
        let said = runner.draft(&[DraftItem { seq, root }], depth, 8)?;
        runner.close(seq);
        Ok(said)
    }
}
