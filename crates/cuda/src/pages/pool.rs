//! Pages of the KV cache: reference counts, locations, and eviction to the host.
//!
//! A page holds 256 positions of every attention layer. The sequence that took the page writes each
//! row once. A committed row never changes, so a snapshot references the pages of its rows and
//! copies nothing. A restored sequence shares the full pages. It copies the last page because it
//! appends to it.
//!
//! All sequences share one pool of device pages, at least as large as the longest sequence. Pages
//! that only snapshots reference are evicted to the host, least recently used first. Pages that
//! sequences reference stay on the device. A pool full of them refuses to extend a table, and the
//! caller preempts a sequence. This module never touches the device: a [`PageCopier`] does.

use contract::DeviceError;

use crate::state::PAGE_SIZE;

/// The identity of a referenced page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageId(usize);

/// Copies the bytes of pages. Copies run in call order.
pub(crate) trait PageCopier {
    /// A page in host memory.
    type HostCopy;

    /// Copies device page `index` to the host.
    fn save(&mut self, index: usize) -> Result<Self::HostCopy, DeviceError>;

    /// Copies a host page to device page `index`.
    fn load(&mut self, page: &Self::HostCopy, index: usize) -> Result<(), DeviceError>;

    /// Copies device page `from` to device page `to`.
    fn copy(&mut self, from: usize, to: usize) -> Result<(), DeviceError>;
}

/// All pages of a device.
pub(crate) struct PagePool<H> {
    pages: Vec<Option<Page<H>>>,
    /// Indices of free device pages. The last is allocated next.
    free: Vec<usize>,
    /// Counts releases and orders the last uses of pages.
    tick: u64,
}

/// Pages by referrer, each counted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PageCounts {
    /// Pages that sequences reference, all on the device.
    pub(crate) in_use: usize,
    /// Pages that snapshots reference, on the device or the host.
    pub(crate) saved: usize,
    /// Device pages that only snapshots reference.
    pub(crate) evictable: usize,
}

struct Page<H> {
    /// Sequences with the page in their tables.
    sequence_refs: usize,
    /// Snapshots that reference the page.
    snapshot_refs: usize,
    location: PageLocation<H>,
    /// The tick of the last release by a sequence.
    last_used: u64,
}

enum PageLocation<H> {
    Device(usize),
    Host(H),
}

impl<H> PagePool<H> {
    /// An empty pool that allocates `indices` in this order.
    pub(crate) fn new(indices: impl DoubleEndedIterator<Item = usize>) -> PagePool<H> {
        PagePool {
            pages: Vec::new(),
            free: indices.rev().collect(),
            tick: 0,
        }
    }

    /// Counts pages by referrer.
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

    /// The device index of a page that a sequence references.
    ///
    /// # Panics
    /// If no sequence references the page: only referenced pages are certain to be on the device.
    pub(crate) fn page_index(&self, id: PageId) -> usize {
        let page = self.page(id);
        match page.location {
            PageLocation::Device(index) if page.sequence_refs > 0 => index,
            _ => panic!("no sequence references this page"),
        }
    }

    /// The device index of a page, or its host copy.
    pub(crate) fn locate(&self, id: PageId) -> Result<usize, &H> {
        match &self.page(id).location {
            PageLocation::Device(index) => Ok(*index),
            PageLocation::Host(page) => Err(page),
        }
    }

