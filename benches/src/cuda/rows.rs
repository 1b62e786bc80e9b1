//! Kernels of `kernels/rows`.

use anyhow::Result;

use super::Bench;

/// Times them.
///
/// # Errors
/// Those of the card.
pub fn run(_bench: &mut Bench) -> Result<()> {
    Ok(())
}
