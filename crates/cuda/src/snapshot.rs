//! Saved committed states: copies of a slot's arrays as they lie on the card, and their way to the
//! device-neutral bytes and back.
//!
//! A snapshot holds, in the order of [`pieces`], whole pages of keys and values up to the saved position, the
//! delta states and the windows. Restoring copies the pieces back, so it is identity bit for bit.

use std::io::{Read, Write};

use contract::snapshot::{
    Header, Owner, SectionKind, read_header, read_section, write_header, write_section,
};
use contract::{DeviceError, KvFormat, ModelSpec};

use crate::driver::{Buffer, Gpu};
use crate::state::{DeltaGroup, KvGroup, PAGE, Place, Rows, State};

/// Values per scale of a block format.
const BLOCK: usize = 32;

/// The committed state of a sequence at one position. Owned by the runner until it is freed.
pub(crate) struct Snapshot {
    pub(crate) position: usize,
    held: Held,
}

/// Where the pieces are, one after another without gaps.
enum Held {
    Device(Buffer<u8>),
    Host(Vec<u8>),
}

/// A run of bytes on the card that belongs to one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

/// The pieces of a slot with `position` committed tokens: per layer, bottom to top, its arrays in the order
/// key values, key scales, value values, value scales, or state, window.
pub(crate) fn pieces(state: &State, n_layers: usize, slot: usize, position: usize) -> Vec<Piece> {
    let mut all = Vec::new();
    for layer in 0..n_layers {
        match state.layer(layer) {
            Place::Kv(group, index) => {
                let pages = position.div_ceil(PAGE);
                for (base, row_bytes) in arrays(group) {
                    let page_bytes = group.page_rows() * row_bytes;
                    let first = index * group.layer_bytes(row_bytes)
                        + slot * state.slots.pages * page_bytes;
                    all.push(Piece {
                        address: base + first as u64,
                        bytes: pages * page_bytes,
                    });
                }
            }
            Place::Delta(group, index) => {
                for (base, bytes) in [
                    (group.states, group.state_bytes),
                    (group.windows, group.window_bytes),
                ] {
                    let first = slot * group.slot_bytes(bytes) + index * bytes;
                    all.push(Piece {
                        address: base + first as u64,
                        bytes,
                    });
                }
            }
        }
    }
    all
}

/// `(base, bytes of a row)` of the arrays of a group that exist.
fn arrays(group: &KvGroup) -> impl Iterator<Item = (u64, usize)> {
    let of = |rows: &Rows| {
        [
            (rows.values, rows.value_bytes),
            (rows.scales, rows.scale_bytes),
        ]
    };
    let all = of(&group.k).into_iter().chain(of(&group.v));
    all.filter(|(_, bytes)| *bytes > 0)
}

impl Snapshot {
    /// Copies the pieces within the card; does not wait.
    pub(crate) fn on_device(
        gpu: &Gpu,
        pieces: &[Piece],
        position: usize,
    ) -> Result<Snapshot, DeviceError> {
        let total = pieces.iter().map(|piece| piece.bytes).sum();
        let buffer = gpu.alloc::<u8>(total)?;
        let mut at = buffer.ptr();
        for piece in pieces {
            gpu.copy_bytes(at, piece.address, piece.bytes)?;
            at += piece.bytes as u64;
        }
        Ok(Snapshot {
            position,
            held: Held::Device(buffer),
        })
    }

    /// Copies the pieces to host memory and waits.
    pub(crate) fn on_host(
        gpu: &Gpu,
        pieces: &[Piece],
        position: usize,
    ) -> Result<Snapshot, DeviceError> {
        let saved = Snapshot::on_device(gpu, pieces, position)?;
        Ok(Snapshot {
            position,
            held: Held::Host(saved.bytes_on_host(gpu)?),
        })
    }

    /// Copies the pieces back; does not wait for copies within the card.
    pub(crate) fn restore(&self, gpu: &Gpu, pieces: &[Piece]) -> Result<(), DeviceError> {
        let staged;
        let mut at = match &self.held {
            Held::Device(buffer) => buffer.ptr(),
            Held::Host(bytes) => {
                staged = gpu.upload(bytes)?;
                staged.ptr()
            }
        };
        for piece in pieces {
            gpu.copy_bytes(piece.address, at, piece.bytes)?;
            at += piece.bytes as u64;
        }
        Ok(())
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.held {
            Held::Device(buffer) => buffer.bytes() as u64,
            Held::Host(bytes) => bytes.len() as u64,
        }
    }

    fn bytes_on_host(&self, gpu: &Gpu) -> Result<Vec<u8>, DeviceError> {
        match &self.held {
            Held::Device(buffer) => buffer.download(gpu),
            Held::Host(bytes) => Ok(bytes.clone()),
        }
    }

