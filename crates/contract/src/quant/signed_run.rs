//! The terms in which devices repack formats: whole numbers times scales.

/// 32 values of a block: value `i` is `unit * factors[i / 16] * codes[i]`, rounded once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SignedRun {
    /// Whole numbers, at most 127 in magnitude.
    pub codes: [i8; 32],
    /// The scale that the whole block shares.
    pub unit: f32,
    /// What each half multiplies it with, so that the product is exact: whole numbers from -32 to
    /// 31, and powers of two or 4-bit floats in MXFP4 and NVFP4.
    pub factors: [f32; 2],
}

impl SignedRun {
    /// The scale of each half.
    pub fn scales(&self) -> [f32; 2] {
        self.factors.map(|factor| self.unit * factor)
    }
}

/// A block of 256 values in the terms of Q6_K: value `i` is `d * scales[i / 16] * (codes[i] - 32)`,
/// exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SixBits {
    /// Codes plus 32, below 64.
    pub codes: [u8; 256],
    /// Scales of 16 values.
    pub scales: [i8; 16],
    /// The scale of the block: a half times a power of two.
    pub d: f32,
}
