//! Tests that every device must pass, and the reference runner of the algorithm. For tests only.
//!
//! [`fake`] is a runner whose next token is a hash of the history. [`suite`] has the properties of
//! every device, checked on the tiny models of [`synthetic_model`]. [`golden`] compares with an
//! independent implementation, [`drafts`] and [`drafts2`] with independent ones of drafts.
//! [`stages`] compares a model split over several devices with one device. [`compare`] is the one
//! comparison of values, [`scoring`] opens scorers.
//!
//! This crate knows no device: its properties are generic over `contract::Backend`.

#![forbid(unsafe_code)]

pub mod compare;
pub mod deferred_draft;
pub mod drafts;
pub mod drafts2;
pub mod fake;
pub mod golden;
pub mod scoring;
pub mod stage_faults;
pub mod stages;
pub mod suite;
pub mod synthetic_model;
