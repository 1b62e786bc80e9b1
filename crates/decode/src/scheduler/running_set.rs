//! The jobs that left the waiting queue and have not ended.

use std::ops::{Index, IndexMut};

use crate::job::JobId;

use super::device::Device;
use super::queue::PriorityKey;
use super::running::RunningJob;
use super::sequence::Sequence;

/// One of so many chunks goes to the earliest prompt; the others go to the shortest.
const OLDEST_EVERY: u64 = 4;
/// A prompt gives up its sequence only if it has more chunks left than this.
const LONG_CHUNKS: usize = 4;
/// How often a prompt gives up its sequence.
const MAX_YIELDS: u32 = 4;

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

    /// Number of jobs in prefill.
    pub(super) fn n_prefilling(&self) -> usize {
        self.jobs.iter().filter(|job| job.prefill.is_some()).count()
    }

    /// Number of preempted prompts and choices.
    pub(super) fn n_preempted(&self) -> usize {
        self.jobs.iter().map(|job| job.preempted.len()).sum()
    }

    /// The job that prefills next, among those of the highest priority that have tokens to prefill.
    /// It is the one with the fewest chunks left, or every [`OLDEST_EVERY`] chunks the earliest.
    ///
    /// So a short prompt waits for few chunks of other prompts, and a long one keeps its share.
    pub(super) fn next_prefill(&self, chunks: u64, size: usize) -> Option<usize> {
        let prefilling = || {
            let jobs = self.jobs.iter().enumerate();
            jobs.filter_map(|(at, job)| Some((at, job.key, job.tokens_to_prefill()?)))
        };
        let (_, (highest, _), _) = prefilling().min_by_key(|(_, key, _)| *key)?;
        let oldest = chunks % OLDEST_EVERY == OLDEST_EVERY - 1;
        prefilling()
            .filter(|(_, (priority, _), _)| *priority == highest)
            .min_by_key(|(_, key, tokens)| {
                let left = if oldest { 0 } else { tokens.div_ceil(size) };
                (left, *key)
            })
            .map(|(at, ..)| at)
    }

    /// The prompt that gives up its sequence for a short prompt of this priority: the one with the
    /// most tokens left, if it is long.
    pub(super) fn longest_prefill(&self, key: PriorityKey, size: usize) -> Option<usize> {
        let jobs = self.jobs.iter().enumerate();
        jobs.filter(|(_, job)| job.key.0 >= key.0 && job.yields < MAX_YIELDS)
            .filter_map(|(at, job)| {
                let left = job.prompt.len() - job.prefill.as_ref()?.done;
                (left > LONG_CHUNKS * size).then_some((at, left))
            })
            .max_by_key(|(_, left)| *left)
            .map(|(at, _)| at)
    }

    /// The first job in priority order that has preempted parts.
    pub(super) fn first_preempted(&self) -> Option<(usize, PriorityKey)> {
        let jobs = self.jobs.iter().enumerate();
        jobs.filter(|(_, job)| !job.preempted.is_empty())
            .map(|(at, job)| (at, job.key))
            .min_by_key(|(_, key)| *key)
    }

    /// The same without prompts that gave up their sequence for a short one.
    pub(super) fn first_preempted_for_memory(&self) -> Option<PriorityKey> {
        let jobs = self.jobs.iter();
        jobs.filter(|job| !job.preempted.is_empty() && !job.has_yielded)
            .map(|job| job.key)
            .min()
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
