//! The twelve bytes that Q4_K and Q5_K share: eight 6-bit scales and eight 6-bit minimums.
//!
//! ```text
//! j < 4:  scale = s[j] & 63                               min = s[j + 4] & 63
//! j >= 4: scale = s[j + 4] & 15 | (s[j - 4] >> 6) << 4    min = s[j + 4] >> 4 | (s[j] >> 6) << 4
//! ```

/// Scale and minimum of sub-block `j < 8`, from the 12 packed bytes.
pub fn scale_and_min(packed: &[u8; 12], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4,
            packed[j + 4] >> 4 | (packed[j] >> 6) << 4,
        )
    }
}

/// The reverse of [`scale_and_min`] for all eight pairs, each number below 64.
pub(super) fn pack(pairs: &[(u8, u8); 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for (j, &(scale, min)) in pairs.iter().enumerate() {
        if j < 4 {
            packed[j] = scale;
            packed[j + 4] = min;
        } else {
            packed[j + 4] = scale & 15 | (min & 15) << 4;
            packed[j - 4] |= (scale >> 4) << 6;
            packed[j] |= (min >> 4) << 6;
        }
    }
    packed
}
