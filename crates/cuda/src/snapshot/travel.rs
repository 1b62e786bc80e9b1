//! The way of a snapshot from the device-neutral bytes to the card.

use std::io::Read;
use std::sync::Arc;

use contract::snapshot::{Owner, SectionKind, read_header, read_section_into};
use contract::{DeviceError, ModelSpec};

use super::neutral::{device_states, neutral_bytes, put_neutral, runs, threads};
use super::{CardMover, Copied, Left, Snapshot, What};
use crate::host::HostBlock;
use crate::pages::Pages;
use crate::state::{KvGroup, PAGE, Place, Ring, Rows, State};

/// Pages that are turned and brought to the card at once.
pub(super) const STAGED: usize = 64;

/// Which planes an array's values and scales are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Keys = 0,
    Values = 2,
}

impl Side {
    pub(super) fn array(self, group: &KvGroup) -> &Rows {
        match self {
            Side::Keys => &group.k,
            Side::Values => &group.v,
        }
    }
}

/// Positions that a ring holds of `position` committed ones.
pub(super) fn in_sight(ring: &Ring, position: usize) -> std::ops::Range<usize> {
    position.saturating_sub(ring.window)..position
}

pub(super) fn rings(state: &State) -> &[Ring] {
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

impl Snapshot {
    /// Reads what a [`CardParcel`](super::CardParcel) wrote, on this device or another; its pages are adopted, on the
    /// card as far as there are places that hold nothing.
    pub(crate) fn import(
        mover: &CardMover<'_>,
        pages: &mut Pages<HostBlock>,
        of: (&State, &ModelSpec),
        (owner, context): (Owner, usize),
        source: &mut dyn Read,
    ) -> Result<Snapshot, DeviceError> {
        let header = read_header(source, owner)?;
        let position = usize::try_from(header.position).unwrap_or(usize::MAX);
        if position > context {
            return Err(refused(format!(
                "it stands at position {position}, the context is {context}"
            )));
        }
        let mut targets = Vec::new();
        let mut adopted = Vec::new();
        for _ in 0..position.div_ceil(PAGE) {
            targets.push(match pages.adopt_place() {
                Some((id, place)) => {
                    adopted.push(id);
                    Target::Card(place)
                }
                None => match mover.host.take(mover.map.bytes) {
                    Ok(block) => Target::Host(block),
                    Err(error) => {
                        pages.drop_kept(adopted);
                        return Err(error);
                    }
                },
            });
        }
        let read = Arrival {
            mover,
            of,
            position,
            targets: &mut targets,
        }
        .read(header.sections, source);
        let left = match read {
            Ok(left) => left,
            Err(error) => {
                pages.drop_kept(adopted);
                return Err(error);
            }
        };
        let mut on_card = adopted.into_iter();
        let of_target = |target| match target {
            Target::Card(_) => on_card.next().expect("each place came with a name"),
            Target::Host(block) => pages.adopt(block),
        };
        Ok(Snapshot {
            position,
            pages: targets.into_iter().map(of_target).collect(),
            left: Arc::new(Copied::Host(left)),
        })
    }
}

fn refused(detail: String) -> DeviceError {
    DeviceError::SnapshotRefused { detail }
}

/// Where an imported page goes.
enum Target {
    Card(usize),
    Host(HostBlock),
}

/// A snapshot on its way in.
struct Arrival<'a> {
    mover: &'a CardMover<'a>,
    of: (&'a State, &'a ModelSpec),
    position: usize,
    targets: &'a mut [Target],
}

