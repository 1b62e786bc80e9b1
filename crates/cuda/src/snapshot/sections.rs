//! Which sections a snapshot has, and how long they are.

use contract::snapshot::SectionKind;

use super::neutral::neutral_bytes;
use crate::state::{DraftRing, KvArray, KvGroup, LayerState, State};

/// Which planes an array's values and scales are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KvSide {
    Keys = 0,
    Values = 2,
}

impl KvSide {
    pub(super) fn array(self, group: &KvGroup) -> &KvArray {
        match self {
            KvSide::Keys => &group.k,
            KvSide::Values => &group.v,
        }
    }
}

/// Positions that a ring holds of `position` committed ones.
pub(super) fn ring_positions(ring: &DraftRing, position: usize) -> std::ops::Range<usize> {
    position.saturating_sub(ring.window)..position
}

pub(super) fn rings(state: &State) -> &[DraftRing] {
    state.draft.as_ref().map_or(&[], |draft| &draft.rings)
}

/// The index of a group among the state's.
pub(super) fn index_of<T>(groups: &[T], group: &T) -> usize {
    let same = |other: &T| std::ptr::eq(other, group);
    groups
        .iter()
        .position(same)
        .expect("a place names a group of its state")
}

/// The length a section must have; `None` where there is none of its kind.
pub(super) fn expected_bytes(
    (state, n_layers): (&State, usize),
    position: usize,
    kind: SectionKind,
    layer: u32,
) -> Option<usize> {
    let layer = usize::try_from(layer).ok()?;
    let of_ring = |side: KvSide| {
        let ring = rings(state).get(layer)?;
        let n = ring_positions(ring, position).len();
        Some(neutral_bytes(&ring.rows, side.array(&ring.rows), n))
    };
    match kind {
        SectionKind::DraftKeys => return of_ring(KvSide::Keys),
        SectionKind::DraftValues => return of_ring(KvSide::Values),
        _ if layer >= n_layers => return None,
        _ => {}
    }
    match (state.layer(layer), kind) {
        (LayerState::Kv(group, _), SectionKind::Keys) => {
            Some(neutral_bytes(group, &group.k, position))
        }
        (LayerState::Kv(group, _), SectionKind::Values) => {
            Some(neutral_bytes(group, &group.v, position))
        }
        (LayerState::Delta(group, _), SectionKind::DeltaState) => Some(group.state_bytes),
        (LayerState::Delta(group, _), SectionKind::ConvWindow) => Some(group.window_bytes),
        _ => None,
    }
}
