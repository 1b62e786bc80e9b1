//! Whether it matters when committed tokens become what a draft reads.

use contract::{
    Ask, Backend, Candidates, CommitItem, DraftItem, KvFormat, NodeIdx, OpenPlan, Place, Runner,
    TokenId, Tree, VerifyItem,
};
use model::LoadedDraft;

use super::{RandomDraft, open_with};

/// When drafts are asked for beside a text that is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DraftHabit {
    /// After every round.
    Always,
    /// At the end alone.
    Never,
    /// Now and then.
    Seldom,
    /// At the end, of a sequence that was saved and put back now and then.
    Saved,
}

impl RandomDraft {
    /// Whether drafts see the same text, bit for bit, whenever the device turned committed tokens into what they read: at
    /// once because a draft followed, or many together, across more tokens than may wait, prompts and saved states.
    ///
    /// # Errors
    /// What the loader or the device refuses, and words on what differs.
    pub fn check_waiting(
        &self,
        backend: &dyn Backend,
        (mut plan, ids): (OpenPlan, &[TokenId]),
        draft: (LoadedDraft, KvFormat),
    ) -> Result<(), Box<dyn std::error::Error>> {
        plan.limits.tree_nodes = 4;
        let mut runner = open_with(backend, plan, draft)?;
        let mut said = |habit: DraftHabit| self.after_rounds(&mut *runner, ids, habit);
        let at_once = said(DraftHabit::Always)?;
        for habit in [DraftHabit::Never, DraftHabit::Seldom, DraftHabit::Saved] {
            if said(habit)? != at_once {
                return Err(
                    format!("{}: {habit:?} differs from a draft a round", self.name).into(),
                );
            }
        }
        Ok(())
    }

    /// Candidates after some hundred tokens, said in single tokens and trees, with a prompt among them.
    fn after_rounds(
        &self,
        runner: &mut dyn Runner,
        ids: &[TokenId],
        habit: DraftHabit,
    ) -> Result<Vec<Candidates>, Box<dyn std::error::Error>> {
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
            // Now and then a fork, whose second branch is kept.
            let tokens = next(if round % 4 == 1 { 4 } else { 1 });
            let parents = [0, 0, 2].map(NodeIdx);
            let tree = Tree::new(&tokens, &parents[..tokens.len() - 1])?;
            let asks = vec![Ask::NOTHING; tree.len()];
            let (tree, asks) = (&tree, &asks[..]);
            runner.verify(&[VerifyItem { seq, tree, asks }])?;
            let path = &tree.path_to(NodeIdx(tokens.len() as u16 - 1));
            runner.commit(&[CommitItem { seq, path }])?;
            let drafts = match habit {
                DraftHabit::Always => true,
                DraftHabit::Seldom => round % 9 == 3,
                DraftHabit::Never | DraftHabit::Saved => false,
            };
            if drafts {
                let root = tokens[0];
                runner.draft(&[DraftItem { seq, root }], depth, 1)?;
            }
            if habit == DraftHabit::Saved && round % 30 == 11 {
                let saved = runner.snapshot(seq, Place::Host)?.id;
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
