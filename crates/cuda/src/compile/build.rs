//! Parallel compilation of units.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::cache::{Cache, CacheHit};
use super::error::CompileError;
use super::nvrtc;
use super::nvrtc_library::{Nvrtc, NvrtcSearch};
use super::report::{EntryReport, entry_reports};
use super::source::expand;
use crate::driver::Arch;
use crate::launch::CompileUnit;

/// Compilation options.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to search for libnvrtc.
    pub nvrtc: NvrtcSearch,
    /// The CUBIN cache folder, created on demand. `None` disables the cache.
    pub cache: Option<PathBuf>,
    /// Compiler threads, one program each.
    pub threads: usize,
    /// Whether to use programmatic dependent launch where the target has it (defines `PDL`).
    pub overlap: bool,
    /// Additional compiler options.
    pub extra: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            nvrtc: NvrtcSearch::default(),
            cache: None,
            threads: thread::available_parallelism().map_or(1, usize::from),
            overlap: true,
            extra: Vec::new(),
        }
    }
}

/// Compilation progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompileProgress {
    /// Finished units.
    pub done: usize,
    /// All units.
    pub total: usize,
    /// The unit that has just finished.
    pub unit: CompileUnit,
}

/// A compiled unit.
#[derive(Clone)]
pub struct Compiled {
    /// The source unit.
    pub unit: CompileUnit,
    /// Machine code for the exact target.
    pub cubin: Vec<u8>,
    /// Resource usage of each entry, from the assembler.
    pub entries: Vec<EntryReport>,
    /// Time to compile or to read.
    pub took: Duration,
    /// The cache file, or `None` if compiled now.
    pub cached: Option<PathBuf>,
}

impl fmt::Debug for Compiled {
    /// Omits the machine code.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled")
            .field("unit", &self.unit)
            .field("cubin_bytes", &self.cubin.len())
            .field("entries", &self.entries)
            .field("took", &self.took)
            .field("cached", &self.cached)
            .finish()
    }
}

/// Returns memory that NVRTC has freed to the system. NVRTC allocates with the C library, which
/// keeps freed memory per thread: 330 MB of a server that compiled the bundled pair's kernels on 16
/// cores.
fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            safe fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        malloc_trim(0);
    }
}

/// Compiles `units` for `arch`, in order. Duplicate units compile once.
///
/// # Errors
/// The first error in the order of `units`.
pub fn compile(
    arch: Arch,
    units: &[CompileUnit],
    options: &Options,
    progress: &mut dyn FnMut(CompileProgress),
) -> Result<Vec<Compiled>, CompileError> {
    let mut unique_units: Vec<&CompileUnit> = Vec::new();
    for unit in units {
        if !unique_units.contains(&unit) {
            unique_units.push(unit);
        }
    }
    if unique_units.is_empty() {
        return Ok(Vec::new());
    }
    let order = longest_first(&unique_units);
    // Without NVRTC the cache may still hold every unit.
    let library = Nvrtc::open(&options.nvrtc);
    let cache = Cache::new(options.cache.as_deref(), library.as_ref().ok().copied());
    if options.cache.is_none() {
        library.as_ref().map_err(CompileError::clone)?;
    }
    let library = library.map(|_| ());
    let mut slots: Vec<Option<Result<Compiled, CompileError>>> =
        unique_units.iter().map(|_| None).collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..options.threads.clamp(1, unique_units.len()) {
            let (sender, next) = (sender.clone(), &next);
            let (unique_units, order) = (&unique_units, &order);
            let (cache, library) = (&cache, &library);
            scope.spawn(move || {
                while let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = compile_unit(arch, unique_units[index], options, cache, library);
                    let _ = sender.send((index, result));
                }
            });
        }
        drop(sender);
        for (done, (index, result)) in receiver.iter().enumerate() {
            progress(CompileProgress {
                done: done + 1,
                total: unique_units.len(),
                unit: unique_units[index].clone(),
            });
            slots[index] = Some(result);
        }
    });
    return_freed_memory();
    slots.into_iter().flatten().collect()
}

/// Indices of units, slowest first, so that no thread starts a slow unit last. Sources with many
/// weight kinds compile slowest, and more rows take longer.
fn longest_first(units: &[&CompileUnit]) -> Vec<usize> {
    const LONG: [&str; 4] = [
        "gemm/fused_layer",
        "gemm/decode_gemm_small_batch.cu",
        "gemm/gemv.cu",
        "attention/decode_",
    ];
    let rank = |unit: &CompileUnit| {
        let source = LONG.iter().position(|file| unit.file.starts_with(file));
        let rows = unit.defines.iter().find(|(name, _)| *name == "ROWS");
        let rows: usize = rows.and_then(|(_, rows)| rows.parse().ok()).unwrap_or(0);
        (source.unwrap_or(LONG.len()), usize::MAX - rows)
    };
    let mut order: Vec<usize> = (0..units.len()).collect();
    order.sort_by_key(|index| rank(units[*index]));
    order
}

/// Reads one unit from the cache, or compiles and caches it.
fn compile_unit(
    arch: Arch,
    unit: &CompileUnit,
    options: &Options,
    cache: &Cache,
    library: &Result<(), CompileError>,
) -> Result<Compiled, CompileError> {
    let start = Instant::now();
    let source = expand(unit.file)?;
    let flags = flags(arch, unit, options);
    let key = cache.key(&source, &flags);
    let compiled = |cubin, log: &str, cached| Compiled {
        unit: unit.clone(),
        cubin,
        entries: entry_reports(log),
        took: start.elapsed(),
        cached,
    };
    if let Some(CacheHit { cubin, log, file }) = cache.get(&key) {
        return Ok(compiled(cubin, &log, Some(file)));
    }
    library.clone()?;
    let (cubin, log) = nvrtc::cubin(&source, &unit.to_string(), &arch.to_string(), &flags)?;
    cache.put(&key, &cubin, &log);
    Ok(compiled(cubin, &log, None))
}

/// Compiler options of a unit, with sorted defines.
fn flags(arch: Arch, unit: &CompileUnit, options: &Options) -> Vec<String> {
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
    ];
    if options.overlap && arch.has_pdl() {
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
    fn slowest_units_are_compiled_first() {
        let units = [
            CompileUnit::new("attention/combine_splits.cu"),
            CompileUnit::new("gemm/fused_layer_sm90.cu").define("ROWS", 8),
            CompileUnit::new("gemm/decode_gemm_small_batch.cu").define("ROWS", 64),
            CompileUnit::new("gemm/fused_layer_sm90.cu").define("ROWS", 32),
        ];
        let order = longest_first(&units.each_ref());
        assert_eq!(order, [3, 1, 2, 0]);
    }

    #[test]
    fn flags_name_the_exact_target_and_sort_defines() {
        let unit = CompileUnit::new("x.cu").define("ROWS", 8).define("COLS", 4);
        let arch = Arch { number: 90 };
        let flags = flags(arch, &unit, &Options::default());
        assert_eq!(flags[0], "--gpu-architecture=sm_90a");
        assert!(flags.contains(&"-DPDL=1".to_owned()));
        assert_eq!(flags[flags.len() - 2..], ["-DCOLS=4", "-DROWS=8"]);
    }
}
