//! What every device must pass, and what the algorithm is tested on. Dev only.
//!
//! [`fake`] is a runner whose next token is a hash of the history: the algorithm's reference.
//! [`suite`] holds the properties every device keeps, tried on the tiny models of [`model`];
//! [`golden`] is what an independent implementation says of a few more, and [`drafts`] what the
//! publisher's module says with random drafts beside them; [`compare`] is the one comparison of
//! numbers.
//!
//! What this crate must not know: any device. Its properties are generic over `contract::Backend`.

#![forbid(unsafe_code)]

pub mod compare;
pub mod deferred_draft;
pub mod drafts;
pub mod fake;
pub mod golden;
pub mod suite;
pub mod synthetic_model;
