//! The book against a card made of vectors, with copies that fail now and then.

use std::collections::BTreeMap;

use super::*;

type Rows = Vec<u64>;

/// Places as rows of numbers, and a die that decides which copies fail.
struct Card {
    places: Vec<Rows>,
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

impl Card {
    fn new(n: usize, seed: u64, faults: bool) -> Card {
        Card {
            places: vec![vec![u64::MAX; PAGE]; n],
            faults,
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            saved: 0,
        }
    }

    fn fails(&mut self) -> Result<(), DeviceError> {
        match self.faults && self.dice.below(4) == 0 {
            true => Err(DeviceError::OutOfMemory {
                what: "page-locked host memory bytes",
                wanted: 1,
                free: 0,
            }),
            false => Ok(()),
        }
    }
}

impl Mover for Card {
    type Held = Rows;

    fn save(&mut self, place: usize) -> Result<Rows, DeviceError> {
        self.fails()?;
        self.saved += 1;
        // What lies at a place that was given up is nobody's.
        Ok(std::mem::replace(
            &mut self.places[place],
            vec![u64::MAX; PAGE],
        ))
    }

    fn load(&mut self, held: &Rows, place: usize) -> Result<(), DeviceError> {
        self.fails()?;
        self.places[place].clone_from(held);
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<(), DeviceError> {
        self.fails()?;
        self.places[to] = self.places[from].clone();
        Ok(())
    }
}

/// A sequence or a snapshot: the rows it must hold, and its pages.
#[derive(Default, Clone)]
struct Holder {
    rows: Rows,
    pages: Vec<PageId>,
}

struct World {
    card: Card,
    pages: Pages<Rows>,
    live: BTreeMap<usize, Holder>,
    kept: Vec<Holder>,
    next_row: u64,
}

impl World {
    fn new(places: usize, seed: u64, faults: bool) -> World {
        World {
            card: Card::new(places, seed, faults),
            pages: Pages::new(0..places),
            live: BTreeMap::new(),
            kept: Vec::new(),
            next_row: 0,
        }
    }

    /// Writes `n` new rows behind those of a sequence, and as many that are thrown away.
    fn write(&mut self, seq: usize, n: usize) {
        let holder = self.live.get_mut(&seq).unwrap();
        let pages = (holder.rows.len() + n).div_ceil(PAGE);
        if self
            .pages
            .grow(&mut holder.pages, pages, &mut self.card)
            .is_err()
        {
            return;
        }
        for i in 0..n {
            let row = holder.rows.len();
            let place = self.pages.place(holder.pages[row / PAGE]);
            self.next_row += 1;
            self.card.places[place][row % PAGE] = self.next_row;
            // The last fifth is speculation.
            if 5 * i < 4 * n {
                holder.rows.push(self.next_row);
            } else {
                break;
            }
        }
    }

    fn snapshot(&mut self, seq: usize) {
        let holder = &self.live[&seq];
        let pages = self.pages.keep(&holder.pages, holder.rows.len());
        self.kept.push(Holder {
            rows: holder.rows.clone(),
            pages,
        });
    }

    fn restore(&mut self, seq: usize, kept: usize) {
        let saved = self.kept[kept].clone();
        let holder = self.live.get_mut(&seq).unwrap();
        self.pages.leave(holder.pages.drain(..));
        holder.rows.clear();
        let restored = self
            .pages
            .restore(&saved.pages, saved.rows.len(), &mut self.card);
        if let Ok(pages) = restored {
            holder.pages = pages;
            holder.rows = saved.rows;
        }
    }

    /// Brings a kept state in from elsewhere, as one that is read from a disk.
    fn import(&mut self, kept: usize) {
        let rows = self.kept[kept].rows.clone();
        let mut pages = Vec::new();
        for rows in rows.chunks(PAGE) {
            let mut page = rows.to_vec();
            page.resize(PAGE, 0);
            pages.push(match self.pages.adopt_place() {
                Some((id, place)) => {
                    self.card.places[place] = page;
                    id
                }
                None => self.pages.adopt(page),
            });
        }
        self.kept.push(Holder { rows, pages });
    }

    fn close(&mut self, seq: usize) {
        let holder = self.live.remove(&seq).unwrap();
        self.pages.leave(holder.pages.into_iter());
    }

    fn free(&mut self, kept: usize) {
        let saved = self.kept.swap_remove(kept);
        self.pages.drop_kept(saved.pages);
    }

