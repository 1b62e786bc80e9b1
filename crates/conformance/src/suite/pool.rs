//! Properties of the shared KV page pool.

use contract::{DeviceError, Limits, Runner, SnapshotLocation, Tree};

use super::rig::check;
use super::{Case, Failure, LIMITS};

/// Three sequences on a pool that holds one of them at full length.
const NARROW: Limits = Limits {
    sequences: 3,
    context: 600,
    pool_tokens: Some(0),
    ..LIMITS
};

/// With a full pool no sequence can grow until one is saved and closed. Later it resumes
/// bit-identical.
pub(super) fn exhausted_pool_refuses_without_side_effects(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open_with(NARROW)?;
    let pool = rig.runner.info().pool;
    let (one, other) = (rig.text(300, 41), rig.text(292, 42));
    let mut alone = Vec::new();
    for text in [&one, &other] {
        let seq = rig.prefill(text)?;
        alone.push(rig.probe(seq)?);
        rig.runner.close(seq);
    }
    let free = |rig: &super::Rig| rig.runner.capacity().tokens;
    check(
        free(&rig) == pool.tokens(),
        "the capacity without sequences",
        || format!("{} of {}", free(&rig), pool.tokens()),
    )?;
    // With pages of 256 tokens: two for the first sequence, and one full page for the second.
    let first = rig.prefill(&one)?;
    let second = rig.prefill(&other[..256])?;
    let third = rig.open()?;
    let rest = rig.text(free(&rig), 43);
    for chunk in rest.chunks(NARROW.prefill_chunk) {
        rig.runner.prefill(third, chunk, &[])?;
    }
    check(free(&rig) == 0, "the room of a full pool", || {
        format!("{} tokens", free(&rig))
    })?;
    let expect_exhausted = |result: Result<(), DeviceError>, what: &str| {
        let refused = matches!(result, Err(DeviceError::PoolExhausted { .. }));
        check(refused, what, || format!("{result:?}"))
    };
    let more = rig.runner.prefill(second, &other[256..], &[]).map(|_| ());
    expect_exhausted(more, "prefilling on in a full pool")?;
    let root = rig.verify(second, &Tree::root(other[0])).map(|_| ());
    expect_exhausted(root, "decoding on in a full pool")?;
    let saved = rig.runner.snapshot(first, SnapshotLocation::Host)?;
    rig.runner.close(first);
    rig.runner.prefill(second, &other[256..], &[])?;
    let found = rig.probe(second)?;
    rig.same("decoded by who waited for pages", &found, &alone[1])?;
    let back = rig.open()?;
    let restored = rig.runner.restore(back, saved.id);
    expect_exhausted(restored, "restoring where there are too few pages")?;
    rig.runner.close(back);
    rig.runner.close(second);
    rig.runner.close(third);
    let back = rig.open()?;
    rig.runner.restore(back, saved.id)?;
    rig.runner.free_snapshot(saved.id);
    let found = rig.probe(back)?;
    rig.same("decoded by who gave pages up", &found, &alone[0])?;
    rig.runner.close(back);
    check(free(&rig) == pool.tokens(), "the room after all", || {
        format!("{} of {}", free(&rig), pool.tokens())
    })
}
