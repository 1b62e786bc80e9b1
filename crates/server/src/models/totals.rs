//! Sums of several schedulers' statistics, so that counters outlive the engines they come from.

use decode::Stats;

/// Adds the counters of another scheduler.
pub(super) fn add_counters(sum: &mut Stats, more: &Stats) {
    sum.preemptions += more.preemptions;
    sum.resumed += more.resumed;
    sum.submitted += more.submitted;
    sum.finished += more.finished;
    sum.failed += more.failed;
    sum.cancelled.queued += more.cancelled.queued;
    sum.cancelled.prefill += more.cancelled.prefill;
    sum.cancelled.decode += more.cancelled.decode;
    sum.prompt_tokens += more.prompt_tokens;
    sum.generated_tokens += more.generated_tokens;
    sum.chunks += more.chunks;
    sum.decode_steps += more.decode_steps;
    sum.batch_size_sum += more.batch_size_sum;
    sum.largest_batch = sum.largest_batch.max(more.largest_batch);
    sum.undrafted_steps += more.undrafted_steps;
    sum.drafted_tokens += more.drafted_tokens;
    sum.accepted_tokens += more.accepted_tokens;
    sum.by_source.add(more.by_source);
    sum.forced_tokens += more.forced_tokens;
    sum.drafted_steps += more.drafted_steps;
    let depths = sum.accepted_by_depth.iter_mut();
    depths
        .zip(more.accepted_by_depth)
        .for_each(|(sum, more)| *sum += more);
    sum.times.draft += more.times.draft;
    sum.times.verify += more.times.verify;
    sum.times.commit += more.times.commit;
    sum.out_of_memory_calls += more.out_of_memory_calls;
    sum.leaks += more.leaks;
    let (sum, more) = (&mut sum.prefix, &more.prefix);
    sum.lookups += more.lookups;
    sum.hits += more.hits;
    sum.store_hits += more.store_hits;
    sum.cached_tokens += more.cached_tokens;
    sum.saved += more.saved;
    sum.evicted += more.evicted;
    sum.stored += more.stored;
    sum.failed += more.failed;
    sum.warmup_tokens += more.warmup_tokens;
    sum.warmup_saved += more.warmup_saved;
    sum.warmup_hits += more.warmup_hits;
}

/// Adds what another scheduler holds now.
pub(super) fn add_state(sum: &mut Stats, more: &Stats) {
    sum.queued += more.queued;
    sum.running += more.running;
    sum.sequences += more.sequences;
    sum.prefilling += more.prefilling;
    sum.pool_tokens += more.pool_tokens;
    sum.free_tokens += more.free_tokens;
    sum.evictable_tokens += more.evictable_tokens;
    sum.preempted += more.preempted;
    sum.blocked_on_pool |= more.blocked_on_pool;
    sum.prefix.entries += more.prefix.entries;
    sum.prefix.bytes += more.prefix.bytes;
}