    /// Writes the snapshot in the device-neutral layout, two sections a layer.
    pub(crate) fn export(
        &self,
        gpu: &Gpu,
        owner: Owner,
        state: &State,
        spec: &ModelSpec,
        sink: &mut dyn Write,
    ) -> Result<(), DeviceError> {
        let n_layers = spec.layers.len();
        let sections = u32::try_from(2 * n_layers).expect("layers are far below 2^31");
        let position = self.position as u64;
        write_header(
            sink,
            &Header {
                owner,
                position,
                sections,
            },
        )?;
        let bytes = self.bytes_on_host(gpu)?;
        let mut rest = &bytes[..];
        let mut take = |n: usize| {
            let (piece, later) = rest.split_at(n);
            rest = later;
            piece
        };
        for layer in 0..n_layers {
            let number = u32::try_from(layer).expect("layers are far below 2^31");
            match state.layer(layer) {
                Place::Kv(group, _) => {
                    let rows = self.position.div_ceil(PAGE) * group.page_rows();
                    for (kind, array) in [
                        (SectionKind::Keys, &group.k),
                        (SectionKind::Values, &group.v),
                    ] {
                        let values = take(rows * array.value_bytes);
                        let scales = take(rows * array.scale_bytes);
                        let neutral = neutral_rows(group, array, self.position, values, scales);
                        write_section(sink, kind, number, &neutral)?;
                    }
                }
                Place::Delta(group, _) => {
                    let states = neutral_states(group, take(group.state_bytes));
                    write_section(sink, SectionKind::DeltaState, number, &states)?;
                    let window = take(group.window_bytes);
                    write_section(sink, SectionKind::ConvWindow, number, window)?;
                }
            }
        }
        Ok(())
    }

    /// Reads what [`Snapshot::export`] wrote, on this device or another, into host memory.
    pub(crate) fn import(
        owner: Owner,
        context: usize,
        state: &State,
        spec: &ModelSpec,
        source: &mut dyn Read,
    ) -> Result<Snapshot, DeviceError> {
        let refuse = |detail: String| DeviceError::SnapshotRefused { detail };
        let header = read_header(source, owner)?;
        let position = usize::try_from(header.position).unwrap_or(usize::MAX);
        if position > context {
            return Err(refuse(format!(
                "it stands at position {position}, the context is {context}"
            )));
        }
        let n_layers = spec.layers.len();
        if header.sections as usize != 2 * n_layers {
            return Err(refuse(format!(
                "{} sections, {} expected",
                header.sections,
                2 * n_layers
            )));
        }
        let expected = |kind: SectionKind, layer: u32| {
            let layer = usize::try_from(layer).ok().filter(|l| *l < n_layers)?;
            let row = |group: &KvGroup, array: &Rows| {
                position * group.n_kv_heads * array.format.bytes(group.head_dim)
            };
            match (state.layer(layer), kind) {
                (Place::Kv(group, _), SectionKind::Keys) => Some(row(group, &group.k)),
                (Place::Kv(group, _), SectionKind::Values) => Some(row(group, &group.v)),
                (Place::Delta(group, _), SectionKind::DeltaState) => Some(group.state_bytes),
                (Place::Delta(group, _), SectionKind::ConvWindow) => Some(group.window_bytes),
                _ => None,
            }
        };
        let mut halves: Vec<[Option<Vec<u8>>; 2]> = vec![[None, None]; n_layers];
        for _ in 0..header.sections {
            let section = read_section(source, expected)?;
            let half = match section.kind {
                SectionKind::Keys | SectionKind::DeltaState => 0,
                _ => 1,
            };
            let slot = &mut halves[section.layer as usize][half];
            if slot.replace(section.bytes).is_some() {
                let detail = format!("layer {} has a section twice", section.layer);
                return Err(refuse(detail));
            }
        }
        let mut bytes = Vec::new();
        for (layer, halves) in halves.into_iter().enumerate() {
            let [Some(first), Some(second)] = halves else {
                return Err(refuse(format!("layer {layer} lacks a section")));
            };
            match state.layer(layer) {
                Place::Kv(group, _) => {
                    device_rows(group, &group.k, position, &first, &mut bytes);
                    device_rows(group, &group.v, position, &second, &mut bytes);
                }
                Place::Delta(group, _) => {
                    bytes.extend_from_slice(&device_states(group, &first));
                    bytes.extend_from_slice(&second);
                }
            }
        }
        Ok(Snapshot {
            position,
            held: Held::Host(bytes),
        })
    }
}

