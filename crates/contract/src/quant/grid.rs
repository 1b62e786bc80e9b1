//! Code points of the IQ formats: which vectors of levels an index can name.

use super::grid_table;

/// The points of a set in order, as levels; `levels` values per coordinate.
///
/// # Panics
/// At compile time, when the set does not have `N` points.
const fn points<const D: usize, const N: usize>(levels: usize, set: &[u64]) -> [[u8; D]; N] {
    let mut points = [[0; D]; N];
    let (mut n, mut lattice) = (0, 0);
    while lattice < 64 * set.len() {
        if set[lattice / 64] >> (lattice % 64) & 1 == 1 {
            let (mut rest, mut i) = (lattice, 0);
            while i < D {
                points[n][i] = (rest % levels) as u8;
                rest /= levels;
                i += 1;
            }
            n += 1;
        }
        lattice += 1;
    }
    assert!(n == N, "the set has another number of points");
    points
}

/// Levels `0..3` of eight values.
pub(super) static IQ2_XXS: [[u8; 8]; 256] = points(3, &grid_table::IQ2_XXS);
/// Levels `0..3` of eight values.
pub(super) static IQ2_XS: [[u8; 8]; 512] = points(3, &grid_table::IQ2_XS);
/// Levels `0..3` of eight values.
pub(super) static IQ2_S: [[u8; 8]; 1024] = points(3, &grid_table::IQ2_S);
/// Levels `0..3` of eight values, of IQ1_S and IQ1_M.
pub(super) static IQ1: [[u8; 8]; 2048] = points(3, &grid_table::IQ1);
/// Levels `0..8` of four values.
pub(super) static IQ3_XXS: [[u8; 4]; 256] = points(8, &grid_table::IQ3_XXS);
/// Levels `0..8` of four values.
pub(super) static IQ3_S: [[u8; 4]; 512] = points(8, &grid_table::IQ3_S);

/// Eight signs from seven bits: the number of minus signs is even. A set bit is a minus.
pub(super) fn even_signs(seven: u8) -> u8 {
    let seven = seven & 127;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// `magnitude`, negated when bit `i` of `signs` is set.
pub(super) fn signed(magnitude: u8, signs: u8, i: usize) -> i8 {
    if signs >> i & 1 == 1 {
        -magnitude.cast_signed()
    } else {
        magnitude.cast_signed()
    }
}
