//! The way of a snapshot from the card to the device-neutral bytes, on any thread.
//!
//! Rows that are committed do not change, so another thread may read them while sequences go on. A parcel keeps the
//! pages of its snapshot as a snapshot does; where they are is asked under the book's lock for each few of them, which
//! is held until they are copied, so that none moves meanwhile.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use contract::snapshot::{
    HEADER_BYTES, SECTION_BYTES, SectionKind, SnapshotHeader, SnapshotIdentity, write_header,
    write_section,
};
use contract::{DetachedSnapshot, DeviceError, ModelSpec};

use super::neutral::{append_neutral, neutral_states, runs};
use super::travel::{Side, expected_bytes, in_sight, index_of, rings};
use super::{Copied, Left, PageMap, Snapshot, What};
use crate::driver::{Courier, Stream};
use crate::host::{HostBlock, HostPool};
use crate::pages::{PageId, Pages};
use crate::state::{KvGroup, Place, State};

/// Pages that are brought to the host at once.
const STAGED: usize = 32;

/// The pages of a runner, and how many parcels still read them.
pub(crate) struct Book {
    pages: Mutex<Pages<HostBlock>>,
    parcels: Mutex<usize>,
    fewer: Condvar,
}

impl Book {
    pub(crate) fn new(pages: Pages<HostBlock>) -> Book {
        Book {
            pages: Mutex::new(pages),
            parcels: Mutex::new(0),
            fewer: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Pages<HostBlock>> {
        // Every change of the book is whole before anything in it can panic.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parcels(&self) -> MutexGuard<'_, usize> {
        self.parcels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no parcel is left.
    pub(crate) fn wait_for_parcels(&self) {
        let left = self.fewer.wait_while(self.parcels(), |n| *n > 0);
        drop(left);
    }
}

/// What parcels of a runner have in common.
#[derive(Clone)]
pub(crate) struct Whose {
    pub(crate) book: Arc<Book>,
    pub(crate) host: Arc<HostPool>,
    pub(crate) map: Arc<PageMap>,
    pub(crate) state: Arc<State>,
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) courier: Courier,
    pub(crate) identity: SnapshotIdentity,
}

/// A snapshot on its way to bytes.
pub(crate) struct CardParcel {
    whose: Whose,
    position: usize,
    pages: Vec<PageId>,
    left: Arc<Copied>,
}

/// What is needed to bring rows of pages to the host.
struct Fetcher {
    stream: Stream,
    stage: HostBlock,
    rows: Vec<u8>,
}

impl CardParcel {
    pub(crate) fn new(whose: Whose, snapshot: &Snapshot) -> CardParcel {
        let pages = whose.book.lock().keep_again(&snapshot.pages);
        *whose.book.parcels() += 1;
        CardParcel {
            whose,
            position: snapshot.position,
            pages,
            left: Arc::clone(&snapshot.left),
        }
    }

    /// Every section, in the order in which they are written.
    fn sections(&self) -> impl Iterator<Item = (SectionKind, usize)> {
        let Whose { state, spec, .. } = &self.whose;
        let of_layer = |layer: usize| match state.layer(layer) {
            Place::Kv(..) => [(SectionKind::Keys, layer), (SectionKind::Values, layer)],
            Place::Delta(..) => [
                (SectionKind::DeltaState, layer),
                (SectionKind::ConvWindow, layer),
            ],
        };
        let layers = (0..spec.layers.len()).flat_map(of_layer);
        let of_ring = |layer| {
            [
                (SectionKind::DraftKeys, layer),
                (SectionKind::DraftValues, layer),
            ]
        };
        layers.chain((0..rings(state).len()).flat_map(of_ring))
    }

    /// Bytes of a section's content.
    fn section_bytes(&self, kind: SectionKind, layer: usize) -> usize {
        let Whose { state, spec, .. } = &self.whose;
        let of = (&**state, spec.layers.len());
        expected_bytes(of, self.position, kind, number(layer)).unwrap_or(0)
    }

    /// The rows of one array of one layer, in the neutral layout.
    fn fetch<'a>(
        &self,
        (group_number, group): (usize, &KvGroup),
        (side, layer): (Side, usize),
        with: &'a mut Fetcher,
    ) -> Result<&'a [u8], DeviceError> {
        let Whose {
            book, map, courier, ..
        } = &self.whose;
        let array = side.array(group);
        let planes = [0, 1].map(|i| map.groups[group_number][side as usize + i]);
        let page_bytes = planes[0].width + planes[1].width;
        let runs: Vec<_> = runs(0..self.position, usize::MAX).collect();
        with.rows.clear();
        for runs in runs.chunks(STAGED) {
            {
                let pages = book.lock();
                let mut settled = false;
                for (i, (page, _)) in runs.iter().enumerate() {
                    let at = i * page_bytes;
                    match pages.find(self.pages[*page]) {
                        Ok(place) => {
                            for (plane, at) in planes.iter().zip([at, at + planes[0].width]) {
                                let from = plane.page(place) + (layer * plane.pitch) as u64;
                                let to = with.stage.address() + at as u64;
                                // SAFETY: the stage is not touched before the wait below.
                                unsafe { courier.carry(&with.stream, to, from, plane.width) }?;
                            }
                        }
                        Err(held) => {
                            // The copy off the card may still be under way.
                            if !settled {
                                courier.sync_all()?;
                                settled = true;
                            }
                            let (values, scales) = (planes[0].of(layer), planes[1].of(layer));
                            let to = &mut with.stage.bytes_mut()[at..at + page_bytes];
                            let (to_values, to_scales) = to.split_at_mut(values.len());
                            to_values.copy_from_slice(&held.bytes()[values]);
                            to_scales.copy_from_slice(&held.bytes()[scales]);
                        }
                    }
                }
                with.stream.sync()?;
            }
            for (i, (_, within)) in runs.iter().enumerate() {
                let page = &with.stage.bytes()[i * page_bytes..][..page_bytes];
                let planes = page.split_at(planes[0].width);
                append_neutral((group, array), within.clone(), planes, &mut with.rows);
            }
        }
        Ok(&with.rows)
    }

