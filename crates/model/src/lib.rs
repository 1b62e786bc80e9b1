//! Placeholder crate page; see the crate's owner.
