//! Several devices as one: a model whose layers, LM head and draft are placed on different devices.
//!
//! [`SplitBackend`] places the model and estimates the memory of each device.

mod backend;

pub use backend::{SplitBackend, SplitDevice};
