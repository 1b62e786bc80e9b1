//! How much memory there is, and how much a plan takes of it.

use contract::{DeviceError, MemoryPlan, OpenPlan, WeightRef};

use crate::blocks::head;
use crate::dispatch::Dispatch;
use crate::forward::Widths;
use crate::matmul::layout::{Format, TILE_ROWS};
use crate::runner::rows_per_pass;
use crate::state::sequence_bytes;

/// Memory of the machine or of the container the process lives in, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    /// What can be had without pushing anything else out.
    pub(crate) free: u64,
}

/// What the system says; `None` where it says nothing.
pub(crate) fn of_system() -> Option<Memory> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let machine = from_meminfo(&text)?;
    let number =
        |path: &str| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let cage = number("/sys/fs/cgroup/memory.max").zip(number("/sys/fs/cgroup/memory.current"));
    Some(match cage {
        Some((most, used)) => Memory {
            total: machine.total.min(most),
            free: machine.free.min(most.saturating_sub(used)),
        },
        None => machine,
    })
}

fn from_meminfo(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some(Memory {
        total: field("MemTotal:")?,
        free: field("MemAvailable:")?,
    })
}

/// Refuses an allocation that the system has no memory for. A system that does not tell is trusted.
pub(crate) fn require(bytes: u64) -> Result<(), DeviceError> {
    match of_system() {
        Some(memory) if memory.free < bytes => Err(DeviceError::NoRoom {
            what: "memory bytes",
            wanted: bytes,
            free: memory.free,
        }),
        _ => Ok(()),
    }
}

/// What opening a checked plan takes.
pub(crate) fn plan(plan: &OpenPlan, dispatch: &Dispatch) -> MemoryPlan {
    let (spec, limits) = (&plan.target, plan.limits);
    let sequences = limits.sequences as u64;
    let (kv, state, pending) = sequence_bytes(spec, plan.kv, limits, limits.context);
    let rows = rows_per_pass(limits);
    let arena = 4 * (Widths::of(spec).total() * rows) as u64;
    let head = 4 * head::buffer_floats(spec.hidden, spec.vocab) as u64;
    let (mut owned, mut products) = (0, 0);
    for weight in spec.weights() {
        if weight.name == spec.embedding.name {
            continue;
        }
        owned += loaded_bytes(weight, dispatch);
        products = products.max(rounded_bytes(weight, rows));
    }
    // A tied head is the embedding again, in the form products want it.
    if spec.head.name == spec.embedding.name {
        owned += loaded_bytes(&spec.head, dispatch);
    }
    // No machine has so much; the sum of the parts stays a number.
    let all = |bytes: u64| sequences.saturating_mul(bytes).min(u64::MAX / 8);
    MemoryPlan {
        weights_bytes: owned,
        mapped_bytes: spec.embedding.bytes() as u64,
        kv_bytes: all(kv),
        state_bytes: all(state),
        scratch_bytes: arena + head + products + all(pending),
    }
}

/// Bytes a loaded weight takes: a vector as f32, a matrix as its tiles.
fn loaded_bytes(weight: &WeightRef, dispatch: &Dispatch) -> u64 {
    let bytes = if weight.rows == 1 {
        4 * weight.values()
    } else if dispatch.is_reference() {
        weight.bytes()
    } else {
        Format::of(weight.ty).tile_bytes(weight.cols) * weight.rows.div_ceil(TILE_ROWS)
    };
    bytes as u64
}

/// Bytes of `n` rows of inputs of a matrix, rounded to eight bits with a scale and sums per 32.
fn rounded_bytes(weight: &WeightRef, n: usize) -> u64 {
    (n * weight.cols.next_multiple_of(256) / 32 * 44) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        let text = "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:    512 kB\n";
        let memory = from_meminfo(text).unwrap();
        assert_eq!((memory.total, memory.free), (2 << 20, 512 << 10));
        assert_eq!(from_meminfo("MemTotal: many kB"), None);
    }

    #[test]
    fn more_than_any_machine_has_is_refused_with_both_numbers() {
        if of_system().is_some() {
            let error = require(u64::MAX).unwrap_err().to_string();
            assert!(error.contains(&u64::MAX.to_string()), "{error}");
        }
    }
}
