//! Limits of the kernels of mixtures of experts.

use contract::MoeSpec;

use crate::launch::moe;
use crate::pack::BLOCK_ROWS;

// The messages below name these.
const _: () = assert!(moe::MAX_EXPERTS == 512 && moe::MAX_USED == 10 && BLOCK_ROWS == 128);

/// Kernel limits that well-formed experts may exceed.
pub(super) fn limits(spec: &MoeSpec) -> Result<(), (String, &'static str)> {
    if spec.n_experts > moe::MAX_EXPERTS {
        return Err((
            format!("a mixture of {} experts", spec.n_experts),
            "the kernels take at most 512; use --device cpu",
        ));
    }
    if spec.n_used > moe::MAX_USED {
        return Err((
            format!("{} experts for each row", spec.n_used),
            "the kernels take at most 10; use --device cpu",
        ));
    }
    // Each expert begins at a row block of the packed stack.
    let hidden = spec.down.rows();
    let shared = spec.shared.as_ref().map(|shared| shared.ffn.width());
    let widths = [("a width", hidden), ("experts", spec.width())];
    let widths = widths
        .into_iter()
        .chain(shared.map(|n| ("a shared expert", n)));
    let mut odd = widths.filter(|(_, width)| !width.is_multiple_of(BLOCK_ROWS));
    odd.next().map_or(Ok(()), |(what, width)| {
        Err((
            format!("{what} of {width} channels in a mixture of experts"),
            "it must be a multiple of 128; use --device cpu",
        ))
    })
}
