//! Compiling many units at once.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::error::CompileError;
use super::library::Library;
use super::nvrtc;
use super::report::{EntryReport, entry_reports};
use super::source::expand;
use crate::driver::Arch;
use crate::launch::Unit;

/// How units are compiled.
#[derive(Debug, Clone)]
pub struct Options {
    /// The libnvrtc file to use, or `None` to look in the usual places.
    pub nvrtc: Option<PathBuf>,
    /// Threads; one program each.
    pub threads: usize,
    /// Whether kernels may begin before their predecessors end, where the architecture can (defines `PDL`).
    pub overlap: bool,
    /// Further options of the compiler.
    pub extra: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            nvrtc: None,
            threads: thread::available_parallelism().map_or(1, usize::from),
            overlap: true,
            extra: Vec::new(),
        }
    }
}

/// How far compiling has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Units ready.
    pub done: usize,
    /// Units in all.
    pub total: usize,
    /// The unit that has just become ready.
    pub unit: Unit,
}

/// A compiled unit.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// What was compiled.
    pub unit: Unit,
    /// Machine code for the exact architecture.
    pub cubin: Vec<u8>,
    /// What the assembler said about each entry.
    pub entries: Vec<EntryReport>,
    /// How long it took.
    pub took: Duration,
}

/// Compiles `units` for `arch`, in their order; a unit named twice is compiled once.
///
/// # Errors
/// The first error, by order of `units`.
pub fn compile(
    arch: Arch,
    units: &[Unit],
    options: &Options,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<Compiled>, CompileError> {
    let mut wanted: Vec<&Unit> = Vec::new();
    for unit in units {
        if !wanted.contains(&unit) {
            wanted.push(unit);
        }
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    Library::open(options.nvrtc.as_deref())?;
    let mut slots: Vec<Option<Result<Compiled, CompileError>>> =
        wanted.iter().map(|_| None).collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..options.threads.clamp(1, wanted.len()) {
            let (sender, next, wanted) = (sender.clone(), &next, &wanted);
            scope.spawn(move || {
                while let Some(unit) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let index = wanted.iter().position(|other| other == unit);
                    let _ = sender.send((index.unwrap_or(0), one(arch, unit, options)));
                }
            });
        }
        drop(sender);
        for (done, (index, result)) in receiver.iter().enumerate() {
            progress(Progress {
                done: done + 1,
                total: wanted.len(),
                unit: wanted[index].clone(),
            });
            slots[index] = Some(result);
        }
    });
    slots.into_iter().flatten().collect()
}

/// Compiles one unit on this thread.
fn one(arch: Arch, unit: &Unit, options: &Options) -> Result<Compiled, CompileError> {
    let start = Instant::now();
    let source = expand(unit.file)?;
    let (cubin, log) = nvrtc::cubin(
        &source,
        &unit.to_string(),
        &arch.to_string(),
        &flags(arch, unit, options),
    )?;
    Ok(Compiled {
        unit: unit.clone(),
        cubin,
        entries: entry_reports(&log),
        took: start.elapsed(),
    })
}

/// The compiler's options for a unit, defines in rising order of name.
fn flags(arch: Arch, unit: &Unit, options: &Options) -> Vec<String> {
    let mut defines: Vec<String> = unit
        .defines
        .iter()
        .map(|(name, value)| format!("-D{name}={value}"))
        .collect();
    defines.sort();
    let mut flags = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
        "--ptxas-options=-v".to_owned(),
        "-lineinfo".to_owned(),
    ];
    if options.overlap && arch.overlaps() {
        flags.push("-DPDL=1".to_owned());
    }
    flags.extend(options.extra.iter().cloned());
    flags.extend(defines);
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_the_exact_target_and_sort_the_defines() {
        let unit = Unit::new("x.cu").define("ROWS", 8).define("COLS", 4);
        let arch = Arch { number: 90 };
        let flags = flags(arch, &unit, &Options::default());
        assert_eq!(flags[0], "--gpu-architecture=sm_90a");
        assert!(flags.contains(&"-DPDL=1".to_owned()));
        assert_eq!(flags[flags.len() - 2..], ["-DCOLS=4", "-DROWS=8"]);
    }
}
