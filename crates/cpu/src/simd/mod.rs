//! Vector kernels, the only place of this crate with unsafe code.
//!
//! Each instruction set has a token type whose only constructor looks at the processor; kernels are methods
//! of the token, so code that holds one may call them. Beside each kernel stands a scalar twin of the same
//! signature.

mod avx2;
mod avx512;

pub use avx2::Avx2;
pub use avx512::Avx512;
