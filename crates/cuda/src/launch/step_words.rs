//! Where the fields of a step's headers stand, in 32-bit words: for tests and benchmarks of single
//! kernels, which write headers themselves. `kernels/common/step.cuh` explains the fields.

use std::mem::offset_of;

use crate::step;

/// The first of four words per tree.
pub const TREE: usize = offset_of!(step::Step, tree) / 4;
/// A word per row, as all up to [`DEPTH`]: tokens.
pub const TOKEN: usize = offset_of!(step::Step, token) / 4;
/// Rotary positions.
pub const POSITION: usize = offset_of!(step::Step, position) / 4;
/// A row's tree; -1 for padding.
pub const TREE_OF: usize = offset_of!(step::Step, tree_of) / 4;
/// A row's parent; -1 for a root and for padding.
pub const PARENT: usize = offset_of!(step::Step, parent) / 4;
/// 0 for a root.
pub const DEPTH: usize = offset_of!(step::Step, depth) / 4;
/// Two words per row, the lower first.
pub const ANCESTORS: usize = offset_of!(step::Step, ancestors) / 4;
/// Rows whose logits are computed.
pub const LOGITS_ROW: usize = offset_of!(step::Step, logits_row) / 4;
/// A word per tree, as the next two: attention windows.
pub const WINDOW: usize = offset_of!(step::Step, window) / 4;
/// Committed keys that every window sees.
pub const SINKS: usize = offset_of!(step::Step, sinks) / 4;
/// Where a root's captured hidden states go.
pub const FEATURE_ROW: usize = offset_of!(step::Step, feature_row) / 4;
/// [`dfs_schedule::PARTS`](super::gated_delta::dfs_schedule::PARTS) parts of 64 words.
pub const SCHEDULE: usize = offset_of!(step::Step, conv_sources_and_schedule) / 4;
/// Words of a whole `Step`.
pub const STEP: usize = size_of::<step::Step>() / 4;

/// Of an `MtpStep`, which begins with a `Step`: a word per tree, rows drafted before.
pub const EARLIER: usize = offset_of!(step::MtpStep, earlier) / 4;
/// A word per path: the node that it ends with.
pub const LAST: usize = offset_of!(step::MtpStep, last) / 4;
/// A word per row: the hidden row before it.
pub const BEFORE: usize = offset_of!(step::MtpStep, before) / 4;
/// Words of a whole `MtpStep`.
pub const MTP_STEP: usize = size_of::<step::MtpStep>() / 4;

/// The first path of a `Commit`.
pub const PATH: usize = offset_of!(step::Commit, path) / 4;
/// Words of a path.
pub const PATH_WORDS: usize = size_of::<step::StepPath>() / 4;
/// Words of a whole `Commit`.
pub const COMMIT: usize = size_of::<step::Commit>() / 4;
