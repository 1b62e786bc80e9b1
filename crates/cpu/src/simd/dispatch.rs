//! Instruction-set dispatch, decided once at start.

use super::{Avx2, Avx512, Neon};

/// A choice of kernels. A value proves that the processor supports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// The reference: f32 activations and dequantized f32 weights, all sums in the reference's
    /// order.
    Reference,
    /// The fast path's arithmetic in scalar code, bit-identical to the vector kernels.
    Scalar,
    /// 256-bit vectors: AVX2, FMA and F16C.
    Avx2(Avx2),
    /// 512-bit vectors: AVX-512 F, BW, VL, DQ and VNNI.
    Avx512(Avx512),
    /// 128-bit vectors of 64-bit Arm, with the products of bytes that the processor has.
    Neon(Neon),
}

impl Dispatch {
    /// The reference.
    pub fn reference() -> Dispatch {
        Dispatch::Reference
    }

    /// The fastest kernels that this processor supports.
    pub fn detect() -> Dispatch {
        // The list ends with the fastest.
        *Dispatch::all_fast().last().unwrap_or(&Dispatch::Scalar)
    }

    /// The 256-bit kernels, if supported.
    pub fn avx2() -> Option<Dispatch> {
        Avx2::detect().map(Dispatch::Avx2)
    }

    /// The 512-bit kernels, if supported.
    pub fn avx512() -> Option<Dispatch> {
        Avx512::detect().map(Dispatch::Avx512)
    }

    /// All supported fast kernels, from scalar to the fastest; tests and benches try each.
    pub fn all_fast() -> Vec<Dispatch> {
        let wide = [Dispatch::avx2(), Dispatch::avx512()];
        let wide = wide.into_iter().flatten();
        let neon = Neon::detect_all().into_iter().map(Dispatch::Neon);
        [Dispatch::Scalar]
            .into_iter()
            .chain(wide)
            .chain(neon)
            .collect()
    }

    /// The name for device information and benches.
    pub fn name(self) -> &'static str {
        match self {
            Dispatch::Reference => "reference",
            Dispatch::Scalar => "scalar",
            Dispatch::Avx2(_) => "avx2",
            Dispatch::Avx512(_) => "avx512-vnni",
            Dispatch::Neon(kernels) => kernels.name(),
        }
    }

    /// Whether this is the reference.
    pub fn is_reference(self) -> bool {
        self == Dispatch::Reference
    }
}
