//! Snapshots of shards as one: each section of a layer is cut by heads or channels and put together
//! again, so that the bytes do not depend on the split.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use crate::snapshot::{
    HEADER_BYTES, ReadAt, SECTION_BYTES, SectionKind, SequentialReader, read_section, write_section,
};
use crate::{DetachedSnapshot, DeviceError, LayerSpec, Mixer, ModelSpec, Shard};

/// Where the position and, at the header's end, the number of sections stand.
const POSITION_AT: usize = HEADER_BYTES - 12;
const COUNT_AT: usize = HEADER_BYTES - 4;

/// How the state of a model is cut over so many shards.
#[derive(Debug, Clone)]
pub(super) struct ShardedState {
    pub(super) model: Arc<ModelSpec>,
    pub(super) count: usize,
}

/// A section as rows of equal units, of which each shard has some.
struct Units {
    rows: usize,
    /// Of a row of the whole section.
    n: usize,
    /// Those of each shard.
    of_shards: Vec<Vec<Range<usize>>>,
}

/// The sections of a snapshot, behind its header.
struct SectionList {
    header: Vec<u8>,
    sections: Vec<(SectionKind, u32, Vec<u8>)>,
}

impl SectionList {
    /// Reads all sections; the devices check the header and their lengths.
    fn read(source: &dyn ReadAt) -> Result<SectionList, DeviceError> {
        let mut header = vec![0; HEADER_BYTES];
        let ends_early = |_| refuse("it ends too early".to_owned());
        source.read_at(&mut header, 0).map_err(ends_early)?;
        let count = u32_at(&header, COUNT_AT);
        let mut reader = SequentialReader::new(source);
        reader.skip(HEADER_BYTES);
        let mut sections = Vec::new();
        for _ in 0..count {
            // The length is not known here, only that it lies within the source.
            let mut length = [0; 8];
            let at = reader.at() + 8;
            source.read_at(&mut length, at).map_err(ends_early)?;
            let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
            let left = source.length().saturating_sub(reader.at());
            if length as u64 > left.saturating_sub(SECTION_BYTES as u64) {
                return Err(refuse("it ends too early".to_owned()));
            }
            let section = read_section(&mut reader, |_, _| Some(length))?;
            sections.push((section.kind, section.layer, section.bytes));
        }
        Ok(SectionList { header, sections })
    }

    fn position(&self) -> usize {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.header[POSITION_AT..POSITION_AT + 8]);
        usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
    }
}

impl ShardedState {
    /// How a section is cut; `None` for one that only the last shard has.
    fn units(&self, kind: SectionKind, layer: u32, position: usize) -> Option<Units> {
        let LayerSpec { mixer, .. } = self.model.layers.get(layer as usize)?;
        let shards = || Shard::all(self.count);
        match (kind, mixer) {
            (SectionKind::Keys | SectionKind::Values, Mixer::Attention(a)) => Some(Units {
                rows: position,
                n: a.n_kv_heads,
                of_shards: shards().map(|shard| vec![shard.kv_heads(a)]).collect(),
            }),
            (SectionKind::DeltaState, Mixer::GatedDelta(d)) => Some(Units {
                rows: 1,
                n: d.n_v_heads,
                of_shards: shards().map(|shard| shard.v_heads(d)).collect(),
            }),
            (SectionKind::ConvWindow, Mixer::GatedDelta(d)) => Some(Units {
                rows: d.conv_taps - 1,
                n: d.channels(),
                of_shards: shards().map(|shard| shard.channels(d)).collect(),
            }),
            _ => None,
        }
    }

    /// The snapshot of each shard, from that of the whole model.
    ///
    /// # Errors
    /// [`DeviceError::InvalidSnapshot`] for damaged sections. The shards check the rest.
    pub(super) fn cut(&self, source: &dyn ReadAt) -> Result<Vec<Vec<u8>>, DeviceError> {
        let whole = SectionList::read(source)?;
        let position = whole.position();
        let mut all = vec![(whole.header.clone(), 0_u32); self.count];
        let last = self.count - 1;
        for (kind, layer, bytes) in whole.sections {
            let Some(units) = self.units(kind, layer, position) else {
                write_section(&mut all[last].0, kind, layer, &bytes)?;
                all[last].1 += 1;
                continue;
            };
            for (shard, (out, count)) in all.iter_mut().enumerate() {
                let own = units.cut(shard, &bytes)?;
                write_section(out, kind, layer, &own)?;
                *count += 1;
            }
        }
        let with_count = all.into_iter().map(|(mut bytes, count)| {
            bytes[COUNT_AT..HEADER_BYTES].copy_from_slice(&count.to_le_bytes());
            bytes
        });
        Ok(with_count.collect())
    }