    /// The rows of one array of a draft layer, from what was copied.
    fn ring_rows(&self, parts: &Left, left: &[u8], (side, layer): (Side, usize)) -> Vec<u8> {
        let ring = &rings(&self.whose.state)[layer];
        let (group, array) = (&ring.rows, side.array(&ring.rows));
        let planes = [0, 1].map(|i| &left[parts.range(What::Ring(layer, side as usize + i))]);
        let mut rows = Vec::new();
        for (page, within) in runs(in_sight(ring, self.position), ring.pages) {
            let of_page = |plane: usize, row_bytes: usize| {
                let bytes = group.page_rows() * row_bytes;
                &planes[plane][page * bytes..][..bytes]
            };
            let planes = (of_page(0, array.value_bytes), of_page(1, array.scale_bytes));
            append_neutral((group, array), within, planes, &mut rows);
        }
        rows
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("layers are far below 2^31")
}

impl DetachedSnapshot for CardParcel {
    fn bytes(&self) -> u64 {
        let sections = self.sections();
        let bytes = sections.map(|(kind, layer)| SECTION_BYTES + self.section_bytes(kind, layer));
        (HEADER_BYTES + bytes.sum::<usize>()) as u64
    }

    fn write(&mut self, sink: &mut dyn Write) -> Result<(), DeviceError> {
        let Whose {
            host,
            map,
            state,
            courier,
            identity,
            ..
        } = &self.whose;
        let mut with = Fetcher {
            stream: courier.stream()?,
            stage: host.take(STAGED * map.widest())?,
            rows: Vec::new(),
        };
        // Whatever wrote the rows, copied the rest, and used the stage before.
        courier.sync_all()?;
        let fetched;
        let left = match &*self.left {
            Copied::Host(block) => block.bytes(),
            Copied::Card(buffer) => {
                let block = host.take(buffer.bytes())?;
                courier.sync_all()?;
                // SAFETY: waited for before it is read.
                unsafe {
                    courier.carry(&with.stream, block.address(), buffer.ptr(), buffer.bytes())
                }?;
                with.stream.sync()?;
                fetched = block;
                fetched.bytes()
            }
        };
        let sections: Vec<(SectionKind, usize)> = self.sections().collect();
        let header = SnapshotHeader {
            identity: *identity,
            position: self.position as u64,
            sections: number(sections.len()),
        };
        write_header(sink, &header)?;
        let parts = Left::new(state, self.position);
        for (kind, layer) in sections {
            let turned;
            let content: &[u8] = match kind {
                SectionKind::DraftKeys | SectionKind::DraftValues => {
                    let side = match kind {
                        SectionKind::DraftKeys => Side::Keys,
                        _ => Side::Values,
                    };
                    turned = self.ring_rows(&parts, left, (side, layer));
                    &turned
                }
                _ => match (state.layer(layer), kind) {
                    (Place::Delta(group, index), SectionKind::DeltaState) => {
                        let all = &left[parts.range(What::States(index_of(&state.delta, group)))];
                        let one = &all[index * group.state_bytes..][..group.state_bytes];
                        turned = neutral_states(group, one);
                        &turned
                    }
                    (Place::Delta(group, index), _) => {
                        let all = &left[parts.range(What::Windows(index_of(&state.delta, group)))];
                        &all[index * group.window_bytes..][..group.window_bytes]
                    }
                    (Place::Kv(group, index), kind) => {
                        let side = match kind {
                            SectionKind::Keys => Side::Keys,
                            _ => Side::Values,
                        };
                        let group = (index_of(&state.kv, group), group);
                        self.fetch(group, (side, index), &mut with)?
                    }
                },
            };
            write_section(sink, kind, number(layer), content)?;
        }
        Ok(())
    }
}

impl Drop for CardParcel {
    fn drop(&mut self) {
        let book = &self.whose.book;
        book.lock().drop_kept(self.pages.drain(..));
        *book.parcels() -= 1;
        book.fewer.notify_all();
    }
}
