//! Who holds which page of keys and values, and where it is.
//!
//! A page holds 256 positions of every attention layer. A row is written once, by the sequence that took the page,
//! and never again once it is committed; so a snapshot keeps references to the pages of its rows, the last of them
//! partly filled, and copies nothing. A sequence that is restored shares the full pages and copies the last one,
//! since it will write behind the rows it shares.
//!
//! The places on the card are one pool for all sequences, of at least as many as the longest takes. What only
//! snapshots hold lies in places that nobody needs just now, and moves to the host, the longest unused first, when a
//! sequence needs them. A page that a sequence uses stays where it is, so where sequences use all places none of them
//! can grow; whoever calls gives one of them up or waits. Nothing here touches the card: a [`PageCopier`] does.

use contract::DeviceError;

use crate::state::PAGE_SIZE;

/// Names a page for as long as somebody holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageId(usize);

/// Moves the bytes of pages. All of it happens in the order of the calls.
pub(crate) trait PageCopier {
    /// A page off the card.
    type HostCopy;

    /// Copies the page at `place` off the card.
    fn save(&mut self, place: usize) -> Result<Self::HostCopy, DeviceError>;

    /// Copies a page back, to `place`.
    fn load(&mut self, held: &Self::HostCopy, place: usize) -> Result<(), DeviceError>;

    /// Copies the page at place `from` to place `to`.
    fn copy(&mut self, from: usize, to: usize) -> Result<(), DeviceError>;
}

/// All pages of a card.
pub(crate) struct PagePool<H> {
    pages: Vec<Option<Page<H>>>,
    /// Places that hold nothing; the last is given out next.
    free: Vec<usize>,
    /// Counts releases; the time of a page's last use.
    tick: u64,
}

/// PagePool by who holds them, each counted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PageCounts {
    /// Those that sequences hold, all of them on the card.
    pub(crate) in_use: usize,
    /// Those that snapshots hold, wherever they are.
    pub(crate) saved: usize,
    /// Those on the card that snapshots alone hold.
    pub(crate) evictable: usize,
}

struct Page<H> {
    /// Sequences that have it in their tables.
    sequence_refs: usize,
    /// Snapshots that hold it.
    snapshot_refs: usize,
    location: PageLocation<H>,
    /// The tick at which a sequence last had it.
    last_used: u64,
}

enum PageLocation<H> {
    Device(usize),
    Host(H),
}

impl<H> PagePool<H> {
    /// Nothing is held; places are given out in this order.
    pub(crate) fn new(places: impl DoubleEndedIterator<Item = usize>) -> PagePool<H> {
        PagePool {
            pages: Vec::new(),
            free: places.rev().collect(),
            tick: 0,
        }
    }

    /// How many pages are held, and by whom.
    pub(crate) fn count(&self) -> PageCounts {
        let mut count = PageCounts::default();
        for page in self.pages.iter().flatten() {
            count.in_use += usize::from(page.sequence_refs > 0);
            count.saved += usize::from(page.snapshot_refs > 0);
            count.evictable += usize::from(
                page.sequence_refs == 0 && matches!(page.location, PageLocation::Device(_)),
            );
        }
        count
    }

    /// The place of a page that a sequence holds.
    ///
    /// # Panics
    /// If none does: only those are sure to be on the card.
    pub(crate) fn page_index(&self, id: PageId) -> usize {
        let page = self.page(id);
        match page.location {
            PageLocation::Device(place) if page.sequence_refs > 0 => place,
            _ => panic!("a page that no sequence holds has no place of its own"),
        }
    }

    /// Where a page is that a snapshot holds: at a place, or off the card.
    pub(crate) fn locate(&self, id: PageId) -> Result<usize, &H> {
        match &self.page(id).location {
            PageLocation::Device(place) => Ok(*place),
            PageLocation::Host(held) => Err(held),
        }
    }

