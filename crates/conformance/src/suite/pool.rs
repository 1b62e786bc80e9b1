//! Laws of the pages that sequences share: what does not fit is refused, and nobody is the worse for it.

use contract::{DeviceError, Limits, Runner, SnapshotLocation, Tree};

use super::rig::check;
use super::{Case, Failure, LIMITS};

/// Three sequences on a pool that holds one of them at full length.
const NARROW: Limits = Limits {
    sequences: 3,
    context: 600,
    pool: Some(0),
    ..LIMITS
};

/// Sequences fill the pool to the last page. Nobody can grow then until one is saved and closed; it goes on later as if
/// nothing had been.
pub(super) fn a_full_pool_costs_nobody_anything(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open_with(NARROW)?;
    let pool = rig.runner.info().pool;
    let (one, other) = (rig.text(300, 41), rig.text(292, 42));
    let mut alone = Vec::new();
    for text in [&one, &other] {
        let seq = rig.read(text)?;
        alone.push(rig.reveal(seq)?);
        rig.runner.close(seq);
    }
    let free = |rig: &super::Rig| rig.runner.capacity().tokens;
    check(free(&rig) == pool.tokens(), "the room of nobody", || {
        format!("{} of {}", free(&rig), pool.tokens())
    })?;
    // With pages of 256 tokens two for the first and one for the second, which it fills.
    let first = rig.read(&one)?;
    let second = rig.read(&other[..256])?;
    let third = rig.open()?;
    let rest = rig.text(free(&rig), 43);
    for chunk in rest.chunks(NARROW.prefill_chunk) {
        rig.runner.prefill(third, chunk, &[])?;
    }
    check(free(&rig) == 0, "the room of a full pool", || {
        format!("{} tokens", free(&rig))
    })?;
    let dry = |result: Result<(), DeviceError>, what: &str| {
        let refused = matches!(result, Err(DeviceError::PoolExhausted { .. }));
        check(refused, what, || format!("{result:?}"))
    };
    let more = rig.runner.prefill(second, &other[256..], &[]).map(|_| ());
    dry(more, "reading on in a full pool")?;
    let root = rig.verify(second, &Tree::root(other[0])).map(|_| ());
    dry(root, "speaking on in a full pool")?;
    let saved = rig.runner.snapshot(first, SnapshotLocation::Host)?;
    rig.runner.close(first);
    rig.runner.prefill(second, &other[256..], &[])?;
    let found = rig.reveal(second)?;
    rig.same("spoken by who waited for pages", &found, &alone[1])?;
    let back = rig.open()?;
    let restored = rig.runner.restore(back, saved.id);
    dry(restored, "restoring where there are too few pages")?;
    rig.runner.close(back);
    rig.runner.close(second);
    rig.runner.close(third);
    let back = rig.open()?;
    rig.runner.restore(back, saved.id)?;
    rig.runner.free_snapshot(saved.id);
    let found = rig.reveal(back)?;
    rig.same("spoken by who gave pages up", &found, &alone[0])?;
    rig.runner.close(back);
    check(free(&rig) == pool.tokens(), "the room after all", || {
        format!("{} of {}", free(&rig), pool.tokens())
    })
}
