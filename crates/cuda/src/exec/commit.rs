//! Commits, beside the draft that follows them.
//!
//! A commit moves cached rows and brings recurrent states past a path. The next draft reads
//! neither: it needs the captured hidden states of the path and keys and values of its own. So a
//! commit behind a drafted step runs on a stream of its own, whose blocks yield to those of the
//! main stream. It fills what the host and the draft leave idle. Whatever else uses states or
//! cached rows comes behind it ([`Engine::join_commit`]).

use contract::DeviceError;

use super::Engine;
use crate::driver::{Event, Gpu, Stream};
use crate::plan::PlanKey;
use crate::step::{self, Commit, MtpStep};

/// A stream for commits beside drafts.
pub(super) struct CommitStream {
    stream: Stream,
    /// Recorded on the main stream behind the verified step.
    verified: Event,
    /// Recorded behind the last commit.
    done: Event,
    /// Whether the main stream does not wait for the last commit yet.
    is_open: bool,
    /// Whether something has drafted since the last commit.
    has_drafted: bool,
}

impl CommitStream {
    pub(super) fn new(gpu: &Gpu) -> Result<CommitStream, DeviceError> {
        Ok(CommitStream {
            stream: gpu.new_stream()?,
            verified: Event::new(gpu)?,
            done: Event::new(gpu)?,
            is_open: false,
            has_drafted: false,
        })
    }

    /// Notes a draft. The commit of its step is likely to be followed by another one.
    pub(super) fn note_draft(&mut self) {
        self.has_drafted = true;
    }

    /// Whether a commit may still run when all work of the main stream has ended.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }
}

impl Engine {
    /// Keeps paths; does not wait. `mtp` has their tokens, with a multi-token-prediction head.
    pub(crate) fn commit(
        &mut self,
        commit: &Commit,
        mtp: Option<&MtpStep>,
    ) -> Result<(), DeviceError> {
        let paths = commit.path.iter().take(commit.paths as usize);
        let mut slots = paths.map(|path| path.slot as usize);
        slots.try_for_each(|slot| self.wait_for_copies(slot))?;
        self.join_commit()?;
        self.wait_for_commit_header(mtp.is_some())?;
        let bytes = step::bytes_of(commit);
        self.headers.up.commit.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let key = PlanKey::of_commit(commit);
        let has_drafted = std::mem::take(&mut self.commit_stream.has_drafted);
        // A pipeline stage notes what its main stream has read.
        if has_drafted && self.boundary.is_none() {
            self.queue_beside(key)?;
        } else {
            self.queue(key)?;
        }
        if let Some(boundary) = &self.boundary {
            boundary.note_commit(&self.gpu)?;
        }
        self.keep_features(commit);
        // It reads hidden rows and writes cached rows of the head, which no commit moves.
        mtp.map_or(Ok(()), |paths| self.commit_mtp(paths))
    }

    /// Queues a commit behind the verified step, on the stream of commits.
    fn queue_beside(&mut self, key: PlanKey) -> Result<(), DeviceError> {
        self.headers.in_flight = true;
        let CommitStream {
            stream,
            verified,
            done,
            is_open,
            ..
        } = &mut self.commit_stream;
        self.gpu.stream().record(verified)?;
        stream.wait(verified)?;
        let (to, from) = (self.plans.addresses.commit, &self.headers.up.commit);
        // SAFETY: the next commit joins this one and waits before it writes the header.
        unsafe {
            self.gpu
                .copy_to_device(stream, to, from, 0..size_of::<Commit>())
        }?;
        self.launcher.run_on(&self.gpu, stream, key)?;
        stream.record(done)?;
        *is_open = true;
        Ok(())
    }

    /// Has whatever is queued from here on come behind the last commit; does not wait.
    pub(crate) fn join_commit(&mut self) -> Result<(), DeviceError> {
        self.wait_for_commit()?;
        self.commit_stream.is_open = false;
        Ok(())
    }

    /// The same, where the caller waits for all that is queued.
    pub(super) fn wait_for_commit(&self) -> Result<(), DeviceError> {
        if self.commit_stream.is_open {
            self.gpu.stream().wait(&self.commit_stream.done)?;
        }
        Ok(())
    }
}