    /// Allocates pages until `table` has `n`. An error leaves the table unchanged.
    pub(crate) fn extend_table(
        &mut self,
        table: &mut Vec<PageId>,
        n: usize,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<(), DeviceError> {
        let before = table.len();
        while table.len() < n {
            match self.take_page(copier) {
                Ok(index) => table.push(self.add(Page {
                    sequence_refs: 1,
                    snapshot_refs: 0,
                    location: PageLocation::Device(index),
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

    /// References the pages of the first `position` rows for a snapshot.
    pub(crate) fn retain(&mut self, table: &[PageId], position: usize) -> Vec<PageId> {
        let snapshot = table[..position.div_ceil(PAGE_SIZE)].to_vec();
        for id in &snapshot {
            self.page_mut(*id).snapshot_refs += 1;
        }
        snapshot
    }

    /// Adds one snapshot reference to each page.
    pub(crate) fn retain_again(&mut self, snapshot: &[PageId]) -> Vec<PageId> {
        for id in snapshot {
            self.page_mut(*id).snapshot_refs += 1;
        }
        snapshot.to_vec()
    }

    /// Adds a page that is in host memory.
    pub(crate) fn adopt(&mut self, page: H) -> PageId {
        self.add(Page {
            sequence_refs: 0,
            snapshot_refs: 1,
            location: PageLocation::Host(page),
            last_used: self.tick,
        })
    }

    /// Adds an uninitialised device page for the caller to fill. `None` if no device page is free.
    pub(crate) fn adopt_on_device(&mut self) -> Option<(PageId, usize)> {
        let index = self.free.pop()?;
        let id = self.add(Page {
            sequence_refs: 0,
            snapshot_refs: 1,
            location: PageLocation::Device(index),
            last_used: self.tick,
        });
        Some((id, index))
    }

    /// The page table for a snapshot at `position`: full pages shared, the last one copied.
    pub(crate) fn restore(
        &mut self,
        snapshot: &[PageId],
        position: usize,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<Vec<PageId>, DeviceError> {
        let mut table = Vec::with_capacity(snapshot.len());
        let result = self.restore_into(&mut table, snapshot, position / PAGE_SIZE, copier);
        if result.is_err() {
            self.release(table.drain(..));
        }
        result.map(|()| table)
    }

    fn restore_into(
        &mut self,
        table: &mut Vec<PageId>,
        snapshot: &[PageId],
        n_full: usize,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<(), DeviceError> {
        // Reference the pages on the device first, so that loading the others does not evict them.
        for id in &snapshot[..n_full] {
            self.page_mut(*id).sequence_refs += 1;
            table.push(*id);
        }
        for id in &snapshot[..n_full] {
            if matches!(self.page(*id).location, PageLocation::Host(_)) {
                let index = self.take_page(copier)?;
                let PageLocation::Host(saved) = &self.page(*id).location else {
                    unreachable!("eviction moves pages off the device only");
                };
                let loaded = copier.load(saved, index);
                if loaded.is_err() {
                    self.free.push(index);
                    return loaded;
                }
                self.page_mut(*id).location = PageLocation::Device(index);
            }
        }
        if let Some(last) = snapshot.get(n_full) {
            // The reference prevents eviction of the source page.
            self.page_mut(*last).sequence_refs += 1;
            let copied = self.take_page(copier).and_then(|index| {
                let copied = match &self.page(*last).location {
                    PageLocation::Device(from) => copier.copy(*from, index),
                    PageLocation::Host(saved) => copier.load(saved, index),
                };
                match copied {
                    Ok(()) => Ok(index),
                    Err(error) => {
                        self.free.push(index);
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

    /// Releases a sequence's pages, given in table order. Earlier pages count as used later,
    /// because every state that needs a later page needs the earlier ones too.
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

    /// Releases a snapshot's references.
    pub(crate) fn release_snapshot(&mut self, snapshot: impl IntoIterator<Item = PageId>) {
        for id in snapshot {
            self.page_mut(id).snapshot_refs -= 1;
            self.free_if_unreferenced(id);
        }
    }

    /// Frees a page without references.
    fn free_if_unreferenced(&mut self, id: PageId) {
        let page = self.page(id);
        if page.sequence_refs == 0
            && page.snapshot_refs == 0
            && let Some(Page {
                location: PageLocation::Device(index),
                ..
            }) = self.pages[id.0].take()
        {
            self.free.push(index);
        }
    }

    /// A free device page, after evicting one if necessary.
    fn take_page(
        &mut self,
        copier: &mut impl PageCopier<HostCopy = H>,
    ) -> Result<usize, DeviceError> {
        if let Some(index) = self.free.pop() {
            return Ok(index);
        }
        let idle = self
            .pages
            .iter_mut()
            .flatten()
            .filter(|page| page.sequence_refs == 0);
        let on_device = idle.filter_map(|page| match page.location {
            PageLocation::Device(index) => Some((index, page)),
            PageLocation::Host(_) => None,
        });
        let Some((index, page)) = on_device.min_by_key(|(_, page)| page.last_used) else {
            return Err(DeviceError::PoolExhausted { wanted: 1, free: 0 });
        };
        page.location = PageLocation::Host(copier.save(index)?);
        Ok(index)
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
        page.expect("a page id exists only while the page is referenced")
    }

    fn page_mut(&mut self, id: PageId) -> &mut Page<H> {
        let page = self.pages[id.0].as_mut();
        page.expect("a page id exists only while the page is referenced")
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
