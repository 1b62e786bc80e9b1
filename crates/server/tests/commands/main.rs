//! Tests of the executable: results, output and errors of each command.

#![expect(clippy::unwrap_used, reason = "a test fails on an unexpected error")]

mod client;
mod clients;
mod compression;
mod conversing;
mod doctoring;
mod drafting;
mod errors;
mod files;
mod help;
mod hostile;
mod installing;
mod kernels;
mod later_drafts;
mod load;
mod process;
mod pulling;
mod real_weights;
mod running;
mod scripted;
mod serving;
mod settings;
mod several_models;
mod spellings;
#[path = "../../../hub/tests/hub/test_hub.rs"]
mod test_hub;
mod tips;
mod truncation;
mod windows;