/// Bytes of one block's values, without its scale; rows of formats without scales are one block.
fn block_bytes(array: &Rows) -> usize {
    match array.format {
        KvFormat::Q8_0 => BLOCK,
        KvFormat::Q4_0 => BLOCK / 2,
        _ => array.value_bytes,
    }
}

/// The row of `(position, head)` in an array of whole pages.
fn row_index(group: &KvGroup, position: usize, head: usize) -> usize {
    (position / PAGE * group.n_kv_heads + head) * PAGE + position % PAGE
}

/// From pages to `[position, n_kv_heads, row]` with scales inside the rows.
pub(crate) fn neutral_rows(
    group: &KvGroup,
    array: &Rows,
    positions: usize,
    values: &[u8],
    scales: &[u8],
) -> Vec<u8> {
    let block = block_bytes(array);
    let mut out =
        Vec::with_capacity(positions * group.n_kv_heads * (array.value_bytes + array.scale_bytes));
    for position in 0..positions {
        for head in 0..group.n_kv_heads {
            let row = row_index(group, position, head);
            let values = &values[row * array.value_bytes..][..array.value_bytes];
            let scales = &scales[row * array.scale_bytes..][..array.scale_bytes];
            for (i, values) in values.chunks_exact(block).enumerate() {
                if array.scale_bytes > 0 {
                    out.extend_from_slice(&scales[2 * i..2 * i + 2]);
                }
                out.extend_from_slice(values);
            }
        }
    }
    out
}

/// From `[position, n_kv_heads, row]` to whole pages, values then scales, appended to `out`.
fn device_rows(group: &KvGroup, array: &Rows, positions: usize, neutral: &[u8], out: &mut Vec<u8>) {
    let rows = positions.div_ceil(PAGE) * group.page_rows();
    let start = out.len();
    out.resize(start + rows * (array.value_bytes + array.scale_bytes), 0);
    let (values, scales) = out[start..].split_at_mut(rows * array.value_bytes);
    let block = block_bytes(array);
    let scale = if array.scale_bytes > 0 { 2 } else { 0 };
    let mut stored = neutral.chunks_exact(block + scale);
    for position in 0..positions {
        for head in 0..group.n_kv_heads {
            let row = row_index(group, position, head);
            let values = &mut values[row * array.value_bytes..][..array.value_bytes];
            let scales = &mut scales[row * array.scale_bytes..][..array.scale_bytes];
            for (i, values) in values.chunks_exact_mut(block).enumerate() {
                let stored = stored
                    .next()
                    .expect("a section has the length it was checked for");
                scales[scale * i..scale * (i + 1)].copy_from_slice(&stored[..scale]);
                values.copy_from_slice(&stored[scale..]);
            }
        }
    }
}

/// `[head][v][k]` as the kernels keep a state, to `[head][k][v]`.
pub(crate) fn neutral_states(group: &DeltaGroup, bytes: &[u8]) -> Vec<u8> {
    turned(bytes, group.spec.v_dim, group.spec.k_dim)
}

/// `[head][k][v]` to `[head][v][k]`.
fn device_states(group: &DeltaGroup, bytes: &[u8]) -> Vec<u8> {
    turned(bytes, group.spec.k_dim, group.spec.v_dim)
}

/// Transposes matrices `[rows][cols]` of 4-byte values that stand one after another.
fn turned(bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let mut out = vec![0; bytes.len()];
    let size = 4 * rows * cols;
    for (from, to) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(size)) {
        for (i, value) in from.chunks_exact(4).enumerate() {
            let at = 4 * ((i % cols) * rows + i / cols);
            to[at..at + 4].copy_from_slice(value);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_from_the_neutral_layout() {
        for format in [KvFormat::F16, KvFormat::Q8_0, KvFormat::Q4_0] {
            let array = Rows::new(format, 64);
            let group = KvGroup {
                n_kv_heads: 3,
                head_dim: 64,
                k: array,
                v: array,
                layers: vec![0],
                pages: 2,
            };
            let positions = PAGE + 7;
            let bytes = positions * 3 * format.bytes(64);
            let neutral: Vec<u8> = (0..bytes).map(|i| (i * 37 % 251) as u8).collect();
            let mut pages = Vec::new();
            device_rows(&group, &array, positions, &neutral, &mut pages);
            let (values, scales) = pages.split_at(2 * group.page_rows() * array.value_bytes);
            let again = neutral_rows(&group, &array, positions, values, scales);
            assert!(again == neutral, "{}", format.name());
        }
    }

    #[test]
    fn turning_twice_is_nothing() {
        let bytes: Vec<u8> = (0..2 * 4 * 6).collect();
        let once = turned(&bytes, 2, 3);
        assert_eq!(once[4..8], bytes[12..16]);
        assert_eq!(turned(&once, 3, 2), bytes);
    }
}
