//! Everything async, every thread and every setting: HTTP on tokio in front, one engine thread behind it.
//!
//! A request's way: [`routes`] read the body, [`prepare`] makes tokens of it, [`handle`] carries them to the
//! [`engine`] thread, [`run`] takes its events back, [`reply`] makes text of them, [`sse`] sends it.
//!
//! What this crate must not know: how anything is computed. What no other crate may know: sockets, clocks,
//! statuses and settings.
//!
//! Start reading at [`serve()`].

#![forbid(unsafe_code)]

pub mod ahead;
pub mod board;
pub mod body;
pub mod bundled;
pub mod cli;
pub mod commands;
pub mod config;
pub mod constrain;
pub mod devices;
pub mod engine;
pub mod error;
pub mod front;
pub mod handle;
pub mod ids;
pub mod legacy;
pub mod live;
pub mod logprobs;
pub mod loops;
pub mod meter;
pub mod metrics;
pub mod order;
pub mod prepare;
pub mod reply;
pub mod routes;
pub mod run;
pub mod scripted;
pub mod serve;
pub mod served;
pub mod settings;
pub mod shutdown;
pub mod sse;
pub mod state;
pub mod store;
pub mod talk;
pub mod thinking;

pub use serve::{serve, serve_with};
