//! Counters of a scheduler. Its owner turns them into metrics.

use std::time::Duration;

use crate::prefix::PrefixStats;
use crate::speculation::{DraftSource, SourceSet};

/// Drafted and accepted tokens by source. A token that several sources proposed counts for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokensBySource {
    drafted: [u64; DraftSource::ALL.len()],
    accepted: [u64; DraftSource::ALL.len()],
}

impl TokensBySource {
    /// Drafted tree nodes that a source proposed.
    pub fn drafted(&self, source: DraftSource) -> u64 {
        self.drafted[source.index()]
    }

    /// Those that were accepted.
    pub fn accepted(&self, source: DraftSource) -> u64 {
        self.accepted[source.index()]
    }

    /// Counts a drafted node.
    pub(crate) fn add_drafted(&mut self, sources: SourceSet) {
        for source in sources.iter() {
            self.drafted[source.index()] += 1;
        }
    }

    /// Counts an accepted node.
    pub(crate) fn add_accepted(&mut self, sources: SourceSet) {
        for source in sources.iter() {
            self.accepted[source.index()] += 1;
        }
    }

    /// Adds other counts.
    pub fn add(&mut self, other: TokensBySource) {
        let sums = self.drafted.iter_mut().chain(&mut self.accepted);
        let more = other.drafted.iter().chain(&other.accepted);
        sums.zip(more).for_each(|(sum, more)| *sum += more);
    }
}

/// Accepted drafts by depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AcceptanceByDepth {
    /// Decode steps with drafted nodes.
    pub steps: u32,
    /// Entry `i`: steps that accepted more than `i` drafted tokens. The last entry includes deeper
    /// ones.
    pub accepted: [u32; AcceptanceByDepth::COUNTED],
}

impl AcceptanceByDepth {
    /// Depths counted separately.
    pub const COUNTED: usize = 16;

    /// Counts a step that accepted `n` drafted tokens.
    pub(crate) fn add(&mut self, n: usize) {
        self.steps += 1;
        self.accepted
            .iter_mut()
            .take(n)
            .for_each(|count| *count += 1);
    }
}

/// Time of decode steps; zero without a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTimes {
    /// Drafting and tree building.
    pub draft: Duration,
    /// Verification.
    pub verify: Duration,
    /// Commit of accepted tokens.
    pub commit: Duration,
}

impl StepTimes {
    pub(crate) fn add(&mut self, other: StepTimes) {
        self.draft += other.draft;
        self.verify += other.verify;
        self.commit += other.commit;
    }
}

/// State and counters of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Jobs waiting now.
    pub queued: usize,
    /// Jobs that left the queue and have not ended.
    pub running: usize,
    /// Sequences open now.
    pub sequences: usize,
    /// Sequences whose prompt is not prefilled yet.
    pub prefilling: usize,
    /// Tokens that the KV pool holds.
    pub pool_tokens: usize,
    /// Pool tokens that no sequence holds.
    pub free_tokens: usize,
    /// Pool tokens that only cached prefixes hold; they are evicted on demand.
    pub evictable_tokens: usize,
    /// Prompts and choices preempted now.
    pub preempted: usize,
    /// Whether the next job or resume waits for pages of the pool, not for a sequence.
    pub blocked_on_pool: bool,
    /// Preemptions.
    pub preemptions: u64,
    /// Resumes after preemption.
    pub resumed: u64,
    /// Jobs submitted.
    pub submitted: u64,
    /// Choices that finished, neither cancelled nor failed.
    pub finished: u64,
    /// Jobs that failed.
    pub failed: u64,
    /// Cancelled jobs and choices by phase.
    pub cancelled: Cancellations,
    /// Prompt tokens prefilled.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Prefill calls.
    pub chunks: u64,
    /// Decode steps.
    pub decode_steps: u64,
    /// Those of them that were steps of one of two groups in turn.
    pub alternating_steps: u64,
    /// Sequences summed over decode steps; divided by `decode_steps`, the mean batch.
    pub batch_size_sum: u64,
    /// The largest batch so far.
    pub largest_batch: usize,
    /// Decode steps without trees because the draft ran out of memory.
    pub undrafted_steps: u64,
    /// Drafted tree nodes, without roots.
    pub drafted_tokens: u64,
    /// Drafted nodes that were accepted.
    pub accepted_tokens: u64,
    /// Both by source.
    pub by_source: TokensBySource,
    /// Forced tokens.
    pub forced_tokens: u64,
    /// Decode steps of single sequences that had drafted nodes.
    pub drafted_steps: u64,
    /// Entry `i`: those that accepted more than `i` drafted tokens. The last entry includes deeper
    /// ones.
    pub accepted_by_depth: [u64; AcceptanceByDepth::COUNTED],
    /// Time of all decode steps.
    pub times: StepTimes,
    /// Calls that ran out of memory: open, prefill or verify.
    pub out_of_memory_calls: u64,
    /// Times an idle scheduler lacked device capacity: a bug.
    pub leaks: u64,
    /// The prefix cache.
    pub prefix: PrefixStats,
}

/// Cancellations by phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cancellations {
    /// Jobs in the queue.
    pub queued: u64,
    /// Jobs in prefill.
    pub prefill: u64,
    /// Choices decoding, or waiting to start.
    pub decode: u64,
}
