//! Plain counters; whoever owns the scheduler turns them into metrics.

use std::time::Duration;

use crate::prefix::PrefixStats;

/// How deep drafts came true.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AcceptanceByDepth {
    /// Rounds that carried drafted nodes.
    pub steps: u32,
    /// Entry `i`: those that kept more than `i` drafted tokens; the last entry is for all that is deeper.
    pub accepted: [u32; AcceptanceByDepth::COUNTED],
}

impl AcceptanceByDepth {
    /// Depths that are counted apart.
    pub const COUNTED: usize = 16;

    /// Counts a round that kept `n` drafted tokens.
    pub(crate) fn add(&mut self, n: usize) {
        self.steps += 1;
        self.accepted
            .iter_mut()
            .take(n)
            .for_each(|count| *count += 1);
    }
}

/// Time that rounds took; zero where the scheduler was given no clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTimes {
    /// Drafting and building trees.
    pub draft: Duration,
    /// Verifying them.
    pub verify: Duration,
    /// Committing what was accepted.
    pub commit: Duration,
}

impl StepTimes {
    pub(crate) fn add(&mut self, other: StepTimes) {
        self.draft += other.draft;
        self.verify += other.verify;
        self.commit += other.commit;
    }
}

/// What a scheduler is doing and has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Jobs waiting now.
    pub queued: usize,
    /// Jobs that left the queue and have not ended.
    pub running: usize,
    /// Sequences open now.
    pub sequences: usize,
    /// Of these, sequences still reading their prompt.
    pub prefilling: usize,
    /// Context tokens that sequences share.
    pub pool_tokens: usize,
    /// Of these, tokens that no sequence holds.
    pub free_tokens: usize,
    /// Of these, tokens of saved states, which give way when a sequence needs their place.
    pub evictable_tokens: usize,
    /// Prompts and choices that gave their place up to others now, and wait for one.
    pub preempted: usize,
    /// Whether what is next waits for others to leave the pool, and not for a place.
    pub pool_waits: bool,
    /// Times a prompt or a choice gave its place up because another could not grow.
    pub preemptions: u64,
    /// Times one went on after that.
    pub resumed: u64,
    /// Jobs taken in all.
    pub submitted: u64,
    /// Choices that ended by themselves (not cancelled, not failed).
    pub finished: u64,
    /// Jobs that failed.
    pub failed: u64,
    /// Jobs and choices that were cancelled, by how far they had come.
    pub cancelled: Cancellations,
    /// Prompt tokens read.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Prefill calls.
    pub chunks: u64,
    /// Rounds.
    pub decode_steps: u64,
    /// Sequences taken through a round, summed over rounds: divided by `rounds`, the mean batch.
    pub batched: u64,
    /// The largest batch so far.
    pub largest_batch: usize,
    /// Rounds that wanted trees and had no room to draft them, so that they decoded plainly.
    pub undrafted_steps: u64,
    /// Tree nodes proposed beyond the roots.
    pub drafted_tokens: u64,
    /// Of these, nodes on the paths kept.
    pub accepted_tokens: u64,
    /// Tokens that were forced upon texts.
    pub forced_tokens: u64,
    /// Rounds of single sequences that carried drafted nodes.
    pub drafted_steps: u64,
    /// Entry `i`: those that kept more than `i` drafted tokens; the last entry is for all that is deeper.
    pub accepted_by_depth: [u64; AcceptanceByDepth::COUNTED],
    /// Time of all rounds.
    pub times: StepTimes,
    /// Times the device had no room for a sequence to open, read on or go through a round.
    pub waits: u64,
    /// Times an idle scheduler found that the device had not got back all it had lent; a defect.
    pub leaks: u64,
    /// Saved states of prompts.
    pub prefix: PrefixStats,
}

/// Where cancellation met its victims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cancellations {
    /// Jobs that waited in the queue.
    pub queued: u64,
    /// Jobs that were reading their prompt.
    pub prefill: u64,
    /// Choices that were generating, or waiting for their turn to.
    pub decode: u64,
}
