//! Saved committed states, their export and import.

use std::io::{Read, Write};
use std::sync::Arc;

use contract::snapshot::{
    SectionKind, SnapshotHeader, SnapshotIdentity, read_header, read_section, write_header,
    write_section,
};
use contract::{DeviceError, DraftLayer, DraftSpec, KvFormats, Mixer, ModelSpec};

use crate::draft_cache::DraftRing;
use crate::kv_shape::KvShape;
use crate::memory;
use crate::snapshot_pages::{CountedBytes, PAGE, Page, SnapshotBytes, cut};
use crate::state::{CpuSequence, LayerState};

/// The committed state of a sequence at one position. The runner owns it until it is freed.
pub(crate) struct Snapshot {
    pub(crate) position: usize,
    layers: Vec<SavedLayer>,
    /// Stored keys and values of each draft layer, within its attention window.
    draft: Vec<(Vec<u8>, Vec<u8>)>,
    /// Hidden row of the last position, if there is a multi-token-prediction head.
    mtp_hidden: Option<Vec<f32>>,
    /// Bytes without the pages.
    _held: CountedBytes,
}

/// Saved state of one layer.
enum SavedLayer {
    /// Stored rows of the committed positions.
    Attention(Vec<Arc<Page>>),
    /// Delta state and convolution window.
    Delta { state: Vec<f32>, window: Vec<f32> },
}

impl Snapshot {
    /// Copies the committed state that no snapshot holds yet. Deferred updates must be applied,
    /// pending features projected and the head's rows cached before.
    pub(crate) fn of(
        sequence: &mut CpuSequence,
        ledger: &SnapshotBytes,
    ) -> Result<Snapshot, DeviceError> {
        let n = sequence.position;
        let bytes = |layer: &LayerState| match layer {
            LayerState::Attention(c) => {
                c.saved.missing(n) * (c.shape.k_bytes() + c.shape.v_bytes())
            }
            LayerState::Delta(d) => 4 * (d.state.len() + d.window.len()),
        };
        let rings = sequence.draft.iter().flat_map(|draft| &draft.rings);
        let ring = |ring: &DraftRing| ring.keys.len() + ring.values.len();
        let all = sequence.layers.iter().map(bytes).chain(rings.map(ring));
        memory::require(all.map(|n| n as u64).sum())?;
        let save = |layer: &mut LayerState| match layer {
            LayerState::Attention(cache) => {
                let rows = (&cache.keys[..], &cache.values[..]);
                SavedLayer::Attention(cache.saved.save(rows, cache.shape, n, ledger))
            }
            LayerState::Delta(delta) => SavedLayer::Delta {
                state: delta.state.clone(),
                window: delta.window.clone(),
            },
        };
        let layers = sequence.layers.iter_mut().map(save).collect();
        let draft = sequence.draft.as_ref().map_or(Vec::new(), |d| d.save(n));
        let mtp_hidden = sequence.mtp.as_ref().map(|mtp| mtp.hidden.clone());
        Ok(Snapshot::new((n, mtp_hidden), layers, draft, ledger))
    }

    fn new(
        (position, mtp_hidden): (usize, Option<Vec<f32>>),
        layers: Vec<SavedLayer>,
        draft: Vec<(Vec<u8>, Vec<u8>)>,
        ledger: &SnapshotBytes,
    ) -> Snapshot {
        let state = |layer: &SavedLayer| match layer {
            SavedLayer::Attention(_) => 0,
            SavedLayer::Delta { state, window } => 4 * (state.len() + window.len()),
        };
        let states: usize = layers.iter().map(state).sum();
        let rings: usize = draft.iter().map(|(k, v)| k.len() + v.len()).sum();
        let hidden = mtp_hidden.as_ref().map_or(0, |row| 4 * row.len());
        Snapshot {
            position,
            layers,
            draft,
            mtp_hidden,
            _held: ledger.enter(states + rings + hidden),
        }
    }

    /// Restores `sequence` to this state. It must be of the same model and long enough.
    pub(crate) fn restore(&self, sequence: &mut CpuSequence) {
        for (layer, saved) in sequence.layers.iter_mut().zip(&self.layers) {
            match (layer, saved) {
                (LayerState::Attention(cache), SavedLayer::Attention(pages)) => {
                    let (k, v) = (cache.shape.k_bytes(), cache.shape.v_bytes());
                    for (i, page) in pages.iter().enumerate() {
                        cache.keys[i * PAGE * k..][..page.keys.len()].copy_from_slice(&page.keys);
                        let values = &mut cache.values[i * PAGE * v..];
                        values[..page.values.len()].copy_from_slice(&page.values);
                    }
                    cache.saved.restored(pages, self.position);
                }
                (LayerState::Delta(delta), SavedLayer::Delta { state, window }) => {
                    delta.state.copy_from_slice(state);
                    delta.window.copy_from_slice(window);
                    delta.mark_applied();
                }
                _ => unreachable!("snapshots and sequences of a runner have the model's layers"),
            }
        }
        if let Some(draft) = &mut sequence.draft {
            draft.restore(self.position, &self.draft);
        }
        if let (Some(mtp), Some(hidden)) = (&mut sequence.mtp, &self.mtp_hidden) {
            mtp.restore(hidden);
        }
        sequence.position = self.position;
        sequence.pending = None;
    }

