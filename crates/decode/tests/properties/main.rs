//! Properties of the algorithm, over a fake runner whose next token is a hash of the history.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod admission;
mod cancellation;
mod conditional;
mod constraints;
mod conversations;
mod distribution;
mod equivalence;
mod fairness;
mod faults;
mod fixture;
mod groups;
mod preemption;
mod prefix;
mod reasoning;
mod restriction;
mod stages;
mod warmup;
