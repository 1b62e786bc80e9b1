//! Running plans: headers up, launches, rows down.
//!
//! The same list of launches runs one by one or as a captured graph; nothing else knows which. All work is on
//! one stream, so what is queued later sees what was queued before.

pub(crate) mod answer;
mod chain;
mod regions;
mod run;
#[cfg(feature = "inspect")]
mod watch;

use std::sync::Arc;

use contract::{Ask, DeviceError, ModelSpec, Row, TokenId, Want};

use crate::driver::{Gpu, Pinned};
use crate::launch::rows;
use crate::plan::{Addresses, Key, Plans};
use crate::state::State;
use crate::step::{self, ChunkHead, Commit, Step};

pub(crate) use regions::Regions;
pub(crate) use run::{Mode, Runs};

/// One loaded model on one card. Fields are dropped in order: what points at memory goes before the memory.
pub(crate) struct Engine {
    runs: Runs,
    plans: Plans,
    headers: Headers,
    regions: Regions,
    state: State,
    spec: Arc<ModelSpec>,
    /// Whether prompts are read as chains of tree nodes.
    chains: bool,
    /// While layers are watched, what the last chunk left behind each.
    #[cfg(feature = "inspect")]
    watched: Option<Vec<Vec<u8>>>,
    gpu: Gpu,
}

/// Page-locked memory that the card reads headers from and writes rows to.
struct Headers {
    up: Uploads,
    rows: Pinned<u8>,
    /// Whether something queued may still read `up.chunk` or `up.commit`.
    in_flight: bool,
}

/// What the card reads.
struct Uploads {
    step: Pinned<u8>,
    draft: Pinned<u8>,
    chunk: Pinned<u8>,
    commit: Pinned<u8>,
}

impl Engine {
    /// An engine whose weights are loaded and whose plans are compiled.
    pub(crate) fn new(
        gpu: Gpu,
        spec: Arc<ModelSpec>,
        state: State,
        regions: Regions,
        (plans, runs): (Plans, Runs),
        chains: bool,
    ) -> Result<Engine, DeviceError> {
        let headers = Headers {
            up: Uploads {
                step: gpu.pinned(size_of::<Step>())?,
                draft: gpu.pinned(size_of::<Step>())?,
                chunk: gpu.pinned(ChunkHead::bytes(plans.chunk_rows()))?,
                commit: gpu.pinned(size_of::<Commit>())?,
            },
            rows: gpu.pinned(plans.reduce.out_bytes(step::ROWS))?,
            in_flight: false,
        };
        let mut engine = Engine {
            runs,
            plans,
            headers,
            regions,
            state,
            spec,
            chains,
            #[cfg(feature = "inspect")]
            watched: None,
            gpu,
        };
        engine.fill_tables()?;
        Ok(engine)
    }

    /// What never changes after opening: the page table and the tables of rotations.
    fn fill_tables(&mut self) -> Result<(), DeviceError> {
        for (address, pages) in self.state.page_tables() {
            let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
            self.regions.write(&self.gpu, address, &bytes)?;
        }
        let all_rows = ChunkHead::new(0, 0, step::ROWS);
        let bytes = step::bytes_of(&all_rows);
        self.regions
            .write(&self.gpu, self.plans.addresses.all_rows, bytes)?;
        for (address, table) in &self.plans.tables {
            let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
            self.regions.write(&self.gpu, *address, &bytes)?;
        }
        for (address, bytes) in self.plans.zeroed {
            self.regions.zero(&self.gpu, address, bytes)?;
        }
        for slot in 0..self.state.slots.n {
            self.clear_slot(slot)?;
        }
        self.gpu.sync()
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    pub(crate) fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Tokens of the longest chunk.
    pub(crate) fn chunk_rows(&self) -> usize {
        self.plans.chunk_rows()
    }

    /// Bytes at an address of any region, after everything queued.
    pub(crate) fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        self.regions.read(&self.gpu, address, bytes)
    }

