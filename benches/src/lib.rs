//! Benches; see README.md beside this package.

pub mod cuda;
pub mod tables;
