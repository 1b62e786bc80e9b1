//! The HTTP side over real sockets: the real router, engine thread, scheduler and tokenizer, and a
//! device that replays a test's script.

#![expect(
    clippy::unwrap_used,
    reason = "in a test a failed unwrap is a failed test"
)]

mod access;
mod bad_requests;
mod caching;
mod cases;
mod chat;
mod client;
mod completions;
mod connections;
mod definite_values;
mod device_errors;
mod kept_responses;
mod lifecycle;
mod llama_server;
mod logprobs;
mod messages;
mod metrics;
mod models;
mod models_server;
mod ollama;
mod queue;
mod reasoning;
mod responses;
mod script;
mod shapes;
mod status;
mod test_server;
mod text;
mod tokens;
