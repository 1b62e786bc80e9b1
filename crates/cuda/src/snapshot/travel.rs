//! The way of a snapshot to the device-neutral bytes and back.

use std::io::{Read, Write};

use contract::snapshot::{
    Header, Owner, SectionKind, read_header, read_section, write_header, write_section,
};
use contract::{DeviceError, ModelSpec};

use super::neutral::{
    append_neutral, device_states, neutral_bytes, neutral_states, put_neutral, runs,
};
use super::{CardMover, Copied, Left, Plane, Snapshot, What};
use crate::host::HostBlock;
use crate::pages::Pages;
use crate::state::{KvGroup, PAGE, Place, Ring, Rows, State};

/// A count of a header.
fn number(n: usize) -> u32 {
    u32::try_from(n).expect("layers are far below 2^31")
}

/// Which planes an array's values and scales are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Keys = 0,
    Values = 2,
}

impl Side {
    const BOTH: [Side; 2] = [Side::Keys, Side::Values];

    fn array(self, group: &KvGroup) -> &Rows {
        match self {
            Side::Keys => &group.k,
            Side::Values => &group.v,
        }
    }
}

/// Positions that a ring holds of `position` committed ones.
fn in_sight(ring: &Ring, position: usize) -> std::ops::Range<usize> {
    position.saturating_sub(ring.window)..position
}

fn rings(state: &State) -> &[Ring] {
    state.draft.as_ref().map_or(&[], |draft| &draft.rings)
}

/// The index of a group among the state's.
fn index_of<T>(groups: &[T], group: &T) -> usize {
    let same = |other: &T| std::ptr::eq(other, group);
    groups
        .iter()
        .position(same)
        .expect("a place names a group of its state")
}

/// The planes of one layer of the group's page in a block: values and scales.
fn cut<'a>(block: &'a [u8], planes: &[Plane; 4], side: Side, layer: usize) -> (&'a [u8], &'a [u8]) {
    let [values, scales] = [0, 1].map(|i| planes[side as usize + i].of(layer));
    (&block[values], &block[scales])
}

/// As [`cut`], to write.
fn cut_mut<'a>(
    block: &'a mut [u8],
    planes: &[Plane; 4],
    side: Side,
    layer: usize,
) -> (&'a mut [u8], &'a mut [u8]) {
    let [values, scales] = [0, 1].map(|i| planes[side as usize + i].of(layer));
    // All scales of an array stand behind all its values.
    let (front, back) = block.split_at_mut(scales.start);
    (&mut front[values], &mut back[..scales.len()])
}

impl Snapshot {
    /// Writes the snapshot in the device-neutral layout, two sections a layer.
    pub(crate) fn export(
        &self,
        mover: &CardMover<'_>,
        pages: &Pages<HostBlock>,
        (state, spec): (&State, &ModelSpec),
        owner: Owner,
        sink: &mut dyn Write,
    ) -> Result<(), DeviceError> {
        let CardMover { gpu, map, host } = *mover;
        // Copies of the pages that are on the card; the others are where they can be read.
        let mut copies = Vec::new();
        for id in &self.pages {
            copies.push(match pages.find(*id) {
                Ok(place) => {
                    let block = host.take(map.bytes)?;
                    mover.fill(&block, place)?;
                    Some(block)
                }
                Err(_) => None,
            });
        }
        gpu.sync()?;
        let on_host = copies.iter().zip(&self.pages).map(|(copy, id)| {
            let held = copy.as_ref().or_else(|| pages.find(*id).err());
            held.expect("a page that is not on the card is on the host")
                .bytes()
        });
        let blocks: Vec<&[u8]> = on_host.collect();
        let downloaded;
        let left = match &self.left {
            Copied::Host(block) => block.bytes(),
            Copied::Card(buffer) => {
                downloaded = buffer.download(gpu)?;
                &downloaded
            }
        };
        self.write(&blocks, left, (mover, state, spec), owner, sink)
    }

