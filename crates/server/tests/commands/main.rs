//! The real executable: what each command does, says and refuses.

#![expect(
    clippy::unwrap_used,
    reason = "a test that meets something else must fail"
)]

mod client;
mod clients;
mod drafting;
mod errors;
mod files;
mod help;
mod kernels;
mod process;
mod running;
mod scripted;
mod serving;
mod settings;
mod windows;