    /// Bytes including shared pages.
    pub(crate) fn bytes(&self) -> u64 {
        let of = |layer: &SavedLayer| match layer {
            SavedLayer::Attention(pages) => {
                let bytes = |page: &Arc<Page>| page.keys.len() + page.values.len();
                pages.iter().map(bytes).sum()
            }
            SavedLayer::Delta { state, window } => 4 * (state.len() + window.len()),
        };
        let draft = self
            .draft
            .iter()
            .map(|(keys, values)| keys.len() + values.len());
        let hidden = self.mtp_hidden.iter().map(|row| 4 * row.len());
        let all = self.layers.iter().map(of).chain(draft).chain(hidden);
        all.map(|bytes| bytes as u64).sum()
    }

    /// Writes the snapshot in the device-neutral format: two sections per layer, and the hidden
    /// row behind those of the multi-token-prediction head's layer. Layers count from
    /// `first_layer`.
    pub(crate) fn export(
        &self,
        identity: SnapshotIdentity,
        first_layer: usize,
        sink: &mut dyn Write,
    ) -> Result<(), DeviceError> {
        write_header(
            sink,
            &SnapshotHeader {
                identity,
                position: self.position as u64,
                sections: (2 * (self.layers.len() + self.draft.len())
                    + usize::from(self.mtp_hidden.is_some())) as u32,
            },
        )?;
        let first_layer = first_layer as u32;
        for (i, layer) in (first_layer..).zip(&self.layers) {
            match layer {
                SavedLayer::Attention(pages) => {
                    let join = |of: fn(&Page) -> &[u8]| -> Vec<u8> {
                        pages.iter().flat_map(|page| of(page)).copied().collect()
                    };
                    let (keys, values) = (join(|page| &page.keys), join(|page| &page.values));
                    write_section(sink, SectionKind::Keys, i, &keys)?;
                    write_section(sink, SectionKind::Values, i, &values)?;
                }
                SavedLayer::Delta { state, window } => {
                    write_section(sink, SectionKind::DeltaState, i, &to_bytes(state))?;
                    write_section(sink, SectionKind::ConvWindow, i, &to_bytes(window))?;
                }
            }
        }
        if let Some(hidden) = &self.mtp_hidden {
            let layer = first_layer + self.layers.len() as u32 - 1;
            write_section(sink, SectionKind::MtpHidden, layer, &to_bytes(hidden))?;
        }
        for (i, (keys, values)) in self.draft.iter().enumerate() {
            write_section(sink, SectionKind::DraftKeys, i as u32, keys)?;
            write_section(sink, SectionKind::DraftValues, i as u32, values)?;
        }
        Ok(())
    }

    /// Reads the bytes of [`Snapshot::export`] from any device.
    pub(crate) fn import(
        plan: Imported<'_>,
        source: &mut dyn Read,
    ) -> Result<Snapshot, DeviceError> {
        let refuse = |detail: String| DeviceError::InvalidSnapshot { detail };
        let header = read_header(source, plan.identity)?;
        let position = usize::try_from(header.position).unwrap_or(usize::MAX);
        if position > plan.context {
            return Err(refuse(format!(
                "its position is {position}, the context is {}",
                plan.context
            )));
        }
        let (n_layers, n_draft) = (plan.mixers().count(), plan.draft_layers().len());
        let has_mtp = plan.spec.mtp.is_some();
        let n_sections = 2 * (n_layers + n_draft) + usize::from(has_mtp);
        if header.sections as usize != n_sections {
            return Err(refuse(format!(
                "{} sections, {n_sections} expected",
                header.sections
            )));
        }
        memory::require(plan.all_bytes(position) as u64)?;
        // Layers of the target, then of the draft, two halves each.
        let mut halves: Vec<[Option<Vec<u8>>; 2]> = vec![[None, None]; n_layers + n_draft];
        let mut mtp_hidden: Option<Vec<f32>> = None;
        for _ in 0..header.sections {
            let section = read_section(source, |kind, layer| {
                plan.bytes(kind, plan.own_layer(kind, layer)?, position)
            })?;
            let layer = plan.own_layer(section.kind, section.layer).unwrap_or(0);
            let (first, half) = match section.kind {
                SectionKind::Keys | SectionKind::DeltaState => (0, 0),
                SectionKind::Values | SectionKind::ConvWindow => (0, 1),
                SectionKind::DraftKeys => (n_layers, 0),
                SectionKind::DraftValues => (n_layers, 1),
                SectionKind::MtpHidden => {
                    if mtp_hidden.replace(from_bytes(&section.bytes)).is_some() {
                        let detail = "the hidden row occurs twice".to_owned();
                        return Err(refuse(detail));
                    }
                    continue;
                }
            };
            let slot = &mut halves[first + layer as usize][half];
            if slot.replace(section.bytes).is_some() {
                let detail = format!("layer {} has a section twice", section.layer);
                return Err(refuse(detail));
            }
        }
        let mut pairs = Vec::with_capacity(halves.len());
        for (i, halves) in halves.into_iter().enumerate() {
            let [Some(first), Some(second)] = halves else {
                return Err(refuse(format!("layer {i} lacks a section")));
            };
            pairs.push((first, second));
        }
        if mtp_hidden.is_some() != has_mtp {
            return Err(refuse("the hidden row is missing".to_owned()));
        }
        let draft = pairs.split_off(n_layers);
        let layers = pairs.into_iter().zip(plan.mixers());
        let layers = layers.map(|((first, second), mixer)| match mixer {
            Mixer::Attention(a) => {
                let shape = KvShape::new(a, plan.identity.kv, plan.identity.rotated);
                SavedLayer::Attention(cut((&first, &second), position, shape, plan.ledger))
            }
            Mixer::GatedDelta(_) => SavedLayer::Delta {
                state: from_bytes(&first),
                window: from_bytes(&second),
            },
        });
        Ok(Snapshot::new(
            (position, mtp_hidden),
            layers.collect(),
            draft,
            plan.ledger,
        ))
    }
}

