//! Benches; see README.md beside this package.
