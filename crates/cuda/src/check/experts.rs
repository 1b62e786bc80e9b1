//! Checks of mixtures of experts.

use contract::{ExpertGateUp, ExpertStack, MoeSpec, WeightError};

use super::{dense, mismatch, shape};
use crate::launch::moe;
use crate::pack::BLOCK_ROWS;

/// Checks the shape of every weight.
pub(super) fn shapes(spec: &MoeSpec, hidden: usize) -> Result<(), WeightError> {
    let (n, width) = (spec.n_experts, spec.width());
    if !(1..=n).contains(&spec.n_used) {
        let detail = format!("{} of {n} experts cannot be chosen", spec.n_used);
        return Err(mismatch(&spec.router, &detail));
    }
    shape(&spec.router, n, hidden)?;
    let stack = |stack: &ExpertStack, rows: usize, cols: usize| {
        if stack.n_experts != n {
            let detail = format!("{} experts, the router has {n}", stack.n_experts);
            return Err(mismatch(&stack.weight, &detail));
        }
        shape(&stack.weight, n * rows, cols)
    };
    match &spec.gate_up {
        ExpertGateUp::Separate { gate, up } => {
            stack(gate, width, hidden)?;
            stack(up, width, hidden)?;
        }
        ExpertGateUp::Fused(fused) => stack(fused, 2 * width, hidden)?,
    }
    stack(&spec.down, hidden, width)?;
    let Some(shared) = &spec.shared else {
        return Ok(());
    };
    shape(&shared.gate, 1, hidden)?;
    dense(&shared.ffn, hidden)
}

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
