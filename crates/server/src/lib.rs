//! The server: HTTP on tokio, one engine thread, and all settings and commands.
//!
//! A request passes through [`http::routes`] (parse), [`text::prepare`] (render and tokenise),
//! [`engine::handle`] (submit), [`engine`] (schedule), [`http::in_flight`] (events),
//! [`text::reply`] (detokenise and parse) and [`http::sse`] (stream).
//!
//! This crate knows nothing of kernels or models' arithmetic. No other crate knows sockets, clocks,
//! status codes or settings.
//!
//! Start reading at [`serve()`].

#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
pub mod compression;
pub mod config;
pub mod engine;
pub mod error;
mod guarded;
pub mod http;
pub mod ids;
pub mod kept_responses;
pub mod models;
pub mod open;
pub mod progress;
pub mod scripted;
pub mod settings;
pub mod text;
pub mod version;

pub use http::serve::{serve, serve_models, serve_with};
