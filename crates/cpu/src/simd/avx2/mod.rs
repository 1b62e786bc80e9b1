//! 256-bit kernels.

#[cfg(target_arch = "x86_64")]
mod float_matmul;
#[cfg(target_arch = "x86_64")]
mod kernels;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod matmul;
#[cfg(target_arch = "x86_64")]
mod quantize;
#[cfg(target_arch = "x86_64")]
mod unpack;

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The token, if the processor supports it.
    pub fn detect() -> Option<Avx2> {
        #[cfg(target_arch = "x86_64")]
        let found = std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c");
        #[cfg(not(target_arch = "x86_64"))]
        let found = false;
        found.then_some(Avx2(()))
    }
}
