//! The reference: one scalar f32 function per operation, from slices to slices, without state.
//!
//! These functions define the meaning of every faster kernel on every device. Each states its
//! formula and its shapes, slowest dimension first: `[n_tokens, n_heads, head_dim]`.
//! A slice of a wrong length is a bug in the caller and panics; no input comes from a file or a
//! request.

pub mod activation;
pub mod attention;
pub mod conv;
pub mod delta;
pub mod draft;
pub mod kv;
pub mod matmul;
pub mod norm;
pub mod rope;
pub mod router;
pub mod rows;
pub mod score;
