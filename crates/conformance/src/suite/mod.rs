//! The laws every device keeps, over any backend and any small model.
//!
//! A law is a function that uses the device and says what does not hold. [`run`] keeps them all; [`LAWS`]
//! names them one by one. None looks inside the device: what a state holds shows in the rows that follow.

mod calls;
mod commit;
mod faults;
mod pool;
mod prefill;
mod rows;
mod snapshot;
mod stand;
mod tree;
mod window;

use contract::{Backend, DeviceError, KvFormats, Limits, OpenPlan, TreeError};

use crate::compare::{Exactness, Tolerance};
use crate::specimen::Specimen;
use stand::Stand;

/// What is tried: one device, one model, one storage of keys and values.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The device.
    pub backend: &'a dyn Backend,
    /// The model.
    pub specimen: &'a Specimen,
    /// How keys and values are stored.
    pub kv: KvFormats,
    /// How closely ways that must give the same may differ. The CPU promises bits.
    pub exactness: Exactness,
    /// How far reading a prompt may be from speaking it beyond what weights and cache allow: for a device that
    /// rounds the activations of the two routes differently.
    pub routes: Tolerance,
    /// Whether the model is opened to give the same bits with trees as without ([`OpenPlan::exact`]).
    pub exact: bool,
}

/// What the laws open a runner with.
pub const LIMITS: Limits = Limits {
    sequences: 4,
    context: 224,
    tree_nodes: 24,
    prefill_chunk: 128,
    pool: None,
};

impl Subject<'_> {
    fn open(&self) -> Result<Stand, Broken> {
        self.open_with(LIMITS)
    }

    fn open_with(&self, limits: Limits) -> Result<Stand, Broken> {
        let plan = OpenPlan {
            target: self.specimen.spec.clone(),
            weights: self.specimen.weights.clone(),
            draft: None,
            exact: self.exact,
            kv: self.kv,
            limits,
        };
        let runner = self.backend.open(plan, &mut |_| {})?;
        Ok(Stand::new(runner, self.exactness))
    }

    fn describe(&self) -> String {
        let (k, v) = (self.kv.k.name(), self.kv.v.name());
        format!("{}, keys {k}, values {v}", self.specimen.spec.name)
    }
}

/// A law, and the subject it does not hold for.
#[derive(Debug, thiserror::Error)]
#[error("{law} does not hold for {subject}: {broken}")]
pub struct Breach {
    /// The law's name.
    pub law: &'static str,
    /// The model and the storage.
    pub subject: String,
    /// What was seen instead.
    #[source]
    pub broken: Broken,
}

/// What was seen instead of what a law says.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
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

/// A law.
pub type Law = fn(&Subject<'_>) -> Result<(), Broken>;

/// Every law by its name.
pub const LAWS: [(&str, Law); 25] = [
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
pub const WINDOW_LAWS: [(&str, Law); 4] = [
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
pub fn window_breaches(subject: &Subject<'_>) -> Vec<Breach> {
    let kept = WINDOW_LAWS.into_iter().map(|law| keep(subject, law));
    kept.filter_map(Result::err).collect()
}

/// Keeps every law, and tells of the first that does not hold.
pub fn run(subject: &Subject<'_>) -> Result<(), Breach> {
    LAWS.into_iter().try_for_each(|law| keep(subject, law))
}

/// Tries every law, also after one that does not hold, and tells of all of those.
pub fn breaches(subject: &Subject<'_>) -> Vec<Breach> {
    let kept = LAWS.into_iter().map(|law| keep(subject, law));
    kept.filter_map(Result::err).collect()
}

fn keep(subject: &Subject<'_>, (law, keeps): (&'static str, Law)) -> Result<(), Breach> {
    keeps(subject).map_err(|broken| Breach {
        law,
        subject: subject.describe(),
        broken,
    })
}
