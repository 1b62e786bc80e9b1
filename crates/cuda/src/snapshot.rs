//! Saved committed states: copies of a slot's arrays as they lie on the card, and their way to the
//! device-neutral bytes and back.
//!
//! A snapshot holds, in the order of [`pieces`], whole pages of keys and values up to the saved position, the
//! delta states, the windows, and the pages of the draft's rings that are in use. Restoring copies the pieces
//! back, so it is identity bit for bit.

use std::io::{Read, Write};
use std::ops::Range;

use contract::snapshot::{
    Header, Owner, SectionKind, read_header, read_section, write_header, write_section,
};
use contract::{DeviceError, KvFormat, ModelSpec};

use crate::driver::{Buffer, Gpu};
use crate::state::{DeltaGroup, KvGroup, PAGE, Place, Ring, Rows, State};

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

/// Cached rows of one layer of one slot, and which of them a snapshot speaks of.
struct Span<'a> {
    group: &'a KvGroup,
    /// The layer within the group.
    index: usize,
    /// Pages of a slot; positions begin again on the first.
    pages: usize,
    positions: Range<usize>,
}

impl<'a> Span<'a> {
    fn of_layer(state: &State, (group, index): (&'a KvGroup, usize), position: usize) -> Span<'a> {
        Span {
            group,
            index,
            pages: state.slots.pages,
            positions: 0..position,
        }
    }

    fn of_ring(ring: &'a Ring, position: usize) -> Span<'a> {
        Span {
            group: &ring.rows,
            index: 0,
            pages: ring.pages,
            positions: position.saturating_sub(ring.window)..position,
        }
    }

    /// Pages in use, counted from the slot's first.
    fn used(&self) -> usize {
        self.positions.end.div_ceil(PAGE).min(self.pages)
    }

    fn rows(&self) -> usize {
        self.used() * self.group.page_rows()
    }

    /// The pages in use of each array that exists.
    fn pieces(&self, slot: usize) -> impl Iterator<Item = Piece> {
        arrays(self.group).map(move |(base, row_bytes)| {
            let page_bytes = self.group.page_rows() * row_bytes;
            let layer = self.index * self.group.layer_bytes(row_bytes);
            Piece {
                address: base + (layer + slot * self.pages * page_bytes) as u64,
                bytes: self.used() * page_bytes,
            }
        })
    }

    /// Bytes of the neutral rows of an array.
    fn neutral_bytes(&self, array: &Rows) -> usize {
        let row = array.format.bytes(self.group.head_dim);
        self.positions.len() * self.group.n_kv_heads * row
    }
}

/// The spans of the draft's layers, bottom to top.
fn rings(state: &State, position: usize) -> Vec<Span<'_>> {
    let rings = state.draft.iter().flat_map(|draft| &draft.rings);
    rings.map(|ring| Span::of_ring(ring, position)).collect()
}

/// The pieces of a slot with `position` committed tokens: per layer, bottom to top, its arrays in the order
/// key values, key scales, value values, value scales, or state, window; then the draft's layers alike.
pub(crate) fn pieces(state: &State, n_layers: usize, slot: usize, position: usize) -> Vec<Piece> {
    let mut all = Vec::new();
    for layer in 0..n_layers {
        match state.layer(layer) {
            Place::Kv(group, index) => {
                all.extend(Span::of_layer(state, (group, index), position).pieces(slot));
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
    for ring in rings(state, position) {
        all.extend(ring.pieces(slot));
    }
    all
}

/// `(base, bytes of a row)` of the arrays of a group that exist.
fn arrays(group: &KvGroup) -> impl Iterator<Item = (u64, usize)> + use<> {
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

    /// Copies the pieces to host memory; `read` gives the bytes of an address.
    pub(crate) fn on_host(
        pieces: &[Piece],
        position: usize,
        read: impl Fn(u64, usize) -> Result<Vec<u8>, DeviceError>,
    ) -> Result<Snapshot, DeviceError> {
        let mut bytes = Vec::with_capacity(pieces.iter().map(|piece| piece.bytes).sum());
        for piece in pieces {
            bytes.append(&mut read(piece.address, piece.bytes)?);
        }
        Ok(Snapshot {
            position,
            held: Held::Host(bytes),
        })
    }

    /// Copies the pieces back; does not wait for copies within the card. `write` puts bytes at an address.
    pub(crate) fn restore(
        &self,
        gpu: &Gpu,
        pieces: &[Piece],
        mut write: impl FnMut(u64, &[u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        match &self.held {
            Held::Device(buffer) => {
                let mut at = buffer.ptr();
                for piece in pieces {
                    gpu.copy_bytes(piece.address, at, piece.bytes)?;
                    at += piece.bytes as u64;
                }
            }
            Held::Host(bytes) => {
                let mut held = Cut(bytes);
                for piece in pieces {
                    write(piece.address, held.take(piece.bytes))?;
                }
            }
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
        let rings = rings(state, self.position);
        write_header(
            sink,
            &Header {
                owner,
                position: self.position as u64,
                sections: number(2 * (n_layers + rings.len())),
            },
        )?;
        let bytes = self.bytes_on_host(gpu)?;
        let mut held = Cut(&bytes);
        for layer in 0..n_layers {
            match state.layer(layer) {
                Place::Kv(group, index) => {
                    let span = Span::of_layer(state, (group, index), self.position);
                    let [k, v] = held.rows(&span);
                    write_section(sink, SectionKind::Keys, number(layer), &k)?;
                    write_section(sink, SectionKind::Values, number(layer), &v)?;
                }
                Place::Delta(group, _) => {
                    let states = neutral_states(group, held.take(group.state_bytes));
                    write_section(sink, SectionKind::DeltaState, number(layer), &states)?;
                    let window = held.take(group.window_bytes);
                    write_section(sink, SectionKind::ConvWindow, number(layer), window)?;
                }
            }
        }
        for (layer, span) in rings.iter().enumerate() {
            let [k, v] = held.rows(span);
            write_section(sink, SectionKind::DraftKeys, number(layer), &k)?;
            write_section(sink, SectionKind::DraftValues, number(layer), &v)?;
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
        let rings = rings(state, position);
        let n_sections = 2 * (n_layers + rings.len());
        if header.sections as usize != n_sections {
            return Err(refuse(format!(
                "{} sections, {n_sections} expected",
                header.sections
            )));
        }
        let expected = |kind: SectionKind, layer: u32| {
            let layer = usize::try_from(layer).ok()?;
            match kind {
                SectionKind::DraftKeys => {
                    let ring = rings.get(layer)?;
                    return Some(ring.neutral_bytes(&ring.group.k));
                }
                SectionKind::DraftValues => {
                    let ring = rings.get(layer)?;
                    return Some(ring.neutral_bytes(&ring.group.v));
                }
                _ if layer >= n_layers => return None,
                _ => {}
            }
            let span = |group, index| Span::of_layer(state, (group, index), position);
            match (state.layer(layer), kind) {
                (Place::Kv(g, i), SectionKind::Keys) => Some(span(g, i).neutral_bytes(&g.k)),
                (Place::Kv(g, i), SectionKind::Values) => Some(span(g, i).neutral_bytes(&g.v)),
                (Place::Delta(group, _), SectionKind::DeltaState) => Some(group.state_bytes),
                (Place::Delta(group, _), SectionKind::ConvWindow) => Some(group.window_bytes),
                _ => None,
            }
        };
        let mut halves: Vec<[Option<Vec<u8>>; 2]> = vec![[None, None]; n_layers + rings.len()];
        for _ in 0..header.sections {
            let section = read_section(source, expected)?;
            let (first, half) = match section.kind {
                SectionKind::Keys | SectionKind::DeltaState => (0, 0),
                SectionKind::Values | SectionKind::ConvWindow => (0, 1),
                SectionKind::DraftKeys => (n_layers, 0),
                SectionKind::DraftValues => (n_layers, 1),
            };
            let slot = &mut halves[first + section.layer as usize][half];
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
            let ring = layer.checked_sub(n_layers).map(|ring| &rings[ring]);
            let span = match ring {
                Some(ring) => ring,
                None => match state.layer(layer) {
                    Place::Kv(group, index) => &Span::of_layer(state, (group, index), position),
                    Place::Delta(group, _) => {
                        bytes.extend_from_slice(&device_states(group, &first));
                        bytes.extend_from_slice(&second);
                        continue;
                    }
                },
            };
            device_rows(span, &span.group.k, &first, &mut bytes);
            device_rows(span, &span.group.v, &second, &mut bytes);
        }
        Ok(Snapshot {
            position,
            held: Held::Host(bytes),
        })
    }
}

/// A count of a header.
fn number(n: usize) -> u32 {
    u32::try_from(n).expect("layers are far below 2^31")
}

/// The pieces of a snapshot that were not read yet.
struct Cut<'a>(&'a [u8]);

impl<'a> Cut<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (piece, rest) = self.0.split_at(n);
        self.0 = rest;
        piece
    }

    /// The neutral keys and values of a span.
    fn rows(&mut self, span: &Span<'_>) -> [Vec<u8>; 2] {
        [&span.group.k, &span.group.v].map(|array| {
            let values = self.take(span.rows() * array.value_bytes);
            let scales = self.take(span.rows() * array.scale_bytes);
            neutral_rows(span, array, values, scales)
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

impl Span<'_> {
    /// The row of `(position, head)` in an array of whole pages.
    fn row(&self, position: usize, head: usize) -> usize {
        let page = position / PAGE % self.pages;
        (page * self.group.n_kv_heads + head) * PAGE + position % PAGE
    }

    /// The rows it speaks of, in the order of the neutral layout.
    fn each_row(&self) -> impl Iterator<Item = usize> {
        let heads = self.group.n_kv_heads;
        let positions = self.positions.clone();
        positions.flat_map(move |position| (0..heads).map(move |head| self.row(position, head)))
    }
}

/// From pages to `[position, n_kv_heads, row]` with scales inside the rows.
fn neutral_rows(span: &Span<'_>, array: &Rows, values: &[u8], scales: &[u8]) -> Vec<u8> {
    let block = block_bytes(array);
    let mut out = Vec::with_capacity(span.neutral_bytes(array));
    for row in span.each_row() {
        let values = &values[row * array.value_bytes..][..array.value_bytes];
        let scales = &scales[row * array.scale_bytes..][..array.scale_bytes];
        for (i, values) in values.chunks_exact(block).enumerate() {
            if array.scale_bytes > 0 {
                out.extend_from_slice(&scales[2 * i..2 * i + 2]);
            }
            out.extend_from_slice(values);
        }
    }
    out
}

/// The committed rows of one array of a layer's slot, as the neutral layout has them; `read` gives the bytes of
/// an address.
#[cfg(feature = "inspect")]
pub(crate) fn stored_rows(
    state: &State,
    layer: (&KvGroup, usize),
    array: &Rows,
    (slot, position): (usize, usize),
    read: impl Fn(u64, usize) -> Result<Vec<u8>, DeviceError>,
) -> Result<Vec<u8>, DeviceError> {
    let span = Span::of_layer(state, layer, position);
    let page = |row_bytes: usize| span.group.page_rows() * row_bytes;
    let bytes = |base: u64, row_bytes: usize| {
        let layer = span.index * span.group.layer_bytes(row_bytes);
        let first = layer + slot * span.pages * page(row_bytes);
        read(base + first as u64, span.used() * page(row_bytes))
    };
    let values = bytes(array.values, array.value_bytes)?;
    let scales = match array.scale_bytes {
        0 => Vec::new(),
        row_bytes => bytes(array.scales, row_bytes)?,
    };
    Ok(neutral_rows(&span, array, &values, &scales))
}

/// From `[position, n_kv_heads, row]` to whole pages, values then scales, appended to `out`.
fn device_rows(span: &Span<'_>, array: &Rows, neutral: &[u8], out: &mut Vec<u8>) {
    let rows = span.rows();
    let start = out.len();
    out.resize(start + rows * (array.value_bytes + array.scale_bytes), 0);
    let (values, scales) = out[start..].split_at_mut(rows * array.value_bytes);
    let block = block_bytes(array);
    let scale = if array.scale_bytes > 0 { 2 } else { 0 };
    let mut stored = neutral.chunks_exact(block + scale);
    for row in span.each_row() {
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
            // A layer from its beginning, and a ring that has begun again on its first page.
            for positions in [0..PAGE + 7, PAGE + 9..2 * PAGE + 5] {
                let span = Span {
                    group: &group,
                    index: 0,
                    pages: 2,
                    positions,
                };
                let bytes = span.neutral_bytes(&array);
                let neutral: Vec<u8> = (0..bytes).map(|i| (i * 37 % 251) as u8).collect();
                let mut pages = Vec::new();
                device_rows(&span, &array, &neutral, &mut pages);
                let (values, scales) = pages.split_at(span.rows() * array.value_bytes);
                let again = neutral_rows(&span, &array, values, scales);
                assert!(again == neutral, "{}", format.name());
            }
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
