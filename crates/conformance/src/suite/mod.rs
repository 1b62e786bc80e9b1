//! Properties that every device must satisfy, checked over any backend and any small model.
//!
//! A property is a function that calls the runner and returns a [`Failure`]. [`properties`] lists
//! them, [`run`] checks them. They only compare logits rows, never internal state.

mod calls;
mod commit;
mod faults;
mod pool;
mod prefill;
mod rig;
mod rows;
mod snapshot;
mod tree;
mod window;

use contract::{Backend, DeviceError, KvFormats, Limits, LoadConfig, TreeError};

use crate::compare::{Precision, Tolerance};
use crate::synthetic_model::SyntheticModel;
use rig::Rig;

/// A test case: one device, one model, one choice of KV cache types.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    /// The device.
    pub backend: &'a dyn Backend,
    /// The model.
    pub model: &'a SyntheticModel,
    /// KV cache types.
    pub kv: KvFormats,
    /// Allowed difference between results that must be equal. The CPU requires bit-exact ones.
    pub precision: Precision,
    /// Allowed difference between prefill and decode beyond the error of weights and KV cache, for
    /// devices that round activations differently in the two.
    pub prefill_tolerance: Tolerance,
    /// Whether to open the model batch-invariant ([`LoadConfig::batch_invariant`]).
    pub batch_invariant: bool,
}

/// Limits of the tested runners.
pub const LIMITS: Limits = Limits {
    sequences: 4,
    context: 224,
    tree_nodes: 24,
    prefill_chunk: 128,
    pool_tokens: None,
};

impl Case<'_> {
    fn open(&self) -> Result<Rig, Failure> {
        self.open_with(LIMITS)
    }

    fn open_with(&self, limits: Limits) -> Result<Rig, Failure> {
        let config = LoadConfig {
            target: self.model.spec.clone(),
            weights: self.model.weights.clone(),
            draft: None,
            batch_invariant: self.batch_invariant,
            kv: self.kv,
            limits,
        };
        let runner = self.backend.open(config, &mut |_| {})?;
        Ok(Rig::new(runner, self.precision))
    }

    fn describe(&self) -> String {
        let (k, v) = (self.kv.k.name(), self.kv.v.name());
        format!("{}, keys {k}, values {v}", self.model.spec.name)
    }
}

/// A property that does not hold for a case.
#[derive(Debug, thiserror::Error)]
#[error("{property} does not hold for {case}: {failure}")]
pub struct Violation {
    /// The property's name.
    pub property: &'static str,
    /// The model and KV cache types.
    pub case: String,
    /// The failure.
    #[source]
    pub failure: Failure,
}

/// Why a property does not hold.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A call returned an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The property built an invalid tree.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A result differs from the expected one.
    #[error("{what}: {detail}")]
    Differs {
        /// The compared value and its position.
        what: String,
        /// The difference.
        detail: String,
    },
}

/// A property.
pub type Property = fn(&Case<'_>) -> Result<(), Failure>;

/// Properties of the arithmetic by name: equal positions have equal bits, however they came about.
pub const ARITHMETIC_PROPERTIES: [(&str, Property); 7] = [
    (
        "aligned prefill chunks change no bit",
        prefill::aligned_chunks_change_nothing,
    ),
    (
        "prefill equals decode up to rounding",
        prefill::prefill_equals_decode,
    ),
    (
        "tree nodes equal decoding their path",
        tree::nodes_equal_their_path,
    ),
    ("siblings are independent", tree::siblings_are_independent),
    (
        "batched verify equals single verify",
        tree::batch_equals_single,
    ),
    (
        "committing a path equals decoding it",
        commit::path_commit_equals_decoding,
    ),
    (
        "batched commit equals single commit",
        commit::batch_equals_single,
    ),
];

/// Properties of sequences, snapshots, the pool and requests by name.
pub const STATE_PROPERTIES: [(&str, Property); 18] = [
    (
        "logits requests change nothing",
        prefill::logits_requests_change_nothing,
    ),
    (
        "interleaved prefills are independent",
        prefill::interleaved_prefills_are_independent,
    ),
    ("discard leaves no trace", commit::discard_leaves_no_trace),
    (
        "closed sequences leave no trace",
        commit::closed_sequences_leave_no_trace,
    ),
    (
        "restore is bit-identical",
        snapshot::restore_is_bit_identical,
    ),
    (
        "snapshots are independent of their sequence",
        snapshot::snapshots_are_copies,
    ),
    (
        "conversations with a shared prefix are independent",
        snapshot::shared_prefixes_are_independent,
    ),
    (
        "import of an export is bit-identical",
        snapshot::import_of_export_is_bit_identical,
    ),
    (
        "damaged snapshots are refused",
        snapshot::damaged_snapshots_are_refused,
    ),
    (
        "freed snapshots are unknown",
        snapshot::freed_snapshots_are_unknown,
    ),
    (
        "top-k rows equal the best of the full row",
        rows::top_k_equals_best_of_full,
    ),
    (
        "logits processors match the reference",
        rows::logit_edits_match_the_reference,
    ),
    (
        "log-sum-exps cover the whole row",
        rows::log_sum_exps_cover_the_whole_row,
    ),
    ("closing returns capacity", faults::closing_returns_capacity),
    (
        "refused calls change nothing",
        faults::refused_calls_change_nothing,
    ),
    (
        "an exhausted pool refuses without side effects",
        pool::exhausted_pool_refuses_without_side_effects,
    ),
    (
        "invalid calls are refused",
        calls::invalid_calls_are_refused,
    ),
    (
        "max_len is the exact limit",
        calls::max_len_is_the_exact_limit,
    ),
];

/// Properties of attention windows, for devices that support them.
pub const WINDOW_PROPERTIES: [(&str, Property); 4] = [
    (
        "a window longer than the context changes nothing",
        window::wide_window_changes_nothing,
    ),
    (
        "windowed tree nodes equal decoding their path",
        window::nodes_equal_their_path,
    ),
    (
        "a window changes no stored state",
        window::window_changes_no_stored_state,
    ),
    (
        "windows in a batch are independent",
        window::batch_windows_are_independent,
    ),
];

/// Checks every window property and returns all violations.
pub fn window_violations(case: &Case<'_>) -> Vec<Violation> {
    let kept = WINDOW_PROPERTIES
        .into_iter()
        .map(|property| keep(case, property));
    kept.filter_map(Result::err).collect()
}

/// Checks every property and returns the first violation.
pub fn run(case: &Case<'_>) -> Result<(), Violation> {
    properties().try_for_each(|property| keep(case, property))
}

/// Checks the properties of the arithmetic and returns the first violation.
///
/// For what changes products alone, such as a weight type.
pub fn run_arithmetic(case: &Case<'_>) -> Result<(), Violation> {
    ARITHMETIC_PROPERTIES
        .into_iter()
        .try_for_each(|property| keep(case, property))
}

/// Checks every property and returns all violations.
pub fn violations(case: &Case<'_>) -> Vec<Violation> {
    let kept = properties().map(|property| keep(case, property));
    kept.filter_map(Result::err).collect()
}

/// Every property by name.
pub fn properties() -> impl Iterator<Item = (&'static str, Property)> {
    ARITHMETIC_PROPERTIES.into_iter().chain(STATE_PROPERTIES)
}

fn keep(case: &Case<'_>, (property, keeps): (&'static str, Property)) -> Result<(), Violation> {
    keeps(case).map_err(|failure| Violation {
        property,
        case: case.describe(),
        failure,
    })
}
