//! Properties of the page pool on a simulated device with injected copy failures.

use std::collections::BTreeMap;

use super::*;

type RowIds = Vec<u64>;

/// Device pages as vectors of row ids. `dice` injects copy failures.
struct FakeDevice {
    pages_on_device: Vec<RowIds>,
    faults: bool,
    dice: Dice,
    saved: usize,
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % end
    }
}

impl FakeDevice {
    fn new(n: usize, seed: u64, faults: bool) -> FakeDevice {
        FakeDevice {
            pages_on_device: vec![vec![u64::MAX; PAGE_SIZE]; n],
            faults,
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            saved: 0,
        }
    }

    fn fails(&mut self) -> Result<(), DeviceError> {
        if self.faults && self.dice.below(4) == 0 {
            Err(DeviceError::OutOfMemory {
                what: "page-locked host memory bytes",
                wanted: 1,
                free: 0,
            })
        } else {
            Ok(())
        }
    }
}

impl PageCopier for FakeDevice {
    type HostCopy = RowIds;

    fn save(&mut self, index: usize) -> Result<RowIds, DeviceError> {
        self.fails()?;
        self.saved += 1;
        // The contents of a freed device page are undefined.
        Ok(std::mem::replace(
            &mut self.pages_on_device[index],
            vec![u64::MAX; PAGE_SIZE],
        ))
    }

    fn load(&mut self, page: &RowIds, index: usize) -> Result<(), DeviceError> {
        self.fails()?;
        self.pages_on_device[index].clone_from(page);
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<(), DeviceError> {
        self.fails()?;
        self.pages_on_device[to] = self.pages_on_device[from].clone();
        Ok(())
    }
}

/// A sequence or a snapshot: the expected rows, and its pages.
#[derive(Default, Clone)]
struct Holder {
    rows: RowIds,
    pages: Vec<PageId>,
}

struct PagePoolFixture {
    device: FakeDevice,
    pages: PagePool<RowIds>,
    live: BTreeMap<usize, Holder>,
    kept: Vec<Holder>,
    next_row: u64,
}

impl PagePoolFixture {
    fn new(pages_on_device: usize, seed: u64, faults: bool) -> PagePoolFixture {
        PagePoolFixture {
            device: FakeDevice::new(pages_on_device, seed, faults),
            pages: PagePool::new(0..pages_on_device),
            live: BTreeMap::new(),
            kept: Vec::new(),
            next_row: 0,
        }
    }

    /// Appends `n` rows to a sequence and discards the last fifth, as rejected speculation.
    fn write(&mut self, seq: usize, n: usize) {
        let holder = self.live.get_mut(&seq).unwrap();
        let pages = (holder.rows.len() + n).div_ceil(PAGE_SIZE);
        if self
            .pages
            .extend_table(&mut holder.pages, pages, &mut self.device)
            .is_err()
        {
            return;
        }
        for i in 0..n {
            let row = holder.rows.len();
            let index = self.pages.page_index(holder.pages[row / PAGE_SIZE]);
            self.next_row += 1;
            self.device.pages_on_device[index][row % PAGE_SIZE] = self.next_row;
            if 5 * i < 4 * n {
                holder.rows.push(self.next_row);
            } else {
                break;
            }
        }
    }

    fn snapshot(&mut self, seq: usize) {
        let holder = &self.live[&seq];
        let pages = self.pages.retain(&holder.pages, holder.rows.len());
        self.kept.push(Holder {
            rows: holder.rows.clone(),
            pages,
        });
    }

    fn restore(&mut self, seq: usize, kept: usize) {
        let saved = self.kept[kept].clone();
        let holder = self.live.get_mut(&seq).unwrap();
        self.pages.release(holder.pages.drain(..));
        holder.rows.clear();
        let restored = self
            .pages
            .restore(&saved.pages, saved.rows.len(), &mut self.device);
        if let Ok(pages) = restored {
            holder.pages = pages;
            holder.rows = saved.rows;
        }
    }

    /// Imports a snapshot's rows, as a restore from disk does.
    fn import(&mut self, kept: usize) {
        let rows = self.kept[kept].rows.clone();
        let mut pages = Vec::new();
        for rows in rows.chunks(PAGE_SIZE) {
            let mut page = rows.to_vec();
            page.resize(PAGE_SIZE, 0);
            pages.push(match self.pages.adopt_on_device() {
                Some((id, index)) => {
                    self.device.pages_on_device[index] = page;
                    id
                }
                None => self.pages.adopt(page),
            });
        }
        self.kept.push(Holder { rows, pages });
    }

    fn close(&mut self, seq: usize) {
        let holder = self.live.remove(&seq).unwrap();
        self.pages.release(holder.pages.into_iter());
    }

    fn free(&mut self, kept: usize) {
        let saved = self.kept.swap_remove(kept);
        self.pages.release_snapshot(saved.pages);
    }

