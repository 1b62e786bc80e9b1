//! Copies between host and device around a plan: headers up, reduced rows down.

use contract::DeviceError;

use super::Engine;
use crate::driver::{Gpu, Pinned};
use crate::plan::{Addresses, PlanKey, Plans, STATUS_BYTES};
use crate::step::{ChunkHead, Commit, MtpStep, Step};

/// Headers and tables that the GPU reads.
pub(super) struct Uploads {
    pub(super) step: Pinned<u8>,
    pub(super) draft: Pinned<u8>,
    pub(super) chunk: Pinned<u8>,
    /// The rows of a short chunk as a step.
    pub(super) nodes: Pinned<u8>,
    pub(super) commit: Pinned<u8>,
    pub(super) pending: Pinned<u8>,
    pub(super) mtp_commit: Pinned<u8>,
    pub(super) mtp_draft: Pinned<u8>,
    pub(super) edits: Pinned<u8>,
    /// Queries of masses.
    pub(super) masses: Pinned<u8>,
    /// The page table of every slot.
    pub(super) table: Pinned<i32>,
}

impl Uploads {
    /// Queues the copy of the header that `key` reads.
    pub(super) fn queue(
        &self,
        gpu: &Gpu,
        to: Addresses,
        plans: &Plans,
        key: PlanKey,
    ) -> Result<(), DeviceError> {
        let (to, from, bytes) = match key {
            PlanKey::Step { .. } => (to.step, &self.step, size_of::<Step>()),
            PlanKey::Chunk(rows) => {
                if plans.is_short_prefill(rows) {
                    self.queue_nodes(gpu, to)?;
                }
                let rows = rows.min(plans.chunk_rows());
                (to.chunk, &self.chunk, ChunkHead::bytes(rows))
            }
            PlanKey::Commit(_) => (to.commit, &self.commit, size_of::<Commit>()),
            PlanKey::DraftContext(_) => (to.pending, &self.pending, size_of::<Commit>()),
            PlanKey::Draft { .. } => (to.draft, &self.draft, size_of::<Step>()),
            PlanKey::MtpCommit(_) => (to.mtp_commit, &self.mtp_commit, size_of::<MtpStep>()),
            PlanKey::MtpDraft { .. } => (to.mtp_draft, &self.mtp_draft, size_of::<MtpStep>()),
            PlanKey::LmHead(_) | PlanKey::EditedStep(_) | PlanKey::EditedLmHead(_) => return Ok(()),
            PlanKey::Masses { .. } => return Ok(()),
        };
        // SAFETY: the header is not written before the stream has passed the copy: steps and drafts
        // wait at their end, and writers of the others wait while `in_flight` is set.
        unsafe { gpu.copy_to_device(gpu.stream(), to, from, 0..bytes) }
    }

    /// Queues the copy of the header of a short chunk's single-branch tree.
    pub(super) fn queue_nodes(&self, gpu: &Gpu, to: Addresses) -> Result<(), DeviceError> {
        // SAFETY: written with the chunk's header, whose writers wait while `in_flight` is set.
        unsafe { gpu.copy_to_device(gpu.stream(), to.step, &self.nodes, 0..size_of::<Step>()) }
    }
}

impl Engine {
    /// Uploads the head of the chunk header and `rows` tokens.
    pub(super) fn upload_chunk(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.headers.in_flight = true;
        if rows > 0 && self.plans.is_short_prefill(rows) {
            self.headers
                .up
                .queue_nodes(&self.gpu, self.plans.addresses)?;
        }
        let to = self.plans.addresses.chunk;
        let range = 0..ChunkHead::bytes(rows);
        // SAFETY: the next write of the header waits first, by `in_flight`.
        unsafe {
            self.gpu
                .copy_to_device(self.gpu.stream(), to, &self.headers.up.chunk, range)
        }?;
        self.note_upload()
    }
}

/// Results that the GPU writes.
pub(super) struct Downloads {
    /// Reduced logits rows.
    pub(super) rows: Pinned<u8>,
    /// Lists of a draft.
    pub(super) draft_lists: Pinned<u8>,
}

/// Queues the copy of the reduced rows and of the lists that `key` makes.
pub(super) fn download(
    gpu: &Gpu,
    to: &mut Downloads,
    from: Addresses,
    plans: &Plans,
    key: PlanKey,
) -> Result<(), DeviceError> {
    if let PlanKey::Draft { rows, .. } = key {
        let bytes = plans.draft_lists.bytes(rows);
        if bytes > 0 {
            // SAFETY: read only after the wait that follows.
            unsafe {
                gpu.copy_to_host(
                    gpu.stream(),
                    &mut to.draft_lists,
                    0..bytes,
                    from.draft_lists,
                )
            }?;
        }
        if !plans.draft_lists.has_reduced_rows() {
            return Ok(());
        }
    }
    let bucket = match key {
        PlanKey::Step { .. } if !plans.stage.has_head => return Ok(()),
        PlanKey::Step { rows, .. } | PlanKey::LmHead(rows) => rows,
        PlanKey::Draft { rows, .. } | PlanKey::MtpDraft { rows, .. } => rows,
        PlanKey::EditedStep(rows) | PlanKey::EditedLmHead(rows) => rows,
        PlanKey::Chunk(_) | PlanKey::Commit(_) | PlanKey::DraftContext(_) => return Ok(()),
        PlanKey::MtpCommit(_) | PlanKey::Masses { .. } => return Ok(()),
    };
    let status = if plans.one_launch.contains(&key) {
        STATUS_BYTES
    } else {
        0
    };
    let bytes = plans.reduce.out_bytes(bucket) + status;
    // SAFETY: read only after the wait that follows.
    unsafe { gpu.copy_to_host(gpu.stream(), &mut to.rows, 0..bytes, from.rows) }
}