impl Arrival<'_> {
    /// Reads all sections into their places, and gives what is no page.
    fn read(mut self, n_sections: u32, source: &mut dyn Read) -> Result<HostBlock, DeviceError> {
        let (state, spec) = self.of;
        let (n_layers, rings) = (spec.layers.len(), rings(state));
        let wanted = 2 * (n_layers + rings.len());
        if n_sections as usize != wanted {
            return Err(refused(format!("{n_sections} sections, {wanted} expected")));
        }
        let CardMover { gpu, map, host } = *self.mover;
        let parts = Left::new(state, self.position);
        let mut left = host.take(parts.bytes)?;
        let mut stage = host.take(STAGED * map.widest())?;
        // What their last owners queued.
        gpu.sync()?;
        for part in &parts.parts {
            if let What::Ring(..) = part.what {
                left.bytes_mut()[part.at..part.at + part.bytes].fill(0);
            }
        }
        let position = self.position;
        let expected = |kind, layer| expected_bytes((state, n_layers), position, kind, layer);
        let (mut bytes, mut other) = (Vec::new(), Vec::new());
        // A section that was read while the one before it was brought to the card.
        let mut ahead = None;
        let mut seen = vec![[false; 2]; n_layers + rings.len()];
        for i in 0..n_sections {
            let (kind, layer) = match ahead.take() {
                Some(read) => {
                    std::mem::swap(&mut bytes, &mut other);
                    read?
                }
                None => read_section_into(source, expected, &mut bytes)?,
            };
            let layer = layer as usize;
            let (place, side) = match kind {
                SectionKind::Keys | SectionKind::DeltaState => (layer, Side::Keys),
                SectionKind::Values | SectionKind::ConvWindow => (layer, Side::Values),
                SectionKind::DraftKeys => (n_layers + layer, Side::Keys),
                SectionKind::DraftValues => (n_layers + layer, Side::Values),
            };
            let half = usize::from(side == Side::Values);
            if std::mem::replace(&mut seen[place][half], true) {
                return Err(refused(format!("layer {layer} has a section twice")));
            }
            if place >= n_layers {
                let to = (&parts, left.bytes_mut());
                put_ring((&rings[layer], side, layer), self.position, &bytes, to);
                continue;
            }
            match state.layer(layer) {
                Place::Kv(group, index) => {
                    let group = (index_of(&state.kv, group), group);
                    let more = i + 1 < n_sections;
                    let mut meanwhile = || {
                        if more && ahead.is_none() {
                            ahead = Some(read_section_into(source, expected, &mut other));
                        }
                    };
                    let to = (side, index);
                    self.put_rows((group, to), &bytes, &mut stage, &mut meanwhile)?;
                }
                Place::Delta(group, index) => {
                    let i = index_of(&state.delta, group);
                    let (what, turned) = match side {
                        Side::Keys => (What::States(i), device_states(group, &bytes)),
                        Side::Values => (What::Windows(i), bytes.clone()),
                    };
                    let all = &mut left.bytes_mut()[parts.range(what)];
                    all[index * turned.len()..][..turned.len()].copy_from_slice(&turned);
                }
            }
        }
        if let Some(layer) = seen.iter().position(|halves| *halves != [true; 2]) {
            return Err(refused(format!("layer {layer} lacks a section")));
        }
        Ok(left)
    }

    /// Puts the neutral rows of one array of one layer into the pages, [`STAGED`] at a time, a few threads turning
    /// them into planes; this one calls `meanwhile`.
    fn put_rows(
        &mut self,
        ((number, group), (side, layer)): ((usize, &KvGroup), (Side, usize)),
        neutral: &[u8],
        stage: &mut HostBlock,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        let CardMover { gpu, map, .. } = *self.mover;
        let array = side.array(group);
        let planes = [0, 1].map(|i| map.groups[number][side as usize + i]);
        let widths = planes.map(|plane| plane.width);
        let page_bytes = widths[0] + widths[1];
        let row_bytes = neutral_bytes(group, array, PAGE);
        let runs: Vec<_> = runs(0..self.position, usize::MAX).collect();
        for (pages, first) in runs.chunks(STAGED).zip((0..).step_by(STAGED)) {
            let staged = &mut stage.bytes_mut()[..pages.len() * page_bytes];
            let each = pages.len().div_ceil(threads());
            std::thread::scope(|scope| {
                for (i, out) in staged.chunks_mut(each * page_bytes).enumerate() {
                    let begin = first + i * each;
                    let runs = &runs[begin..];
                    scope.spawn(move || {
                        for (j, page) in out.chunks_mut(page_bytes).enumerate() {
                            let within = runs[j].1.clone();
                            if within.len() < PAGE {
                                page.fill(0);
                            }
                            let at = (begin + j) * row_bytes;
                            let rows = &neutral[at..neutral.len().min(at + row_bytes)];
                            let (values, scales) = page.split_at_mut(widths[0]);
                            put_neutral((group, array), within, rows, (values, scales));
                        }
                    });
                }
                meanwhile();
            });
            for (i, target) in self.targets[first..][..pages.len()].iter_mut().enumerate() {
                let at = [i * page_bytes, i * page_bytes + widths[0]];
                for (plane, at) in planes.iter().zip(at) {
                    match target {
                        Target::Card(place) => {
                            let to = plane.page(*place) + (layer * plane.pitch) as u64;
                            let from = stage.address() + at as u64;
                            // SAFETY: waited for below, before anybody writes the stage again.
                            unsafe { gpu.copy_rows((to, 0), (from, 0), plane.width, 1) }?;
                        }
                        Target::Host(block) => block.bytes_mut()[plane.of(layer)]
                            .copy_from_slice(&stage.bytes()[at..at + plane.width]),
                    }
                }
            }
            gpu.sync()?;
        }
        Ok(())
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
pub(super) fn expected_bytes(
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
