//! A verify call that has begun, and how far it has come.

use crate::{DeviceError, LogitsRequest, SeqId, Tree, VerifyItem};

/// A verify call that has begun.
pub(super) struct BegunVerify {
    pub(super) trees: Vec<BegunTree>,
    pub(super) n_rows: usize,
    pub(super) progress: Progress,
}

/// One of its trees.
pub(super) struct BegunTree {
    pub(super) seq: SeqId,
    /// Its id in each stage.
    pub(super) ids: Vec<SeqId>,
    pub(super) tree: Tree,
    pub(super) requests: Vec<LogitsRequest>,
}

/// How far a call has come.
pub(super) enum Progress {
    /// Nowhere: it takes several passes, which cannot wait for each other's rows, or one before it
    /// does.
    Waits,
    /// Through the stages below the LM head.
    BelowHead,
    /// Its rows are handed over to the stage with the LM head.
    HandedOver,
    /// The stage with the LM head has begun.
    InHead,
    /// That failed.
    Failed(DeviceError),
}

impl BegunVerify {
    /// A call of these trees that has come nowhere.
    pub(super) fn new(trees: Vec<BegunTree>) -> BegunVerify {
        BegunVerify {
            n_rows: trees.iter().map(|of| of.tree.len()).sum(),
            trees,
            progress: Progress::Waits,
        }
    }

    /// The items of a stage, which has the LM head or not.
    pub(super) fn items<'a>(
        &'a self,
        stage: usize,
        none: &'a [LogitsRequest],
        has_head: bool,
    ) -> Vec<VerifyItem<'a>> {
        let items = self.trees.iter().map(|of| VerifyItem {
            seq: of.ids[stage],
            tree: &of.tree,
            requests: if has_head {
                &of.requests
            } else {
                &none[..of.tree.len()]
            },
        });
        items.collect()
    }
}
