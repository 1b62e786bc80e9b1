//! Rows of the embedding table.
