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

#[cfg(test)]
mod tests {
    use contract::{KvFormat, KvFormats, Limits, LoadConfig};
    use model::synth::SynthSpec;

    use super::super::non_paged::{NonPagedLayout, PartKind};
    use super::*;
    use crate::memory::BumpAllocator;
    use crate::step::HIDDEN_ROWS;

    fn state(with_head: bool) -> State {
        let spec = SynthSpec::parse("tiny-hybrid+mtp:q8_0").unwrap();
        let mut loaded = spec.load().unwrap();
        if !with_head {
            loaded.drop_mtp();
        }
        let config = LoadConfig {
            target: loaded.spec,
            weights: loaded.weights,
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: KvFormat::F16,
                v: KvFormat::Q8_0,
            },
            limits: Limits {
                sequences: 2,
                context: 600,
                tree_nodes: 24,
                prefill_chunk: 128,
                pool_tokens: None,
            },
        };
        let [mut a, mut b, mut c, mut d] = [(); 4].map(|()| BumpAllocator::new(0));
        State::new(&config, [&mut a, &mut b, &mut c, &mut d])
    }

    #[test]
    fn head_adds_a_layer_of_rows_and_a_hidden_row() {
        let (with, without) = (state(true), state(false));
        assert_eq!((with.n_layers(), without.n_layers()), (5, 4));
        let bytes = |state: &State, kind, layer| expected_bytes(state, 10, kind, layer);
        // One KV head of 256 values.
        assert_eq!(bytes(&with, SectionKind::Keys, 4), Some(10 * 512));
        assert_eq!(bytes(&with, SectionKind::Values, 4), Some(10 * 8 * 34));
        assert_eq!(bytes(&with, SectionKind::MtpHidden, 4), Some(4 * 256));
        assert_eq!(bytes(&with, SectionKind::MtpHidden, 3), None);
        assert_eq!(bytes(&with, SectionKind::Keys, 5), None);
        for kind in [SectionKind::Keys, SectionKind::MtpHidden] {
            assert_eq!(bytes(&without, kind, 4), None);
        }
        let [with, without] = [&with, &without].map(|state| NonPagedLayout::new(state, 10));
        assert_eq!(with.bytes - without.bytes, 4 * 256);
        let part = with
            .parts
            .iter()
            .find(|part| part.what == PartKind::MtpHidden);
        assert_eq!(part.unwrap().slot_bytes, HIDDEN_ROWS * 4 * 256);
    }
}