    /// Takes fresh pages until `table` has `n`. If that fails, the table is as it was.
    pub(crate) fn extend_table(
        &mut self,
        table: &mut Vec<PageId>,
        n: usize,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<(), DeviceError> {
        let before = table.len();
        while table.len() < n {
            match self.take_page(copier) {
                Ok(place) => table.push(self.add(Page {
                    sequence_refs: 1,
                    snapshot_refs: 0,
                    location: PageLocation::Device(place),
                    last_used: 0,
                })),
                Err(error) => {
                    self.release(table.drain(before..));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Keeps the pages of the first `position` rows of a sequence.
    pub(crate) fn retain(&mut self, table: &[PageId], position: usize) -> Vec<PageId> {
        let held = table[..position.div_ceil(PAGE_SIZE)].to_vec();
        for id in &held {
            self.page_mut(*id).snapshot_refs += 1;
        }
        held
    }

    /// Keeps pages that a snapshot keeps once more.
    pub(crate) fn retain_again(&mut self, held: &[PageId]) -> Vec<PageId> {
        for id in held {
            self.page_mut(*id).snapshot_refs += 1;
        }
        held.to_vec()
    }

    /// Keeps a page that was never on the card.
    pub(crate) fn adopt(&mut self, held: H) -> PageId {
        self.add(Page {
            sequence_refs: 0,
            snapshot_refs: 1,
            location: PageLocation::Host(held),
            last_used: self.tick,
        })
    }

    /// Keeps a page at a place that holds nothing, for somebody to fill; `None` where there is no such place.
    pub(crate) fn adopt_on_device(&mut self) -> Option<(PageId, usize)> {
        let place = self.free.pop()?;
        let id = self.add(Page {
            sequence_refs: 0,
            snapshot_refs: 1,
            location: PageLocation::Device(place),
            last_used: self.tick,
        });
        Some((id, place))
    }

    /// A table of the rows that a snapshot at `position` holds: full pages shared, the last one copied.
    pub(crate) fn restore(
        &mut self,
        held: &[PageId],
        position: usize,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<Vec<PageId>, DeviceError> {
        let mut table = Vec::with_capacity(held.len());
        let result = self.restore_into(&mut table, held, position / PAGE_SIZE, copier);
        if result.is_err() {
            self.release(table.drain(..));
        }
        result.map(|()| table)
    }

    fn restore_into(
        &mut self,
        table: &mut Vec<PageId>,
        held: &[PageId],
        whole: usize,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<(), DeviceError> {
        // First all that is on the card, so that it stays there while room is made for the rest.
        for id in &held[..whole] {
            self.page_mut(*id).sequence_refs += 1;
            table.push(*id);
        }
        for id in &held[..whole] {
            if matches!(self.page(*id).location, PageLocation::Host(_)) {
                let place = self.take_page(copier)?;
                let PageLocation::Host(saved) = &self.page(*id).location else {
                    unreachable!("making room moves pages off the card only");
                };
                let loaded = copier.load(saved, place);
                if loaded.is_err() {
                    self.free.push(place);
                    return loaded;
                }
                self.page_mut(*id).location = PageLocation::Device(place);
            }
        }
        if let Some(last) = held.get(whole) {
            // Nobody may move it away meanwhile.
            self.page_mut(*last).sequence_refs += 1;
            let copied = self.take_page(copier).and_then(|place| {
                let copied = match &self.page(*last).location {
                    PageLocation::Device(from) => copier.copy(*from, place),
                    PageLocation::Host(saved) => copier.load(saved, place),
                };
                match copied {
                    Ok(()) => Ok(place),
                    Err(error) => {
                        self.free.push(place);
                        Err(error)
                    }
                }
            });
            self.release([*last].into_iter());
            let id = self.add(Page {
                sequence_refs: 1,
                snapshot_refs: 0,
                location: PageLocation::Device(copied?),
                last_used: 0,
            });
            table.push(id);
        }
        Ok(())
    }

    /// A sequence lets go of pages, in the order of its table. The first count as used last, since every state that
    /// needs a later one needs them.
    pub(crate) fn release(&mut self, table: impl DoubleEndedIterator<Item = PageId>) {
        for id in table.rev() {
            self.tick += 1;
            let tick = self.tick;
            let page = self.page_mut(id);
            page.sequence_refs -= 1;
            page.last_used = tick;
            self.free_if_unreferenced(id);
        }
    }

    /// A snapshot lets go of pages.
    pub(crate) fn release_snapshot(&mut self, held: impl IntoIterator<Item = PageId>) {
        for id in held {
            self.page_mut(id).snapshot_refs -= 1;
            self.free_if_unreferenced(id);
        }
    }

    /// Frees a page that nobody holds.
    fn free_if_unreferenced(&mut self, id: PageId) {
        let page = self.page(id);
        if page.sequence_refs == 0
            && page.snapshot_refs == 0
            && let Some(Page {
                location: PageLocation::Device(place),
                ..
            }) = self.pages[id.0].take()
        {
            self.free.push(place);
        }
    }

    /// A place that holds nothing, if need be after moving the page there to the host.
    fn take_page(
        &mut self,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<usize, DeviceError> {
        if let Some(place) = self.free.pop() {
            return Ok(place);
        }
        let idle = self
            .pages
            .iter_mut()
            .flatten()
            .filter(|page| page.sequence_refs == 0);
        let on_card = idle.filter_map(|page| match page.location {
            PageLocation::Device(place) => Some((place, page)),
            PageLocation::Host(_) => None,
        });
        let Some((place, page)) = on_card.min_by_key(|(_, page)| page.last_used) else {
            return Err(DeviceError::PoolExhausted { wanted: 1, free: 0 });
        };
        page.location = PageLocation::Host(copier.save(place)?);
        Ok(place)
    }

    fn add(&mut self, page: Page<H>) -> PageId {
        match self.pages.iter().position(Option::is_none) {
            Some(at) => {
                self.pages[at] = Some(page);
                PageId(at)
            }
            None => {
                self.pages.push(Some(page));
                PageId(self.pages.len() - 1)
            }
        }
    }

    fn page(&self, id: PageId) -> &Page<H> {
        let page = self.pages[id.0].as_ref();
        page.expect("whoever has the name of a page holds it")
    }

    fn page_mut(&mut self, id: PageId) -> &mut Page<H> {
        let page = self.pages[id.0].as_mut();
        page.expect("whoever has the name of a page holds it")
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
