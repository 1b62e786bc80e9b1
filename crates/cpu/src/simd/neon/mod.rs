//! 128-bit kernels of 64-bit Arm, eight rows of a tile or eight lanes at a time as two registers.

#[cfg(target_arch = "aarch64")]
mod dots;
#[cfg(target_arch = "aarch64")]
mod float_matmul;
#[cfg(target_arch = "aarch64")]
mod kernels;
#[cfg(target_arch = "aarch64")]
mod lanes;
#[cfg(target_arch = "aarch64")]
mod matmul;
#[cfg(target_arch = "aarch64")]
mod quantize;
#[cfg(target_arch = "aarch64")]
mod unpack;

/// Proof that the processor has NEON, and the instructions for its products of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neon(ByteProducts);

/// Instructions that multiply signed bytes and add the products in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(target_arch = "aarch64"),
    expect(dead_code, reason = "no other processor has them")
)]
enum ByteProducts {
    /// `smull` and `sadalp`, which every 64-bit Arm has.
    Widening,
    /// `sdot`: four products a lane.
    Dot,
    /// `smmla`: eight products a lane, of two rows of activations; `sdot` for a row alone.
    Matrix,
}

impl Neon {
    /// A token for each kind of products that the processor has, the fastest last.
    pub fn detect_all() -> Vec<Neon> {
        #[cfg(target_arch = "aarch64")]
        {
            let dot = std::arch::is_aarch64_feature_detected!("dotprod");
            let matrix = dot && std::arch::is_aarch64_feature_detected!("i8mm");
            let neon = std::arch::is_aarch64_feature_detected!("neon");
            let kinds = [
                (neon, ByteProducts::Widening),
                (neon && dot, ByteProducts::Dot),
                (neon && matrix, ByteProducts::Matrix),
            ];
            let found = kinds.into_iter().filter(|(has, _)| *has);
            found.map(|(_, products)| Neon(products)).collect()
        }
        #[cfg(not(target_arch = "aarch64"))]
        Vec::new()
    }

    /// The name for device information and benches.
    pub fn name(self) -> &'static str {
        match self.0 {
            ByteProducts::Widening => "neon",
            ByteProducts::Dot => "neon-dotprod",
            ByteProducts::Matrix => "neon-i8mm",
        }
    }
}
