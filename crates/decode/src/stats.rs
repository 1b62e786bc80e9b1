//! Plain counters; whoever owns the scheduler turns them into metrics.

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
    /// Context tokens the device can still give out.
    pub free_tokens: usize,
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
    pub rounds: u64,
    /// Sequences taken through a round, summed over rounds: divided by `rounds`, the mean batch.
    pub batched: u64,
    /// The largest batch so far.
    pub largest_batch: usize,
    /// Rounds that wanted trees and had no room to draft them, so that they decoded plainly.
    pub undrafted_rounds: u64,
    /// Tree nodes proposed beyond the roots.
    pub drafted_tokens: u64,
    /// Of these, nodes on the paths kept.
    pub accepted_tokens: u64,
    /// Times the device had no room for a sequence to open, read on or go through a round.
    pub waits: u64,
    /// Times an idle scheduler found that the device had not got back all it had lent; a defect.
    pub leaks: u64,
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