    /// Puts a slot's recurrent states at the beginning of a text; does not wait.
    pub(crate) fn clear_slot(&mut self, slot: usize) -> Result<(), DeviceError> {
        for group in &self.state.delta {
            for (base, layer_bytes) in [
                (group.states, group.state_bytes),
                (group.windows, group.window_bytes),
            ] {
                let bytes = group.slot_bytes(layer_bytes);
                let at = base + (slot * bytes) as u64;
                self.regions.zero(&self.gpu, at, bytes)?;
            }
        }
        Ok(())
    }

    /// Runs a step, waits, and answers `asks`, one for each asked row of the header.
    pub(crate) fn step(&mut self, step: &Step, asks: &[&Ask]) -> Result<Vec<Row>, DeviceError> {
        let rows = usize::try_from(step.rows).unwrap_or(0);
        let key = Key::Step(step::bucket(rows));
        let bytes = step::bytes_of(step);
        self.headers.up.step.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        #[cfg(feature = "inspect")]
        if self.watched.is_some() {
            let (to, plans) = (self.plans.addresses, &self.plans);
            self.headers.up.queue(&self.gpu, to, plans, key)?;
            self.queue_watched(key, rows)?;
            return Ok(Vec::new());
        }
        self.queue(key)?;
        self.gpu.sync()?;
        self.headers.in_flight = false;
        self.answer(asks)
    }

    /// Runs a chunk and answers `asks` `(row of the chunk, ask)`; without any it does not wait.
    pub(crate) fn chunk(
        &mut self,
        head: &mut ChunkHead,
        tokens: &[TokenId],
        asks: &[(usize, &Ask)],
    ) -> Result<Vec<Row>, DeviceError> {
        if self.chains {
            let place = (head.slot as usize, head.committed as usize);
            return self.chain(place, tokens, asks);
        }
        self.write_chunk(head, tokens, asks)?;
        let key = Key::Chunk(self.plans.chunk_bucket(tokens.len()));
        #[cfg(feature = "inspect")]
        if self.watched.is_some() {
            self.upload_chunk(tokens.len())?;
            self.queue_watched(key, tokens.len())?;
            return Ok(Vec::new());
        }
        self.queue(key)?;
        let mut answers = Vec::with_capacity(asks.len());
        for (i, batch) in asks.chunks(step::ROWS).enumerate() {
            if i > 0 {
                // The first batch went up with the chunk.
                self.write_chunk(head, &[], batch)?;
                self.upload_chunk(0)?;
            }
            let key = Key::Head(step::bucket(batch.len()));
            self.queue(key)?;
            self.gpu.sync()?;
            self.headers.in_flight = false;
            let asks: Vec<&Ask> = batch.iter().map(|(_, ask)| *ask).collect();
            answers.append(&mut self.answer(&asks)?);
        }
        Ok(answers)
    }

    /// Puts a chunk's header where the card will read it.
    fn write_chunk(
        &mut self,
        head: &mut ChunkHead,
        tokens: &[TokenId],
        asks: &[(usize, &Ask)],
    ) -> Result<(), DeviceError> {
        self.settle_headers()?;
        head.ask(asks.iter().map(|(row, _)| *row));
        let mut bytes = Vec::with_capacity(ChunkHead::bytes(tokens.len()));
        head.write(tokens, &mut bytes);
        self.headers.up.chunk.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
        Ok(())
    }

    /// Keeps paths; does not wait.
    pub(crate) fn commit(&mut self, commit: &Commit) -> Result<(), DeviceError> {
        self.settle_headers()?;
        let bytes = step::bytes_of(commit);
        self.headers.up.commit.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        self.queue(self.plans.commit_key(commit.nodes()))
    }

    /// Runs draft blocks, waits, and gives the `k` best tokens of every asked row of the header.
    pub(crate) fn draft(&mut self, step: &Step, k: usize) -> Result<Vec<Row>, DeviceError> {
        let rows = usize::try_from(step.rows).unwrap_or(0);
        let bytes = step::bytes_of(step);
        self.headers.up.draft.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        self.queue(Key::Draft(step::bucket(rows)))?;
        self.gpu.sync()?;
        self.headers.in_flight = false;
        let ask = Ask::top(k);
        let asked = usize::try_from(step.asked).unwrap_or(0);
        self.answer(&vec![&ask; asked])
    }