    /// Writes what `blocks` and `left` hold.
    fn write(
        &self,
        blocks: &[&[u8]],
        left: &[u8],
        (mover, state, spec): (&CardMover<'_>, &State, &ModelSpec),
        owner: Owner,
        sink: &mut dyn Write,
    ) -> Result<(), DeviceError> {
        let (n_layers, n_rings) = (spec.layers.len(), rings(state).len());
        let header = Header {
            owner,
            position: self.position as u64,
            sections: number(2 * (n_layers + n_rings)),
        };
        write_header(sink, &header)?;
        let parts = Left::new(state, self.position);
        for layer in 0..n_layers {
            match state.layer(layer) {
                Place::Kv(group, index) => {
                    let planes = &mover.map.groups[index_of(&state.kv, group)];
                    for side in Side::BOTH {
                        let array = side.array(group);
                        let bytes = neutral_bytes(group, array, self.position);
                        let mut rows = Vec::with_capacity(bytes);
                        for (page, within) in runs(0..self.position, usize::MAX) {
                            let planes = cut(blocks[page], planes, side, index);
                            append_neutral((group, array), within, planes, &mut rows);
                        }
                        let kind = match side {
                            Side::Keys => SectionKind::Keys,
                            Side::Values => SectionKind::Values,
                        };
                        write_section(sink, kind, number(layer), &rows)?;
                    }
                }
                Place::Delta(group, index) => {
                    let i = index_of(&state.delta, group);
                    let states = &left[parts.range(What::States(i))];
                    let states = &states[index * group.state_bytes..][..group.state_bytes];
                    let states = neutral_states(group, states);
                    write_section(sink, SectionKind::DeltaState, number(layer), &states)?;
                    let windows = &left[parts.range(What::Windows(i))];
                    let window = &windows[index * group.window_bytes..][..group.window_bytes];
                    write_section(sink, SectionKind::ConvWindow, number(layer), window)?;
                }
            }
        }
        for (layer, ring) in rings(state).iter().enumerate() {
            for side in Side::BOTH {
                let (group, array) = (&ring.rows, side.array(&ring.rows));
                let [values, scales] =
                    [0, 1].map(|i| &left[parts.range(What::Ring(layer, side as usize + i))]);
                let mut rows = Vec::new();
                for (page, within) in runs(in_sight(ring, self.position), ring.pages) {
                    let page_of = |plane, row_bytes| {
                        let bytes = group.page_rows() * row_bytes;
                        let plane: &[u8] = plane;
                        &plane[page * bytes..][..bytes]
                    };
                    let values = page_of(values, array.value_bytes);
                    let scales = page_of(scales, array.scale_bytes);
                    append_neutral((group, array), within, (values, scales), &mut rows);
                }
                let kind = match side {
                    Side::Keys => SectionKind::DraftKeys,
                    Side::Values => SectionKind::DraftValues,
                };
                write_section(sink, kind, number(layer), &rows)?;
            }
        }
        Ok(())
    }

    /// Reads what [`Snapshot::export`] wrote, on this device or another, into host memory; its pages are adopted.
    pub(crate) fn import(
        mover: &CardMover<'_>,
        pages: &mut Pages<HostBlock>,
        (state, spec): (&State, &ModelSpec),
        (owner, context): (Owner, usize),
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
        let (n_layers, rings) = (spec.layers.len(), rings(state));
        let n_sections = 2 * (n_layers + rings.len());
        if header.sections as usize != n_sections {
            return Err(refuse(format!(
                "{} sections, {n_sections} expected",
                header.sections
            )));
        }
        let CardMover { gpu, map, host } = *mover;
        let parts = Left::new(state, position);
        let mut left = host.take(parts.bytes)?;
        let blocks = (0..position.div_ceil(PAGE)).map(|_| host.take(map.bytes));
        let mut blocks = blocks.collect::<Result<Vec<HostBlock>, DeviceError>>()?;
        // What their last owners queued.
        gpu.sync()?;
        if !position.is_multiple_of(PAGE)
            && let Some(last) = blocks.last_mut()
        {
            last.bytes_mut().fill(0);
        }
        left.bytes_mut().fill(0);
        let mut seen = vec![[false; 2]; n_layers + rings.len()];
        for _ in 0..header.sections {
            let expected = |kind, layer| expected_bytes((state, n_layers), position, kind, layer);
            let section = read_section(source, expected)?;
            let layer = section.layer as usize;
            let (place, side) = match section.kind {
                SectionKind::Keys | SectionKind::DeltaState => (layer, Side::Keys),
                SectionKind::Values | SectionKind::ConvWindow => (layer, Side::Values),
                SectionKind::DraftKeys => (n_layers + layer, Side::Keys),
                SectionKind::DraftValues => (n_layers + layer, Side::Values),
            };
            let half = usize::from(side == Side::Values);
            if std::mem::replace(&mut seen[place][half], true) {
                return Err(refuse(format!("layer {layer} has a section twice")));
            }
            let bytes = &section.bytes[..];
            if place >= n_layers {
                let ring = &rings[layer];
                put_ring(
                    (ring, side, layer),
                    position,
                    bytes,
                    (&parts, left.bytes_mut()),
                );
                continue;
            }
            match state.layer(layer) {
                Place::Kv(group, index) => {
                    let planes = &map.groups[index_of(&state.kv, group)];
                    let array = side.array(group);
                    let mut rest = bytes;
                    for (page, within) in runs(0..position, usize::MAX) {
                        let n = neutral_bytes(group, array, within.len());
                        let (rows, behind) = rest.split_at(n);
                        let planes = cut_mut(blocks[page].bytes_mut(), planes, side, index);
                        put_neutral((group, array), within, rows, planes);
                        rest = behind;
                    }
                }
                Place::Delta(group, index) => {
                    let i = index_of(&state.delta, group);
                    let (what, turned) = match side {
                        Side::Keys => (What::States(i), device_states(group, bytes)),
                        Side::Values => (What::Windows(i), bytes.to_vec()),
                    };
                    let all = &mut left.bytes_mut()[parts.range(what)];
                    all[index * turned.len()..][..turned.len()].copy_from_slice(&turned);
                }
            }
        }
        if let Some(layer) = seen.iter().position(|halves| *halves != [true; 2]) {
            return Err(refuse(format!("layer {layer} lacks a section")));
        }
        Ok(Snapshot {
            position,
            pages: blocks.into_iter().map(|block| pages.adopt(block)).collect(),
            left: Copied::Host(left),
        })
    }
}

/// Puts a ring's neutral rows where the ring has them.
fn put_ring(
    (ring, side, layer): (&Ring, Side, usize),
    position: usize,
    neutral: &[u8],
    (parts, left): (&Left, &mut [u8]),
) {
    let (group, array) = (&ring.rows, side.array(&ring.rows));
    let [values, scales] = [0, 1].map(|i| parts.range(What::Ring(layer, side as usize + i)));
    let (front, back) = left.split_at_mut(scales.start);
    let (values, scales) = (&mut front[values], &mut back[..scales.len()]);
    let mut rest = neutral;
    for (page, within) in runs(in_sight(ring, position), ring.pages) {
        let n = neutral_bytes(group, array, within.len());
        let (rows, behind) = rest.split_at(n);
        let page_bytes = [array.value_bytes, array.scale_bytes].map(|n| n * group.page_rows());
        let planes = (
            &mut values[page * page_bytes[0]..][..page_bytes[0]],
            &mut scales[page * page_bytes[1]..][..page_bytes[1]],
        );
        put_neutral((group, array), within, rows, planes);
        rest = behind;
    }
}

/// The length a section must have; `None` where there is none of its kind.
fn expected_bytes(
    (state, n_layers): (&State, usize),
    position: usize,
    kind: SectionKind,
    layer: u32,
) -> Option<usize> {
    let layer = usize::try_from(layer).ok()?;
    let of_ring = |side: Side| {
        let ring = rings(state).get(layer)?;
        let n = in_sight(ring, position).len();
        Some(neutral_bytes(&ring.rows, side.array(&ring.rows), n))
    };
    match kind {
        SectionKind::DraftKeys => return of_ring(Side::Keys),
        SectionKind::DraftValues => return of_ring(Side::Values),
        _ if layer >= n_layers => return None,
        _ => {}
    }
    match (state.layer(layer), kind) {
        (Place::Kv(group, _), SectionKind::Keys) => Some(neutral_bytes(group, &group.k, position)),
        (Place::Kv(group, _), SectionKind::Values) => {
            Some(neutral_bytes(group, &group.v, position))
        }
        (Place::Delta(group, _), SectionKind::DeltaState) => Some(group.state_bytes),
        (Place::Delta(group, _), SectionKind::ConvWindow) => Some(group.window_bytes),
        _ => None,
    }
}
