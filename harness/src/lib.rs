//! The harness; see README.md beside this package.
