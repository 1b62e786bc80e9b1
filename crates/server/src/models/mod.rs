//! The models of one server: which are loaded, who uses them, and which are closed for others.
//!
//! A request takes a [`Lease`] on its model; a model with leases is never closed. One task, the
//! manager, opens and closes engines one at a time. All who wait for a model get their lease
//! when it is loaded, before the next swap, so models do not push each other out unused.
//!
//! Start with [`ModelHost::acquire`] for a request's way to an engine, and with `manager.rs` for
//! swaps.

mod host;
mod lease;
mod manager;
mod slot;
mod totals;

pub use host::{HostPolicy, HostedModel, ModelFinder, ModelHost, ModelState, ModelStatus};
pub use lease::{Lease, LeaseError};

use manager::Manager;

/// Opens a host of these models, of which the first is the default. Nothing is loaded yet.
///
/// Must be called within a tokio runtime, which runs the manager.
///
/// # Panics
/// If there is no model.
pub fn open(models: Vec<HostedModel>, policy: HostPolicy) -> ModelHost {
    assert!(!models.is_empty(), "a host has a default model");
    let (host, commands) = ModelHost::new(models, policy);
    tokio::spawn(Manager::new(host.clone(), commands).run());
    host
}
