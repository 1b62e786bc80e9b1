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

pub mod cli;
pub mod commands;
pub mod config;
pub mod engine;
pub mod error;
pub mod http;
pub mod ids;
pub mod open;
pub mod progress;
pub mod scripted;
pub mod settings;
pub mod text;

pub use http::serve::{serve, serve_with};