/// Requirements on an imported snapshot.
#[derive(Clone, Copy)]
pub(crate) struct Imported<'a> {
    pub(crate) identity: SnapshotIdentity,
    pub(crate) spec: &'a ModelSpec,
    /// The first of its layers in the whole model.
    pub(crate) first_layer: usize,
    pub(crate) draft: Option<&'a DraftSpec>,
    /// The longest sequence.
    pub(crate) context: usize,
    /// Counter for its bytes.
    pub(crate) ledger: &'a SnapshotBytes,
}

impl Imported<'_> {
    /// The mixer of each layer, that of the multi-token-prediction head last.
    fn mixers(&self) -> impl Iterator<Item = &Mixer> {
        let mtp = self.spec.mtp.iter().map(|mtp| &mtp.layer);
        self.spec.layers.iter().chain(mtp).map(|layer| &layer.mixer)
    }

    fn draft_layers(&self) -> &[DraftLayer] {
        self.draft.map_or(&[], |draft| &draft.layers)
    }

    /// The layer of a section among those of `spec` or of the draft; `None` if it is below them.
    fn own_layer(&self, kind: SectionKind, layer: u32) -> Option<u32> {
        match kind {
            SectionKind::DraftKeys | SectionKind::DraftValues => Some(layer),
            _ => layer.checked_sub(self.first_layer as u32),
        }
    }

    /// Bytes of a section of a snapshot at `position`; `None` if there is no such section.
    fn bytes(&self, kind: SectionKind, layer: u32, position: usize) -> Option<usize> {
        let kv = self.identity.kv;
        match kind {
            SectionKind::DraftKeys | SectionKind::DraftValues => {
                let layer = self.draft_layers().get(layer as usize)?;
                let (_, format) = self.identity.draft?;
                let kv = KvFormats {
                    k: format,
                    v: format,
                };
                let rows = position.min(layer.window);
                return Some(rows * KvShape::new(&layer.attention, kv, false).k_bytes());
            }
            SectionKind::MtpHidden => {
                let is_head = layer as usize == self.spec.layers.len();
                return (is_head && self.spec.mtp.is_some()).then_some(4 * self.spec.hidden);
            }
            _ => {}
        }
        match (self.mixers().nth(layer as usize)?, kind) {
            (Mixer::Attention(a), SectionKind::Keys) => {
                Some(position * KvShape::new(a, kv, self.identity.rotated).k_bytes())
            }
            (Mixer::Attention(a), SectionKind::Values) => {
                Some(position * KvShape::new(a, kv, self.identity.rotated).v_bytes())
            }
            (Mixer::GatedDelta(d), SectionKind::DeltaState) => Some(4 * d.state_values()),
            (Mixer::GatedDelta(d), SectionKind::ConvWindow) => Some(4 * d.window_values()),
            _ => None,
        }
    }

    /// Bytes of all sections of a snapshot at `position`.
    fn all_bytes(&self, position: usize) -> usize {
        use SectionKind::{
            ConvWindow, DeltaState, DraftKeys, DraftValues, Keys, MtpHidden, Values,
        };
        let most = self.mixers().count().max(self.draft_layers().len()) as u32;
        let kinds = [
            Keys,
            Values,
            DeltaState,
            ConvWindow,
            DraftKeys,
            DraftValues,
            MtpHidden,
        ];
        let of_layer = |i| {
            let bytes = move |kind| self.bytes(kind, i, position);
            kinds.into_iter().filter_map(bytes)
        };
        (0..most).flat_map(of_layer).sum()
    }
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.chunks_exact(4);
    values
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}
