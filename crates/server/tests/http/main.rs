//! The whole HTTP side over real sockets: real router, real engine thread, real scheduler and tokenizer, and a
//! device that says what a test wrote down.

#![expect(
    clippy::unwrap_used,
    reason = "in a test a failed unwrap is a failed test"
)]

mod caching;
mod chat;
mod client;
mod completions;
mod house;
mod lifecycle;
mod logprobs;
mod messages;
mod misuse;
mod queue;
mod responses;
mod script;
mod shapes;
mod status;
mod text;
mod thinking;
