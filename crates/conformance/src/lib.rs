//! What every device must pass, and what the algorithm is tested on. Dev only.
//!
//! [`fake`] is a runner whose next token is a hash of the history: the algorithm's judge.
//!
//! What this crate must not know: any device. Its laws are generic over `contract::Backend`.

#![forbid(unsafe_code)]

pub mod fake;
