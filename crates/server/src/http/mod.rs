//! HTTP: routes, server-sent events, middleware, metrics and the server's life.

pub mod access;
pub mod body;
pub mod completion_job;
mod connections;
pub mod dialect;
pub mod in_flight;
pub mod metrics;
pub mod middleware;
pub mod model_choice;
mod notes;
pub mod prefix_warmup;
pub mod routes;
pub mod serve;
pub mod shutdown;
pub mod sse;
pub mod state;
mod stream_error;
