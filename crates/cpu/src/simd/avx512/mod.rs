//! 512-bit kernels.

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

/// Proof that the processor has AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx512(());

impl Avx512 {
    /// The token, if the processor supports it.
    pub fn detect() -> Option<Avx512> {
        #[cfg(target_arch = "x86_64")]
        let found = std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vl")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vnni");
        #[cfg(not(target_arch = "x86_64"))]
        let found = false;
        found.then_some(Avx512(()))
    }
}