    /// Every holder has its rows, and every place is somebody's or nobody's, once.
    fn check(&self, what: &str) {
        for holder in self.live.values() {
            for (i, row) in holder.rows.iter().enumerate() {
                let place = self.pages.place(holder.pages[i / PAGE]);
                assert_eq!(self.card.places[place][i % PAGE], *row, "{what}: row {i}");
            }
        }
        for holder in &self.kept {
            for (i, row) in holder.rows.iter().enumerate() {
                let page = match self.pages.find(holder.pages[i / PAGE]) {
                    Ok(place) => &self.card.places[place],
                    Err(held) => held,
                };
                assert_eq!(page[i % PAGE], *row, "{what}: kept row {i}");
            }
        }
        let on_card = self
            .pages
            .pages
            .iter()
            .flatten()
            .filter_map(|page| match page.at {
                At::Card(place) => Some(place),
                At::Host(_) => None,
            });
        let mut places: Vec<usize> = on_card.chain(self.pages.free.iter().copied()).collect();
        places.sort_unstable();
        assert!(
            places.iter().copied().eq(0..self.card.places.len()),
            "{what}: {places:?}"
        );
    }
}

/// Two sequences of at most four pages on eight places, and as many snapshots as one likes.
fn play(seed: u64, faults: bool) -> World {
    const LONGEST: usize = 4 * PAGE;
    let mut world = World::new(8, seed, faults);
    for step in 0..120 {
        let seq = world.card.dice.below(2);
        let open = world.live.contains_key(&seq);
        let kept = world.kept.len();
        match world.card.dice.below(8) {
            _ if !open => {
                world.live.insert(seq, Holder::default());
            }
            0..3 => {
                let room = LONGEST - world.live[&seq].rows.len();
                let n = world.card.dice.below(room + 1);
                world.write(seq, n);
            }
            3 | 4 => world.snapshot(seq),
            5 if kept > 0 => {
                let which = world.card.dice.below(kept);
                world.restore(seq, which);
            }
            6 if kept > 6 => {
                let which = world.card.dice.below(kept);
                world.free(which);
            }
            7 if step % 3 == 0 => world.close(seq),
            7 if kept > 0 => {
                let which = world.card.dice.below(kept);
                world.import(which);
                // A parcel keeps what another frees.
                let again = world.kept[which].clone();
                let pages = world.pages.keep_again(&again.pages);
                world.free(which);
                world.kept.push(Holder { pages, ..again });
            }
            _ => {}
        }
        world.check(&format!("seed {seed}, step {step}"));
    }
    world
}

#[test]
fn what_is_held_stays_what_it_was_whatever_moves() {
    let worlds: Vec<World> = (1..200).map(|seed| play(seed, false)).collect();
    let saved: usize = worlds.iter().map(|world| world.card.saved).sum();
    assert!(
        saved > 1000,
        "{saved} pages moved off the card, so little was tried"
    );
}

#[test]
fn a_copy_that_fails_loses_nothing() {
    for seed in 1..200 {
        play(seed, true);
    }
}

#[test]
fn when_all_is_let_go_every_place_is_free() {
    let mut world = play(7, false);
    for seq in world.live.keys().copied().collect::<Vec<_>>() {
        world.close(seq);
    }
    while !world.kept.is_empty() {
        world.free(0);
    }
    assert_eq!(
        (world.pages.free.len(), world.pages.count()),
        (8, Count::default())
    );
    assert!(world.pages.pages.iter().all(Option::is_none));
}

#[test]
fn states_of_one_conversation_hold_its_pages_once() {
    let mut world = World::new(4, 1, false);
    world.live.insert(0, Holder::default());
    for _ in 0..4 {
        world.write(0, PAGE);
        world.snapshot(0);
    }
    assert_eq!(world.pages.count().kept, world.live[&0].pages.len());
    assert_eq!(world.card.saved, 0);
}

#[test]
fn full_sequences_leave_no_place_to_others_states_and_take_none_from_each_other() {
    let mut world = World::new(4, 1, false);
    for seq in [0, 1] {
        world.live.insert(seq, Holder::default());
        world
            .pages
            .grow(
                &mut world.live.get_mut(&seq).unwrap().pages,
                2,
                &mut world.card,
            )
            .unwrap();
    }
    let more = world.pages.grow(
        &mut world.live.get_mut(&0).unwrap().pages,
        3,
        &mut world.card,
    );
    assert!(matches!(more, Err(DeviceError::OutOfMemory { .. })));
    assert_eq!(world.live[&0].pages.len(), 2);
    world.check("after a refusal");
}

#[test]
fn the_conversation_longest_unused_moves_first_and_its_end_before_its_beginning() {
    let mut world = World::new(6, 1, false);
    for seq in [0, 1] {
        world.live.insert(seq, Holder::default());
        world
            .pages
            .grow(
                &mut world.live.get_mut(&seq).unwrap().pages,
                2,
                &mut world.card,
            )
            .unwrap();
        world.live.get_mut(&seq).unwrap().rows = vec![u64::MAX; 2 * PAGE];
        world.snapshot(seq);
    }
    let firsts = [0, 1].map(|seq| world.live[&seq].pages.clone());
    world.close(1);
    world.close(0);
    world.live.insert(2, Holder::default());
    let table = &mut world.live.get_mut(&2).unwrap().pages;
    let gone = |pages: &Pages<Rows>, id: PageId| pages.find(id).is_err();
    for (n, expected) in [
        (2, [[false, false], [false, false]]),
        (3, [[false, false], [false, true]]),
        (4, [[false, false], [true, true]]),
        (5, [[false, true], [true, true]]),
    ] {
        world.pages.grow(table, n, &mut world.card).unwrap();
        let found = firsts
            .each_ref()
            .map(|ids| [gone(&world.pages, ids[0]), gone(&world.pages, ids[1])]);
        assert_eq!(found, expected, "{n} pages taken");
    }
}
