//! Correction of the offset of unsigned codes.

/// The start value of a block's products.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Offset {
    /// Codes are the values.
    None,
    /// Codes are 8 too high.
    Minus8,
    /// Codes are 16 too high.
    Minus16,
    /// Codes are 128 too high.
    Minus128,
    /// Codes are 128 too high, and the halves of a block are summed separately.
    Minus128Halves,
    /// Codes are 32 too high, and the halves of a block are summed separately.
    Minus32Halves,
}