    /// Every referrer finds its rows, and each device page is free or in use exactly once.
    fn check(&self, what: &str) {
        for holder in self.live.values() {
            for (i, row) in holder.rows.iter().enumerate() {
                let index = self.pages.page_index(holder.pages[i / PAGE_SIZE]);
                assert_eq!(
                    self.device.pages_on_device[index][i % PAGE_SIZE],
                    *row,
                    "{what}: row {i}"
                );
            }
        }
        for holder in &self.kept {
            for (i, row) in holder.rows.iter().enumerate() {
                let page = match self.pages.locate(holder.pages[i / PAGE_SIZE]) {
                    Ok(index) => &self.device.pages_on_device[index],
                    Err(page) => page,
                };
                assert_eq!(page[i % PAGE_SIZE], *row, "{what}: kept row {i}");
            }
        }
        let in_use = self
            .pages
            .pages
            .iter()
            .flatten()
            .filter_map(|page| match page.location {
                PageLocation::Device(index) => Some(index),
                PageLocation::Host(_) => None,
            });
        let mut pages_on_device: Vec<usize> =
            in_use.chain(self.pages.free.iter().copied()).collect();
        pages_on_device.sort_unstable();
        assert!(
            pages_on_device
                .iter()
                .copied()
                .eq(0..self.device.pages_on_device.len()),
            "{what}: {pages_on_device:?}"
        );
    }
}

/// Runs random operations: two sequences of at most four pages on eight device pages.
fn play(seed: u64, faults: bool) -> PagePoolFixture {
    const LONGEST: usize = 4 * PAGE_SIZE;
    let mut fixture = PagePoolFixture::new(8, seed, faults);
    for step in 0..120 {
        let seq = fixture.device.dice.below(2);
        let open = fixture.live.contains_key(&seq);
        let kept = fixture.kept.len();
        match fixture.device.dice.below(8) {
            _ if !open => {
                fixture.live.insert(seq, Holder::default());
            }
            0..3 => {
                let room = LONGEST - fixture.live[&seq].rows.len();
                let n = fixture.device.dice.below(room + 1);
                fixture.write(seq, n);
            }
            3 | 4 => fixture.snapshot(seq),
            5 if kept > 0 => {
                let which = fixture.device.dice.below(kept);
                fixture.restore(seq, which);
            }
            6 if kept > 6 => {
                let which = fixture.device.dice.below(kept);
                fixture.free(which);
            }
            7 if step % 3 == 0 => fixture.close(seq),
            7 if kept > 0 => {
                let which = fixture.device.dice.below(kept);
                fixture.import(which);
                // A detached snapshot outlives the snapshot that it was taken from.
                let again = fixture.kept[which].clone();
                let pages = fixture.pages.retain_again(&again.pages);
                fixture.free(which);
                fixture.kept.push(Holder { pages, ..again });
            }
            _ => {}
        }
        fixture.check(&format!("seed {seed}, step {step}"));
    }
    fixture
}

#[test]
fn page_contents_survive_moves_between_device_and_host() {
    let fixtures: Vec<PagePoolFixture> = (1..200).map(|seed| play(seed, false)).collect();
    let saved: usize = fixtures.iter().map(|fixture| fixture.device.saved).sum();
    assert!(
        saved > 1000,
        "{saved} pages moved off the device, so little was tried"
    );
}

#[test]
fn failed_copies_lose_no_page() {
    for seed in 1..200 {
        play(seed, true);
    }
}

#[test]
fn releasing_everything_frees_every_page() {
    let mut fixture = play(7, false);
    for seq in fixture.live.keys().copied().collect::<Vec<_>>() {
        fixture.close(seq);
    }
    while !fixture.kept.is_empty() {
        fixture.free(0);
    }
    assert_eq!(
        (fixture.pages.free.len(), fixture.pages.count()),
        (8, PageCounts::default())
    );
    assert!(fixture.pages.pages.iter().all(Option::is_none));
}

#[test]
fn snapshots_of_one_sequence_share_its_pages() {
    let mut fixture = PagePoolFixture::new(4, 1, false);
    fixture.live.insert(0, Holder::default());
    for _ in 0..4 {
        fixture.write(0, PAGE_SIZE);
        fixture.snapshot(0);
    }
    assert_eq!(fixture.pages.count().saved, fixture.live[&0].pages.len());
    assert_eq!(fixture.device.saved, 0);
}

#[test]
fn full_pool_refuses_extension_and_keeps_all_tables() {
    let mut fixture = PagePoolFixture::new(4, 1, false);
    for seq in [0, 1] {
        fixture.live.insert(seq, Holder::default());
        fixture
            .pages
            .extend_table(
                &mut fixture.live.get_mut(&seq).unwrap().pages,
                2,
                &mut fixture.device,
            )
            .unwrap();
    }
    let more = fixture.pages.extend_table(
        &mut fixture.live.get_mut(&0).unwrap().pages,
        3,
        &mut fixture.device,
    );
    assert!(matches!(more, Err(DeviceError::PoolExhausted { .. })));
    assert_eq!(fixture.live[&0].pages.len(), 2);
    fixture.check("after a refusal");
}

#[test]
fn least_recently_used_sequence_is_evicted_first_from_its_end() {
    let mut fixture = PagePoolFixture::new(6, 1, false);
    for seq in [0, 1] {
        fixture.live.insert(seq, Holder::default());
        fixture
            .pages
            .extend_table(
                &mut fixture.live.get_mut(&seq).unwrap().pages,
                2,
                &mut fixture.device,
            )
            .unwrap();
        fixture.live.get_mut(&seq).unwrap().rows = vec![u64::MAX; 2 * PAGE_SIZE];
        fixture.snapshot(seq);
    }
    let firsts = [0, 1].map(|seq| fixture.live[&seq].pages.clone());
    fixture.close(1);
    fixture.close(0);
    fixture.live.insert(2, Holder::default());
    let table = &mut fixture.live.get_mut(&2).unwrap().pages;
    let gone = |pages: &PagePool<RowIds>, id: PageId| pages.locate(id).is_err();
    for (n, expected) in [
        (2, [[false, false], [false, false]]),
        (3, [[false, false], [false, true]]),
        (4, [[false, false], [true, true]]),
        (5, [[false, true], [true, true]]),
    ] {
        fixture
            .pages
            .extend_table(table, n, &mut fixture.device)
            .unwrap();
        let found = firsts
            .each_ref()
            .map(|ids| [gone(&fixture.pages, ids[0]), gone(&fixture.pages, ids[1])]);
        assert_eq!(found, expected, "{n} pages taken");
    }
}
