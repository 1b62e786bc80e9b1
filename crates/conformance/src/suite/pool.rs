//! Laws of the pages that sequences share: what does not fit is refused, and nobody is the worse for it.

use contract::{DeviceError, Limits, PAGES, Place, Runner, Tree};

use super::stand::check;
use super::{Broken, LIMITS, Subject};

/// Three sequences on a pool that holds one of them at full length.
const NARROW: Limits = Limits {
    sequences: 3,
    context: 600,
    pool: Some(0),
    ..LIMITS
};

/// Sequences fill the pool to the last page. Nobody can grow then until one is saved and closed; it goes on later as if
/// nothing had been.
pub(super) fn a_full_pool_costs_nobody_anything(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open_with(NARROW)?;
    let pool = stand.runner.info().pool;
    let (one, other) = (stand.text(300, 41), stand.text(292, 42));
    let mut alone = Vec::new();
    for text in [&one, &other] {
        let seq = stand.read(text)?;
        alone.push(stand.reveal(seq)?);
        stand.runner.close(seq);
    }
    let free = |stand: &super::Stand| stand.runner.room().tokens;
    check(free(&stand) == pool.tokens(), "the room of nobody", || {
        format!("{} of {}", free(&stand), pool.tokens())
    })?;
    // With pages of 256 tokens two for the first and one for the second, which it fills.
    let first = stand.read(&one)?;
    let second = stand.read(&other[..256])?;
    let third = stand.open()?;
    let rest = stand.text(free(&stand), 43);
    for chunk in rest.chunks(NARROW.prefill_chunk) {
        stand.runner.prefill(third, chunk, &[])?;
    }
    check(free(&stand) == 0, "the room of a full pool", || {
        format!("{} tokens", free(&stand))
    })?;
    let dry = |result: Result<(), DeviceError>, what: &str| {
        let refused = matches!(result, Err(DeviceError::NoRoom { what, .. }) if what == PAGES);
        check(refused, what, || format!("{result:?}"))
    };
    let more = stand.runner.prefill(second, &other[256..], &[]).map(|_| ());
    dry(more, "reading on in a full pool")?;
    let root = stand.verify(second, &Tree::root(other[0])).map(|_| ());
    dry(root, "speaking on in a full pool")?;
    let saved = stand.runner.snapshot(first, Place::Host)?;
    stand.runner.close(first);
    stand.runner.prefill(second, &other[256..], &[])?;
    let found = stand.reveal(second)?;
    stand.same("spoken by who waited for pages", &found, &alone[1])?;
    let back = stand.open()?;
    let restored = stand.runner.restore(back, saved.id);
    dry(restored, "restoring where there are too few pages")?;
    stand.runner.close(back);
    stand.runner.close(second);
    stand.runner.close(third);
    let back = stand.open()?;
    stand.runner.restore(back, saved.id)?;
    stand.runner.free_snapshot(saved.id);
    let found = stand.reveal(back)?;
    stand.same("spoken by who gave pages up", &found, &alone[0])?;
    stand.runner.close(back);
    check(free(&stand) == pool.tokens(), "the room after all", || {
        format!("{} of {}", free(&stand), pool.tokens())
    })
}
