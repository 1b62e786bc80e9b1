//! The launches of a step of few rows as one persistent launch: of one row by
//! `one_launch/one_launch.cu`, of several by `one_launch/several_rows.cu`.
//!
//! [`Program::of`] turns consecutive launches of a plan into a list of tasks for each
//! multiprocessor. The tasks are data: `kernels/one_launch/task.cuh` defines what the GPU does with
//! them, and a slow interpreter in the tests here checks that all that they wait for arrives.
//! A launch of the plan is a phase. Of one row, its results go to words of their own, which show
//! whether they are there ([`exchange`]); counters order keys, queries and partial results of
//! attention only. Of several rows, counters order all, and norms and gated units are part of the
//! phases of their products.

mod assignment;
mod exchange;
#[cfg(test)]
mod interpreter;
mod operation;
mod program;
mod rows_assignment;
#[cfg(test)]
mod rows_tests;
mod several_rows;
mod shapes;
mod task;
#[cfg(test)]
mod tests;

pub(crate) use program::{Program, ProgramBuffers};
