//! Quantised matrix products for few rows.
