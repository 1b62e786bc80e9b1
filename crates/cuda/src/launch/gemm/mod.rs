//! GEMMs: of few rows in decode steps, of many in prefill chunks.

pub mod fused_layer;
mod fused_layer_buffers;
pub mod gemv;
pub mod panels;
pub mod prefill;
pub mod small_batch;