    /// Waits until nothing queued reads a header any more.
    fn settle_headers(&mut self) -> Result<(), DeviceError> {
        if self.headers.in_flight {
            self.gpu.sync()?;
            self.headers.in_flight = false;
        }
        Ok(())
    }

    /// Queues a plan with its header before it and its rows after it.
    fn queue(&mut self, key: Key) -> Result<(), DeviceError> {
        self.headers.in_flight = true;
        let Engine {
            runs,
            plans,
            headers,
            gpu,
            ..
        } = self;
        let addresses = plans.addresses;
        let Headers { up, rows, .. } = headers;
        let first = |gpu: &Gpu| up.queue(gpu, addresses, plans, key);
        let last = |gpu: &Gpu| download(gpu, rows, addresses, plans, key);
        runs.run(gpu, key, first, last)
    }

    /// Uploads the head of the chunk header and `rows` tokens.
    fn upload_chunk(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.headers.in_flight = true;
        let to = self.plans.addresses.chunk;
        let range = 0..ChunkHead::bytes(rows);
        // SAFETY: whoever writes the header next waits first, as `in_flight` tells.
        unsafe {
            self.gpu
                .copy_to_card(self.gpu.stream(), to, &self.headers.up.chunk, range)
        }
    }

    /// Answers from what the card's reduction left behind, or from whole rows of logits.
    fn answer(&self, asks: &[&Ask]) -> Result<Vec<Row>, DeviceError> {
        let reduce = self.plans.reduce;
        let answers = asks.iter().enumerate().map(|(i, ask)| match ask.want {
            Want::Top(k) if k <= reduce.k && ask.edits.is_none() => {
                Ok(top(reduce, self.headers.rows.as_slice(), i, k))
            }
            _ => {
                let address = self.plans.addresses.logits + (4 * i * reduce.stride) as u64;
                let bytes = self.read(address, 4 * reduce.vocab)?;
                let words = bytes.chunks_exact(4);
                let raw = words.map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]]));
                Ok(answer::from_logits(ask, raw.collect()))
            }
        });
        answers.collect()
    }
}

/// The first `k` candidates of reduced row `i`.
fn top(reduce: rows::Reduce, bytes: &[u8], i: usize, k: usize) -> Row {
    let row = reduce.read(bytes, i);
    let n = k.min(row.ids.len());
    Row {
        ids: row.ids[..n].iter().map(|id| TokenId(*id)).collect(),
        logits: row.logits[..n].to_vec(),
        raw: row.raw[..n].to_vec(),
        lse: row.lse,
        raw_lse: row.raw_lse,
    }
}

impl Uploads {
    /// Queues the copy of the header that `key` reads.
    fn queue(&self, gpu: &Gpu, to: Addresses, plans: &Plans, key: Key) -> Result<(), DeviceError> {
        let (to, from, bytes) = match key {
            Key::Step(_) => (to.step, &self.step, size_of::<Step>()),
            Key::Chunk(rows) => {
                let rows = rows.min(plans.chunk_rows());
                (to.chunk, &self.chunk, ChunkHead::bytes(rows))
            }
            Key::Commit(_) => (to.commit, &self.commit, size_of::<Commit>()),
            Key::Draft(_) => (to.draft, &self.draft, size_of::<Step>()),
            Key::Head(_) => return Ok(()),
        };
        // SAFETY: the header is not written before the stream has passed the copy: a step waits at its end,
        // and writers of the others wait while `in_flight` is set.
        unsafe { gpu.copy_to_card(gpu.stream(), to, from, 0..bytes) }
    }
}

/// Queues the copy of the reduced rows that `key` makes.
fn download(
    gpu: &Gpu,
    rows: &mut Pinned<u8>,
    from: Addresses,
    plans: &Plans,
    key: Key,
) -> Result<(), DeviceError> {
    let (Key::Step(bucket) | Key::Head(bucket) | Key::Draft(bucket)) = key else {
        return Ok(());
    };
    let bytes = plans.reduce.out_bytes(bucket);
    // SAFETY: read only after the wait that follows.
    unsafe { gpu.copy_to_host(gpu.stream(), rows, 0..bytes, from.rows) }
}