    /// Exports of all shards as one.
    pub(super) fn join(&self, shards: Vec<Box<dyn DetachedSnapshot>>) -> JoinedShards {
        JoinedShards {
            state: self.clone(),
            shards,
        }
    }
}

impl Units {
    /// Bytes of a unit of the whole section of `bytes` bytes.
    fn bytes(&self, bytes: usize) -> Result<usize, DeviceError> {
        let units = self.rows.saturating_mul(self.n);
        match units {
            0 if bytes == 0 => Ok(0),
            0 => Err(refuse("a section of no rows has bytes".to_owned())),
            _ if !bytes.is_multiple_of(units) => Err(refuse(format!(
                "a section of {bytes} bytes has {units} units"
            ))),
            _ => Ok(bytes / units),
        }
    }

    /// Where the runs of a shard are in the whole section, of units of `unit` bytes.
    fn runs(&self, shard: usize, unit: usize) -> impl Iterator<Item = Range<usize>> {
        let row = self.n * unit;
        // As many rows as a damaged header says have no bytes.
        let rows = if unit == 0 { 0 } else { self.rows };
        (0..rows).flat_map(move |at| {
            let runs = self.of_shards[shard].iter();
            runs.map(move |run| at * row + run.start * unit..at * row + run.end * unit)
        })
    }

    fn cut(&self, shard: usize, whole: &[u8]) -> Result<Vec<u8>, DeviceError> {
        let unit = self.bytes(whole.len())?;
        let mut own = Vec::with_capacity(whole.len() / self.of_shards.len());
        for run in self.runs(shard, unit) {
            own.extend_from_slice(&whole[run]);
        }
        Ok(own)
    }

    /// The whole section from those of the shards.
    fn join(&self, shards: &[Vec<u8>]) -> Result<Vec<u8>, DeviceError> {
        let bytes = shards.iter().map(Vec::len).sum();
        let unit = self.bytes(bytes)?;
        let mut whole = vec![0; bytes];
        for (shard, own) in shards.iter().enumerate() {
            let mut own = &own[..];
            for run in self.runs(shard, unit) {
                let Some((piece, rest)) = own.split_at_checked(run.len()) else {
                    return Err(refuse("the shards have sections of other sizes".to_owned()));
                };
                whole[run].copy_from_slice(piece);
                own = rest;
            }
        }
        Ok(whole)
    }
}

/// Exports of all shards as one. Writing it holds all of them in host memory.
pub(super) struct JoinedShards {
    state: ShardedState,
    shards: Vec<Box<dyn DetachedSnapshot>>,
}

impl DetachedSnapshot for JoinedShards {
    fn bytes(&self) -> u64 {
        let all: u64 = self.shards.iter().map(|shard| shard.bytes()).sum();
        // The last shard has a header of every section, the others only of those of layers.
        let sections = 2 * self.state.model.layers.len();
        let headers = HEADER_BYTES + sections * SECTION_BYTES;
        all.saturating_sub((self.shards.len().saturating_sub(1) * headers) as u64)
    }

    fn write(&mut self, sink: &mut dyn Write) -> Result<(), DeviceError> {
        let mut parts = Vec::with_capacity(self.shards.len());
        for shard in &mut self.shards {
            let mut bytes = Vec::new();
            shard.write(&mut bytes)?;
            parts.push(SectionList::read(&bytes)?);
        }
        let Some(last) = parts.pop() else {
            return Ok(());
        };
        sink.write_all(&last.header)?;
        let position = last.position();
        for (kind, layer, bytes) in last.sections {
            let Some(units) = self.state.units(kind, layer, position) else {
                write_section(sink, kind, layer, &bytes)?;
                continue;
            };
            let mut own = Vec::with_capacity(parts.len() + 1);
            for part in &mut parts {
                let mut sections = part.sections.iter_mut();
                let found = sections.find(|(k, l, _)| (*k, *l) == (kind, layer));
                let found = found
                    .ok_or_else(|| refuse(format!("a shard lacks {kind:?} of layer {layer}")))?;
                own.push(std::mem::take(&mut found.2));
            }
            own.push(bytes);
            write_section(sink, kind, layer, &units.join(&own)?)?;
        }
        Ok(())
    }
}

fn refuse(detail: String) -> DeviceError {
    DeviceError::InvalidSnapshot { detail }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}
