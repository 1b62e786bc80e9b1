//! The `hearth` executable.
fn main() {}
