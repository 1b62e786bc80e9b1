//! GEMMs: of few rows in decode steps, of many in prefill chunks.

mod f32_split;
pub mod fused_layer;
mod fused_layer_buffers;
mod fused_layer_config;
pub mod gemv;
pub mod panels;
pub mod prefill;
pub(crate) mod prompt_work;
pub mod small_batch;
pub(super) mod words;
pub(crate) mod work;
