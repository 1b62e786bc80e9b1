//! Matrix products for many rows.
