//! The laws of the algorithm, over a runner whose next token is a hash of the history.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod admission;
mod ahead;
mod cancelling;
mod chance;
mod faults;
mod forcing;
mod grammar;
mod pool;
mod prefix;
mod tokens;
mod turns;
mod world;
