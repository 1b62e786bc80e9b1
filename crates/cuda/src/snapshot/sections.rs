//! The sections of a snapshot and their lengths.

use contract::snapshot::SectionKind;

use super::neutral::neutral_bytes;
use crate::state::{DraftRing, KvArray, KvGroup, LayerState, State};

/// Keys or values: the index of the values' plane. The scales' plane follows it.
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

/// Committed positions that a ring still holds.
pub(super) fn ring_positions(ring: &DraftRing, position: usize) -> std::ops::Range<usize> {
    position.saturating_sub(ring.window)..position
}

pub(super) fn rings(state: &State) -> &[DraftRing] {
    state.draft.as_ref().map_or(&[], |draft| &draft.rings)
}

/// The index of a group in its state.
pub(super) fn index_of<T>(groups: &[T], group: &T) -> usize {
    let same = |other: &T| std::ptr::eq(other, group);
    groups
        .iter()
        .position(same)
        .expect("a layer refers to a group of its state")
}

/// The required length of a section. `None` if the model has no such section.
pub(super) fn expected_bytes(
    state: &State,
    position: usize,
    kind: SectionKind,
    layer: u32,
) -> Option<usize> {
    let (layer, n_layers) = (usize::try_from(layer).ok()?, state.n_layers());
    let of_ring = |side: KvSide| {
        let ring = rings(state).get(layer)?;
        let n = ring_positions(ring, position).len();
        Some(neutral_bytes(&ring.rows, side.array(&ring.rows), n))
    };
    match kind {
        SectionKind::DraftKeys => return of_ring(KvSide::Keys),
        SectionKind::DraftValues => return of_ring(KvSide::Values),
        SectionKind::MtpHidden => {
            let hidden = state.hidden.filter(|_| layer + 1 == n_layers)?;
            return Some(4 * hidden.width);
        }
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
