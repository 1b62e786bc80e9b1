//! The laws every device keeps, over any backend and any small model.
//!
//! A law is a function that uses the device and says what does not hold. [`run`] keeps them all; [`PROPERTIES`]
//! names them one by one. None looks inside the device: what a state holds shows in the rows that follow.

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

use contract::{Backend, DeviceError, KvFormats, Limits, OpenPlan, TreeError};

use crate::compare::{Precision, Tolerance};
use crate::synthetic_model::SyntheticModel;
use rig::Rig;

/// What is tried: one device, one model, one storage of keys and values.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    /// The device.
    pub backend: &'a dyn Backend,
    /// The model.
    pub model: &'a SyntheticModel,
    /// How keys and values are stored.
    pub kv: KvFormats,
    /// How closely ways that must give the same may differ. The CPU promises bits.
    pub precision: Precision,
    /// How far reading a prompt may be from speaking it beyond what weights and cache allow: for a device that
    /// rounds the activations of the two routes differently.
    pub prefill_tolerance: Tolerance,
    /// Whether the model is opened to give the same bits with trees as without ([`OpenPlan::exact`]).
    pub batch_invariant: bool,
}

/// What the laws open a runner with.
pub const LIMITS: Limits = Limits {
    sequences: 4,
    context: 224,
    tree_nodes: 24,
    prefill_chunk: 128,
    pool: None,
};

impl Case<'_> {
    fn open(&self) -> Result<Rig, Failure> {
        self.open_with(LIMITS)
    }

    fn open_with(&self, limits: Limits) -> Result<Rig, Failure> {
        let plan = OpenPlan {
            target: self.model.spec.clone(),
            weights: self.model.weights.clone(),
            draft: None,
            batch_invariant: self.batch_invariant,
            kv: self.kv,
            limits,
        };
        let runner = self.backend.open(plan, &mut |_| {})?;
        Ok(Rig::new(runner, self.precision))
    }

    fn describe(&self) -> String {
        let (k, v) = (self.kv.k.name(), self.kv.v.name());
        format!("{}, keys {k}, values {v}", self.model.spec.name)
    }
}

/// A property, and the case it does not hold for.
#[derive(Debug, thiserror::Error)]
#[error("{property} does not hold for {case}: {failure}")]
pub struct Violation {
    /// The law's name.
    pub property: &'static str,
    /// The model and the storage.
    pub case: String,
    /// What was seen instead.
    #[source]
    pub failure: Failure,
}

/// What was seen instead of what a law says.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A call was refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A law was written with a tree that is none.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// Something else came out than should have.
    #[error("{what}: {detail}")]
    Differs {
        /// What was compared, and where.
        what: String,
        /// How it differs.
        detail: String,
    },
}

/// A property.
pub type Property = fn(&Case<'_>) -> Result<(), Failure>;

/// Every law by its name.
pub const PROPERTIES: [(&str, Property); 25] = [
    (
        "cuts at aligned places do not show",
        prefill::cuts_do_not_show,
    ),
    ("asking changes nothing", prefill::asking_changes_nothing),
    (
        "reading is speaking, up to rounding",
        prefill::reading_is_speaking,
    ),
    (
        "prompts read in turns do not mix",
        prefill::turns_do_not_mix,
    ),
    (
        "a node hears what its path would",
        tree::a_node_hears_its_path,
    ),
    (
        "siblings do not see each other",
        tree::siblings_do_not_see_each_other,
    ),
    ("a batch is its members alone", tree::a_batch_is_its_members),
    (
        "a commit is its nodes one by one",
        commit::a_path_is_its_nodes,
    ),
    (
        "a commit of many is each alone",
        commit::a_batch_is_its_members,
    ),
    (
        "a discard leaves no trace",
        commit::a_discard_leaves_no_trace,
    ),
    (
        "a closed sequence leaves no trace",
        commit::a_close_leaves_no_trace,
    ),
    ("restoring is identity", snapshot::restoring_is_identity),
    ("a snapshot is a copy", snapshot::a_snapshot_is_a_copy),
    (
        "conversations with one beginning do not mix",
        snapshot::conversations_do_not_mix,
    ),
    (
        "export then import is identity",
        snapshot::travel_is_identity,
    ),
    ("damaged snapshots are refused", snapshot::damage_is_refused),
    ("what was freed is gone", snapshot::what_was_freed_is_gone),
    (
        "a top row is the head of the full row",
        rows::top_is_the_head_of_full,
    ),
    ("edits mean what they say", rows::edits_mean_what_they_say),
    ("sums are those of the row", rows::sums_are_those_of_the_row),
    ("room is given and given back", faults::room_comes_back),
    (
        "a refusal changes nothing",
        faults::a_refusal_changes_nothing,
    ),
    (
        "a full pool costs nobody anything",
        pool::a_full_pool_costs_nobody_anything,
    ),
    (
        "a broken call is answered",
        calls::a_broken_call_is_answered,
    ),
    (
        "the last token is the last",
        calls::the_last_token_is_the_last,
    ),
];

/// Laws of windows, for a device that was told to have them.
pub const WINDOW_PROPERTIES: [(&str, Property); 4] = [
    (
        "a window that hides nothing is none",
        window::a_wide_window_is_none,
    ),
    (
        "through a window a node hears what its path would",
        window::a_node_hears_its_path,
    ),
    (
        "a window is a way of reading",
        window::a_window_is_a_way_of_reading,
    ),
    (
        "windows of a batch do not mix",
        window::windows_of_a_batch_do_not_mix,
    ),
];

/// Tries every law of windows, and tells of all that do not hold.
pub fn window_violations(case: &Case<'_>) -> Vec<Violation> {
    let kept = WINDOW_PROPERTIES
        .into_iter()
        .map(|property| keep(case, property));
    kept.filter_map(Result::err).collect()
}

/// Keeps every property, and tells of the first that does not hold.
pub fn run(case: &Case<'_>) -> Result<(), Violation> {
    PROPERTIES
        .into_iter()
        .try_for_each(|property| keep(case, property))
}

/// Tries every property, also after one that does not hold, and tells of all of those.
pub fn violations(case: &Case<'_>) -> Vec<Violation> {
    let kept = PROPERTIES.into_iter().map(|property| keep(case, property));
    kept.filter_map(Result::err).collect()
}

fn keep(case: &Case<'_>, (property, keeps): (&'static str, Property)) -> Result<(), Violation> {
    keeps(case).map_err(|failure| Violation {
        property,
        case: case.describe(),
        failure,
    })
}
