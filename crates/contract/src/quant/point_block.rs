//! The contents of an IQ block between the search and the packing.

use half::f16;

/// What an IQ block stores, before packing. Formats use the leading points, and one scale of each
/// pair when 32 values share it.
pub(super) struct PointBlock {
    /// The scale of the block.
    pub(super) d: f16,
    /// Scales of 16 values each, `s` in `2 s + 1`.
    pub(super) scales: [u8; 16],
    /// Points of groups of eight values (the first 32) or four.
    pub(super) points: [u16; 64],
    /// Signs of eight values; for IQ1, whether they are moved down, in bit 0.
    pub(super) signs: [u8; 32],
}

impl PointBlock {
    /// A block of zeros.
    pub(super) const ZERO: PointBlock = PointBlock {
        d: f16::ZERO,
        scales: [0; 16],
        points: [0; 64],
        signs: [0; 32],
    };
}
