//! Saved committed states, and their way to bytes and back.

use std::io::{Read, Write};

use contract::snapshot::{
    Header, Owner, SectionKind, read_header, read_section, write_header, write_section,
};
use contract::{DeviceError, Mixer, ModelSpec, RunnerInfo};

use crate::memory;
use crate::state::{KvShape, LayerState, Sequence};

/// The committed state of a sequence at one position. Owned by the runner until it is freed.
pub(crate) struct Snapshot {
    pub(crate) position: usize,
    layers: Vec<SavedLayer>,
}

/// What was saved of one layer.
enum SavedLayer {
    /// Stored rows of the committed positions.
    Attention { keys: Vec<u8>, values: Vec<u8> },
    /// State and window.
    Delta { state: Vec<f32>, window: Vec<f32> },
}

impl Snapshot {
    /// Copies what is committed. The delta states must be settled.
    pub(crate) fn of(sequence: &Sequence) -> Result<Snapshot, DeviceError> {
        let n = sequence.position;
        let bytes = |layer: &LayerState| match layer {
            LayerState::Attention(c) => n * (c.shape.k_bytes() + c.shape.v_bytes()),
            LayerState::Delta(d) => 4 * (d.state.len() + d.window.len()),
        };
        memory::require(sequence.layers.iter().map(|l| bytes(l) as u64).sum())?;
        let save = |layer: &LayerState| match layer {
            LayerState::Attention(cache) => SavedLayer::Attention {
                keys: cache.keys[..n * cache.shape.k_bytes()].to_vec(),
                values: cache.values[..n * cache.shape.v_bytes()].to_vec(),
            },
            LayerState::Delta(delta) => SavedLayer::Delta {
                state: delta.state.clone(),
                window: delta.window.clone(),
            },
        };
        Ok(Snapshot {
            position: n,
            layers: sequence.layers.iter().map(save).collect(),
        })
    }

    /// Puts `sequence` into this state. It must be of the same model and long enough.
    pub(crate) fn restore(&self, sequence: &mut Sequence) {
        for (layer, saved) in sequence.layers.iter_mut().zip(&self.layers) {
            match (layer, saved) {
                (LayerState::Attention(cache), SavedLayer::Attention { keys, values }) => {
                    cache.keys[..keys.len()].copy_from_slice(keys);
                    cache.values[..values.len()].copy_from_slice(values);
                }
                (LayerState::Delta(delta), SavedLayer::Delta { state, window }) => {
                    delta.state.copy_from_slice(state);
                    delta.window.copy_from_slice(window);
                    delta.settled();
                }
                _ => unreachable!("snapshots and sequences of a runner have the model's layers"),
            }
        }
        sequence.position = self.position;
        sequence.pending = None;
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        let of = |layer: &SavedLayer| match layer {
            SavedLayer::Attention { keys, values } => keys.len() + values.len(),
            SavedLayer::Delta { state, window } => 4 * (state.len() + window.len()),
        };
        self.layers.iter().map(|layer| of(layer) as u64).sum()
    }

    /// Writes the snapshot in the device-neutral layout, two sections a layer.
    pub(crate) fn export(
        &self,
        info: &RunnerInfo,
        sink: &mut dyn Write,
    ) -> Result<(), DeviceError> {
        write_header(
            sink,
            &Header {
                owner: owner(info),
                position: self.position as u64,
                sections: 2 * self.layers.len() as u32,
            },
        )?;
        for (i, layer) in self.layers.iter().enumerate() {
            let i = i as u32;
            match layer {
                SavedLayer::Attention { keys, values } => {
                    write_section(sink, SectionKind::Keys, i, keys)?;
                    write_section(sink, SectionKind::Values, i, values)?;
                }
                SavedLayer::Delta { state, window } => {
                    write_section(sink, SectionKind::DeltaState, i, &to_bytes(state))?;
                    write_section(sink, SectionKind::ConvWindow, i, &to_bytes(window))?;
                }
            }
        }
        Ok(())
    }

    /// Reads what [`Snapshot::export`] wrote, on this device or another.
    pub(crate) fn import(
        info: &RunnerInfo,
        spec: &ModelSpec,
        source: &mut dyn Read,
    ) -> Result<Snapshot, DeviceError> {
        let refuse = |detail: String| DeviceError::SnapshotRefused { detail };
        let header = read_header(source, owner(info))?;
        let context = info.limits.context;
        let position = usize::try_from(header.position).unwrap_or(usize::MAX);
        if position > context {
            return Err(refuse(format!(
                "it stands at position {position}, the context is {context}"
            )));
        }
        if header.sections as usize != 2 * spec.layers.len() {
            return Err(refuse(format!(
                "{} sections, {} expected",
                header.sections,
                2 * spec.layers.len()
            )));
        }
        let expected = |kind: SectionKind, layer: u32| {
            let layer = spec.layers.get(layer as usize)?;
            match (&layer.mixer, kind) {
                (Mixer::Attention(a), SectionKind::Keys) => {
                    Some(position * KvShape::new(a, info.kv).k_bytes())
                }
                (Mixer::Attention(a), SectionKind::Values) => {
                    Some(position * KvShape::new(a, info.kv).v_bytes())
                }
                (Mixer::GatedDelta(d), SectionKind::DeltaState) => Some(4 * d.state_values()),
                (Mixer::GatedDelta(d), SectionKind::ConvWindow) => Some(4 * d.window_values()),
                _ => None,
            }
        };
        let kinds = [
            SectionKind::Keys,
            SectionKind::Values,
            SectionKind::DeltaState,
            SectionKind::ConvWindow,
        ];
        let of_layer = |i| kinds.into_iter().filter_map(move |kind| expected(kind, i));
        let all: usize = (0..spec.layers.len() as u32).flat_map(of_layer).sum();
        memory::require(all as u64)?;
        let mut layers: Vec<[Option<Vec<u8>>; 2]> = vec![[None, None]; spec.layers.len()];
        for _ in 0..header.sections {
            let section = read_section(source, expected)?;
            let half = match section.kind {
                SectionKind::Keys | SectionKind::DeltaState => 0,
                _ => 1,
            };
            let slot = &mut layers[section.layer as usize][half];
            if slot.replace(section.bytes).is_some() {
                let detail = format!("layer {} has a section twice", section.layer);
                return Err(refuse(detail));
            }
        }
        let layers = layers.into_iter().zip(&spec.layers).enumerate();
        let layers = layers.map(|(i, (halves, layer))| {
            let [Some(first), Some(second)] = halves else {
                return Err(refuse(format!("layer {i} lacks a section")));
            };
            Ok(match layer.mixer {
                Mixer::Attention(_) => SavedLayer::Attention {
                    keys: first,
                    values: second,
                },
                Mixer::GatedDelta(_) => SavedLayer::Delta {
                    state: from_bytes(&first),
                    window: from_bytes(&second),
                },
            })
        });
        Ok(Snapshot {
            position,
            layers: layers.collect::<Result<_, _>>()?,
        })
    }
}

fn owner(info: &RunnerInfo) -> Owner {
    Owner {
        model: info.model,
        kv: info.kv,
        draft: None,
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
