//! One plain scalar f32 function per operation: slices and sizes in, slices out, no state.
//!
//! This is the meaning of every faster kernel, here and on other devices, and documentation as much as code:
//! each function states its formula and its shapes, slowest dimension first.
//! A slice of a wrong length is a defect of the caller and panics; nothing here reads a file or a request.

pub mod activation;
pub mod attention;
pub mod conv;
pub mod delta;
pub mod draft;
pub mod kv;
pub mod matmul;
pub mod norm;
pub mod rope;
pub mod rows;
