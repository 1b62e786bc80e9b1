//! Passes of a multi-token-prediction head.

use contract::{DeviceError, LogitsRequest, LogitsRow};

use super::{Engine, Reduced};
use crate::plan::PlanKey;
use crate::step::{self, MtpStep};

impl Engine {
    /// Fills the head's rows of committed paths, behind their commit; does not wait.
    ///
    /// The writers of its header wait first, as those of the commit's do.
    pub(super) fn commit_mtp(&mut self, paths: &MtpStep) -> Result<(), DeviceError> {
        let bytes = step::bytes_of(paths);
        self.headers.up.mtp_commit.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        self.queue(PlanKey::MtpCommit(step::bucket(paths.rows())))
    }

    /// Drafts rows, waits, and returns the `k` best tokens after each.
    pub(crate) fn draft_mtp(
        &mut self,
        rows: &MtpStep,
        k: usize,
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.commit_stream.note_draft();
        self.wait_for_tree_copies(&rows.step)?;
        let bytes = step::bytes_of(rows);
        self.headers.up.mtp_draft.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let reduce = self.plans.reduce;
        let bucket = step::mtp_draft_bucket(rows.rows());
        self.queue(PlanKey::MtpDraft {
            rows: bucket,
            whole: k > reduce.k && self.plans.has_whole_mtp(),
        })?;
        self.sync()?;
        let ask = LogitsRequest::top_k(k);
        self.answer(&vec![&ask; rows.rows()], Reduced::default())
    }
}
