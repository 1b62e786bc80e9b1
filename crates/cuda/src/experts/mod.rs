//! Experts that do not fit the device.
//!
//! Every expert of the model's layers then lies in page-locked host memory, and each layer has
//! slots on the device, which hold copies of the experts that are used most. Kernels find an expert
//! through a table of addresses: one without a slot is read over the bus, in place. So bits of
//! results do not depend on where an expert lies, and captured graphs stay valid.
//!
//! [`cache`] decides which experts have slots, [`prediction`] what a step costs;
//! `exec::expert_slots` moves them.

pub(crate) mod cache;
pub(crate) mod prediction;
