//! The launches of a step of one row as one persistent launch of `one_launch/one_launch.cu`.
//!
//! [`Program::of`] turns consecutive launches of a plan into a list of tasks for each
//! multiprocessor. The tasks are data: `kernels/one_launch/task.cuh` defines what the GPU does with
//! them, and a slow interpreter in the tests here checks that all that they wait for arrives.
//! A launch of the plan is a phase. Its results go to words of their own, which show whether they
//! are there ([`exchange`]); counters order keys, queries and partial results of attention only.

mod assignment;
mod exchange;
#[cfg(test)]
mod interpreter;
mod operation;
mod program;
mod task;
#[cfg(test)]
mod tests;

pub(crate) use program::{Program, ProgramBuffers};
