//! Processor time of this process. Beside wall time it shows what a change costs on a machine that
//! other processes use too.

use std::fs;

/// Processor time of all threads of this process, in seconds; 0 where the system does not count it
/// in `/proc`.
pub(super) fn cpu_seconds() -> f64 {
    let Ok(threads) = fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let nanoseconds = threads.filter_map(|thread| {
        let counts = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        counts.split_whitespace().next()?.parse::<u64>().ok()
    });
    nanoseconds.sum::<u64>() as f64 * 1e-9
}
