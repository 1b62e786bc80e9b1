//! Dev only: what every device must pass, and what the algorithm is tested on.

#![forbid(unsafe_code)]
