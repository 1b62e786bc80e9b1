//! The jobs that left the waiting queue and have not ended.

use std::ops::{Index, IndexMut};

use crate::job::JobId;

use super::device::Device;
use super::queue::PriorityKey;
use super::running::RunningJob;
use super::sequence::Sequence;

/// Running jobs, in order of admission.
#[derive(Default)]
pub(super) struct RunningSet {
    jobs: Vec<RunningJob>,
}

impl RunningSet {
    /// Number of jobs.
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether no job runs.
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// All jobs.
    pub(super) fn iter(&self) -> impl Iterator<Item = &RunningJob> {
        self.jobs.iter()
    }

    /// Adds an admitted job.
    pub(super) fn push(&mut self, job: RunningJob) {
        self.jobs.push(job);
    }

    /// Index of the job with this id.
    pub(super) fn position(&self, id: JobId) -> Option<usize> {
        self.jobs.iter().position(|job| job.id == id)
    }

    /// Takes a job out.
    pub(super) fn remove(&mut self, at: usize) -> RunningJob {
        self.jobs.remove(at)
    }

    /// Takes all jobs out and returns their ids.
    pub(super) fn take_ids(&mut self) -> Vec<JobId> {
        self.jobs.drain(..).map(|job| job.id).collect()
    }

    /// All sequences that decode.
    pub(super) fn sequences_mut(&mut self) -> Vec<&mut Sequence> {
        let jobs = self.jobs.iter_mut();
        jobs.flat_map(|job| &mut job.sequences).collect()
    }

    /// Number of sequences open on the device.
    pub(super) fn n_open_sequences(&self) -> usize {
        self.jobs.iter().map(|job| job.open_seqs().count()).sum()
    }

    /// Number of jobs whose prompt is being read.
    pub(super) fn n_prefilling(&self) -> usize {
        self.jobs.iter().filter(|job| job.prefill.is_some()).count()
    }

    /// Number of preempted prompts and choices.
    pub(super) fn n_preempted(&self) -> usize {
        self.jobs.iter().map(|job| job.preempted.len()).sum()
    }

    /// The first job in priority order that has tokens to prefill.
    pub(super) fn next_prefill(&self) -> Option<usize> {
        let jobs = self.jobs.iter().enumerate();
        jobs.filter(|(_, job)| job.prefill.is_some() || !job.recomputing.is_empty())
            .min_by_key(|(_, job)| job.key)
            .map(|(at, _)| at)
    }

    /// The first job in priority order that has preempted parts.
    pub(super) fn first_preempted(&self) -> Option<(usize, PriorityKey)> {
        let jobs = self.jobs.iter().enumerate();
        jobs.filter(|(_, job)| !job.preempted.is_empty())
            .map(|(at, job)| (at, job.key))
            .min_by_key(|(_, key)| *key)
    }

    /// The last job in priority order that has an open sequence.
    pub(super) fn last_open(&self) -> Option<usize> {
        let jobs = self.jobs.iter().enumerate();
        jobs.filter(|(_, job)| job.open_seqs().next().is_some())
            .max_by_key(|(_, job)| job.key)
            .map(|(at, _)| at)
    }

    /// The last job in priority order.
    pub(super) fn last(&self) -> Option<usize> {
        let jobs = self.jobs.iter().enumerate();
        jobs.max_by_key(|(_, job)| job.key).map(|(at, _)| at)
    }

    /// Drops finished jobs, and frees prompt snapshots that no choice waits for.
    pub(super) fn remove_finished(&mut self, device: &mut Device) {
        for job in &mut self.jobs {
            if job.pending_choices.is_empty()
                && let Some(state) = job.prompt_state.take()
            {
                device.free_snapshot(state.snapshot);
            }
        }
        self.jobs.retain(|job| !job.is_done());
    }
}

impl Index<usize> for RunningSet {
    type Output = RunningJob;

    fn index(&self, at: usize) -> &RunningJob {
        &self.jobs[at]
    }
}

impl IndexMut<usize> for RunningSet {
    fn index_mut(&mut self, at: usize) -> &mut RunningJob {
        &mut self.jobs[at]
    }
}
