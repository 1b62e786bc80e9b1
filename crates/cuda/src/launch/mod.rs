//! Launches: for every kernel, the unit that it is compiled from and a launch with checked shapes.
//!
//! A module per folder of `kernels/`. Each kernel has a `unit(..)`, which turns
//! shapes into defines, and a function that makes a [`Launch`] from shapes and device pointers.
//! Nothing here allocates or calls the driver: a launch is data, run by `driver::Gpu::run`,
//! captured into a graph, or printed.

use std::ffi::c_void;
use std::fmt;

pub mod all_reduce;
pub mod attention;
pub mod bandwidth;
pub mod clocks;
pub mod draft;
pub mod embedding;
pub mod ffn;
pub mod gated_delta;
pub mod gemm;
pub mod logits;
pub mod moe;
pub mod mtp;
pub mod norm;
pub(crate) mod one_launch;
pub mod score;
pub mod step_words;

/// What is compiled ahead of time and by the gate: the shapes of well-known models and of the
/// tests.
pub fn standard_units() -> Vec<CompileUnit> {
    let mut units = bandwidth::standard_units();
    units.push(clocks::unit());
    units
}

/// One source file with defines: what NVRTC compiles into one module.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CompileUnit {
    /// The file, as `kernels/` has it: `"gemm/decode_gemm_small_batch.cu"`.
    pub file: &'static str,
    /// Names and values of the defines, in any order.
    pub defines: Vec<(&'static str, String)>,
}

impl CompileUnit {
    /// A file without defines.
    pub fn new(file: &'static str) -> CompileUnit {
        CompileUnit {
            file,
            defines: Vec::new(),
        }
    }

    /// The same with one more define.
    pub fn define(mut self, name: &'static str, value: impl fmt::Display) -> CompileUnit {
        self.defines.push((name, value.to_string()));
        self
    }
}

impl fmt::Display for CompileUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file)?;
        self.defines
            .iter()
            .try_for_each(|(name, value)| write!(f, " -D{name}={value}"))
    }
}

/// One kernel launch.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The `extern "C"` name.
    pub entry: &'static str,
    /// Where it is compiled.
    pub unit: CompileUnit,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
    /// In the kernel's parameter order.
    pub args: Args,
    /// Whether all blocks must be resident at once, for a grid barrier.
    pub cooperative: bool,
    /// Whether it may begin before its predecessor ends; it must then call `pdl_wait()` before it
    /// touches anything the predecessor wrote. Ignored below sm_90.
    pub overlap: bool,
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} (grid {:?}, block {:?}, {} bytes shared)",
            self.entry, self.unit, self.grid, self.block, self.shared
        )
    }
}

/// Kernel arguments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    /// The values; each begins a new word.
    words: Vec<u64>,
    /// First word and size in bytes of each.
    places: Vec<(usize, usize)>,
}

impl Args {
    /// None yet.
    pub fn new() -> Args {
        Args::default()
    }

    fn push(mut self, word: u64, bytes: usize) -> Args {
        self.places.push((self.words.len(), bytes));
        self.words.push(word);
        self
    }

    /// A device pointer.
    pub fn ptr(self, address: u64) -> Args {
        self.push(address, 8)
    }

    /// An `int`.
    pub fn i32(self, value: i32) -> Args {
        self.push(u64::from(value.cast_unsigned()), 4)
    }

    /// An `unsigned int`.
    pub fn u32(self, value: u32) -> Args {
        self.push(u64::from(value), 4)
    }

    /// A `float`.
    pub fn f32(self, value: f32) -> Args {
        self.push(u64::from(value.to_bits()), 4)
    }

    /// An `unsigned long long`.
    pub fn u64(self, value: u64) -> Args {
        self.push(value, 8)
    }

    /// A struct passed by value, as its words.
    pub fn words(mut self, words: &[u64]) -> Args {
        self.places.push((self.words.len(), words.len() * 8));
        self.words.extend_from_slice(words);
        self
    }

    /// All values, 8 bytes for each that is shorter.
    pub(crate) fn as_words(&self) -> &[u64] {
        &self.words
    }

    /// Sizes in bytes, in order.
    pub fn sizes(&self) -> Vec<usize> {
        self.places.iter().map(|&(_, bytes)| bytes).collect()
    }

    /// Where the values are, as the driver wants them; valid while `self` is neither moved from nor
    /// changed. Behind them stand places of zeros, so that a list that is too short does not make
    /// the driver read wild addresses.
    pub(crate) fn pointers(&self) -> Vec<*mut c_void> {
        static ZEROS: [u64; 32] = [0; 32];
        let zeros = (&raw const ZEROS).cast_mut().cast();
        self.places
            .iter()
            .map(|&(word, _)| (&raw const self.words[word]).cast_mut().cast())
            .chain(std::iter::repeat_n(zeros, 16))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_their_order_and_sizes() {
        let args = Args::new().ptr(1 << 40).i32(-2).f32(1.5).words(&[7, 8]);
        assert_eq!(args.sizes(), [8, 4, 4, 16]);
        assert_eq!(args.words, [1 << 40, 0xffff_fffe, 0x3fc0_0000, 7, 8]);
    }

    #[test]
    fn a_unit_shows_its_defines() {
        let unit = CompileUnit::new("a/b.cu").define("N", 8).define("WIDE", 1);
        assert_eq!(unit.to_string(), "a/b.cu -DN=8 -DWIDE=1");
    }
}
