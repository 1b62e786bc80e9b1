//! Prompt compression: which parts of long message contents stay, given a score per token.
//!
//! A small model scores the tokens of a prompt (speculative prefill, arXiv 2502.02789). This crate
//! cuts contents into segments ([`segment`]), finds what the query names again ([`anchor`],
//! [`words`]), and keeps the best segments within a token budget ([`select()`]). [`keep_ratio`]
//! chooses the budget.
//!
//! All of it is pure: no tokenizer, template, model, clock or file. The caller passes contents
//! only, so roles, tools and control tokens of a prompt are out of reach.
//!
//! Start at [`select::select`].

#![forbid(unsafe_code)]

pub mod anchor;
pub mod keep_ratio;
pub mod segment;
pub mod select;
pub mod words;

pub use keep_ratio::{KeepCurve, KeepRatio, SessionRatios};
pub use segment::SegmentLimits;
pub use select::{ContentPart, ScoredToken, Selection, SelectionQuery, SelectionSettings, select};
