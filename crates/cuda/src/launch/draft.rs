//! The draft model's blocks.
