//! Vector kernels, the only place of this crate with unsafe code besides [`crate::matmul`] and the
//! workers.
//!
//! Each instruction set has a token type whose only constructor checks the processor. Kernels are
//! methods of the token, so code with a token may call them. Each kernel has a scalar version of
//! the same signature.

mod avx2;
mod avx512;
pub mod dispatch;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod lanes;
mod neon;
#[cfg(target_arch = "x86_64")]
mod offset;
#[cfg(test)]
mod reference_tests;
pub mod scalar;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod table;
pub mod tiles;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod vector;

pub use avx2::Avx2;
pub use avx512::Avx512;
pub use neon::Neon;

use crate::kernels::Kernels;
use crate::matmul::activations;
use crate::matmul::activations::{ActivationRows, RowMut};
use crate::matmul::layout::Packed;
use dispatch::Dispatch;
use tiles::TileOut;

impl Kernels {
    /// The dispatch table of an instruction set.
    pub fn of(dispatch: Dispatch) -> Kernels {
        match dispatch {
            #[cfg(target_arch = "x86_64")]
            Dispatch::Avx512(token) => token.kernels(),
            #[cfg(target_arch = "x86_64")]
            Dispatch::Avx2(token) => token.kernels(),
            #[cfg(target_arch = "aarch64")]
            Dispatch::Neon(token) => token.kernels(),
            _ => Kernels::scalar(),
        }
    }
}

/// Rounds one row of activations, `x` `[cols]`.
pub fn quantize(dispatch: Dispatch, x: &[f32], row: &mut RowMut<'_>) {
    match dispatch {
        #[cfg(target_arch = "x86_64")]
        Dispatch::Avx512(kernels) => kernels.quantize(x, row),
        #[cfg(target_arch = "x86_64")]
        Dispatch::Avx2(kernels) => kernels.quantize(x, row),
        #[cfg(target_arch = "aarch64")]
        Dispatch::Neon(kernels) => kernels.quantize(x, row),
        _ => activations::quantize(x, row),
    }
}

/// All rows of `acts` against tile `tile` of `packed`, of an integer format.
pub fn tile(
    dispatch: Dispatch,
    packed: &Packed,
    tile: usize,
    acts: ActivationRows<'_>,
    out: &mut TileOut<'_>,
) {
    match dispatch {
        #[cfg(target_arch = "x86_64")]
        Dispatch::Avx512(kernels) => kernels.tile(packed, tile, acts, out),
        #[cfg(target_arch = "x86_64")]
        Dispatch::Avx2(kernels) => kernels.tile(packed, tile, acts, out),
        #[cfg(target_arch = "aarch64")]
        Dispatch::Neon(kernels) => kernels.tile(packed, tile, acts, out),
        _ => scalar::tile(packed, tile, acts, out),
    }
}

/// Rows `x` `[n, cols]` of f32 against tile `tile` of `packed`, of a float format; `cols` a
/// multiple of 4.
pub fn float_tile(
    dispatch: Dispatch,
    packed: &Packed,
    tile: usize,
    x: &[f32],
    out: &mut TileOut<'_>,
) {
    match dispatch {
        #[cfg(target_arch = "x86_64")]
        Dispatch::Avx512(kernels) => kernels.float_tile(packed, tile, x, out),
        #[cfg(target_arch = "x86_64")]
        Dispatch::Avx2(kernels) => kernels.float_tile(packed, tile, x, out),
        #[cfg(target_arch = "aarch64")]
        Dispatch::Neon(kernels) => kernels.float_tile(packed, tile, x, out),
        _ => scalar::float_tile(packed, tile, x, out),
    }
}
