//! Running plans: headers up, launches, rows down.
//!
//! A list of launches runs one by one or as a captured graph; only `launcher` knows which. All
//! work but copies of states and commits beside drafts is on one stream, so what is queued later
//! sees what was queued before.

mod boundary;
mod commit;
pub(crate) mod copy_stream;
mod draft;
mod exchange;
pub(crate) mod expert_slots;
pub(crate) mod host_logits;
mod launcher;
#[cfg(feature = "inspect")]
mod layer_outputs;
mod masses;
mod mtp;
mod one_launch;
mod pending_features;
mod prefill_as_steps;
mod regions;
mod steps;
mod transfers;

use std::ops::Range;
use std::sync::Arc;

use contract::protocol::PrefillChunks;
use contract::{
    DeviceError, LogitsProcessors, LogitsRequest, LogitsRow, LogitsSelection, ModelSpec, TokenId,
    Tree,
};

use crate::driver::{Gpu, Pinned};
use crate::launch::logits;
use crate::plan::{EDIT_BYTES, PlanKey, Plans};
use crate::state::State;
use crate::step::{self, ChunkHead, Commit, HIDDEN_ROWS, MtpStep, Step};

pub(crate) use boundary::{Boundary, PeerAccess};
use commit::CommitStream;
use copy_stream::CopyStream;
pub(crate) use draft::Reach;
use exchange::ExchangeEnd;
use expert_slots::ExpertSlots;
pub(crate) use launcher::{LaunchMode, Launcher};
use pending_features::PendingFeatures;
pub(crate) use regions::Regions;
pub(crate) use steps::BegunStep;
use transfers::{Downloads, Uploads, download};

/// One loaded model on one GPU. Fields are dropped in order: what points at memory goes before the
/// memory.
pub(crate) struct Engine {
    commit_stream: CommitStream,
    launcher: Launcher,
    plans: Plans,
    headers: Headers,
    /// Where experts lie, if not all of them are on the device.
    expert_slots: Option<ExpertSlots>,
    regions: Regions,
    state: Arc<State>,
    /// Copies of states; its stream goes before what it copies.
    copy_stream: CopyStream,
    /// Captured hidden states that the draft has not consumed yet.
    pending: PendingFeatures,
    spec: Arc<ModelSpec>,
    /// Where rows come from and go to, in a pipeline stage.
    boundary: Option<Boundary>,
    /// What it exchanges with other shards of a tensor split.
    exchange: Option<ExchangeEnd>,
    /// Whether prompts are prefilled as decode steps over single-branch trees.
    prefill_as_steps: bool,
    /// The residual stream after each layer of the last chunk, while layers are captured.
    #[cfg(feature = "inspect")]
    captured_layers: Option<Vec<Vec<u8>>>,
    gpu: Gpu,
}

/// Page-locked memory for headers to the GPU and rows from it.
struct Headers {
    up: Uploads,
    down: Downloads,
    /// One whole row of logits.
    logits: Pinned<f32>,
    /// Masses of rows.
    masses: Pinned<u8>,
    /// Whether something queued may still read `up.chunk`, `up.nodes`, `up.commit`, `up.mtp_commit`
    /// or `up.table`.
    in_flight: bool,
    /// Whether something queued may still read `up.pending`.
    pending_in_flight: bool,
}

/// Bytes of page-locked memory that an engine keeps. They hold headers (step, short chunk, draft,
/// chunk, commit, pending features, two of a multi-token-prediction head), edits, queries of masses
/// and their results, a logits row, reduced rows, lists of a draft and page tables.
pub(crate) fn pinned_bytes(plans: &Plans, state: &State) -> [usize; 15] {
    let mtp = state.hidden.map_or(0, |_| size_of::<MtpStep>());
    [
        size_of::<Step>(),
        size_of::<Step>(),
        size_of::<Step>(),
        ChunkHead::bytes(plans.chunk_rows()),
        size_of::<Commit>(),
        size_of::<Commit>(),
        mtp,
        mtp,
        EDIT_BYTES,
        logits::MASS_QUERIES_BYTES,
        logits::mass_bytes(step::ROWS),
        size_of::<f32>() * plans.reduce.vocab,
        plans.reduce.out_bytes(step::ROWS),
        plans.draft_lists.bytes(step::ROWS),
        4 * state.slots.sequences * state.slots.pages_per_sequence,
    ]
}

impl Engine {
    /// An engine whose weights are loaded and whose plans are compiled.
    pub(crate) fn new(
        gpu: Gpu,
        spec: Arc<ModelSpec>,
        state: State,
        regions: Regions,
        (plans, launcher): (Plans, Launcher),
        prefill_as_steps: bool,
    ) -> Result<Engine, DeviceError> {
        let [
            step,
            nodes,
            draft,
            chunk,
            commit,
            pending,
            mtp_commit,
            mtp_draft,
            edits,
            queries,
            masses,
            logits,
            rows,
            draft_lists,
            table,
        ] = pinned_bytes(&plans, &state);
        let headers = Headers {
            up: Uploads {
                step: gpu.pinned(step)?,
                draft: gpu.pinned(draft)?,
                chunk: gpu.pinned(chunk)?,
                nodes: gpu.pinned(nodes)?,
                commit: gpu.pinned(commit)?,
                pending: gpu.pinned(pending)?,
                mtp_commit: gpu.pinned(mtp_commit)?,
                mtp_draft: gpu.pinned(mtp_draft)?,
                edits: gpu.pinned(edits)?,
                masses: gpu.pinned(queries)?,
                table: gpu.pinned(table / size_of::<i32>())?,
            },
            logits: gpu.pinned(logits / size_of::<f32>())?,
            masses: gpu.pinned(masses)?,
            down: Downloads {
                rows: gpu.pinned(rows)?,
                draft_lists: gpu.pinned(draft_lists)?,
            },
            in_flight: false,
            pending_in_flight: false,
        };
        let waits = state.draft.as_ref().map_or(0, |_| state.slots.sequences);
        let commit_stream = CommitStream::new(&gpu)?;
        let copy_stream = CopyStream::new(&gpu, state.slots.sequences)?;
        let boundary = if plans.stage.is_whole() {
            None
        } else {
            Some(Boundary::new(&gpu, &plans)?)
        };
        let exchange = ExchangeEnd::new(&gpu, &plans);
        let mut engine = Engine {
            commit_stream,
            launcher,
            plans,
            headers,
            expert_slots: None,
            regions,
            state: Arc::new(state),
            copy_stream,
            pending: PendingFeatures::new(waits),
            spec,
            boundary,
            exchange,
            prefill_as_steps,
            #[cfg(feature = "inspect")]
            captured_layers: None,
            gpu,
        };
        engine.fill_tables()?;
        Ok(engine)
    }

    /// Uploads what exists from the start. The draft's page tables and the rotation tables never
    /// change; each entry of a slot's table names some page until the slot has its own pages.
    fn fill_tables(&mut self) -> Result<(), DeviceError> {
        for (address, pages) in self.state.page_tables() {
            let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
            self.regions.write(&self.gpu, address, &bytes)?;
        }
        let mut all_rows = ChunkHead::new(0, 0, step::ROWS);
        all_rows.request_logits(0..step::ROWS);
        let bytes = step::bytes_of(&all_rows);
        self.regions
            .write(&self.gpu, self.plans.addresses.all_rows, bytes)?;
        for (address, table) in &self.plans.tables {
            self.regions.write(&self.gpu, *address, table)?;
        }
        for (address, bytes) in self.plans.zeroed {
            self.regions.zero(&self.gpu, address, bytes)?;
        }
        for slot in 0..self.state.slots.sequences {
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

    #[cfg(feature = "inspect")]
    pub(crate) fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// For other threads: where everything lies.
    pub(crate) fn shared_state(&self) -> Arc<State> {
        Arc::clone(&self.state)
    }

    /// Tokens of the longest chunk.
    pub(crate) fn chunk_rows(&self) -> usize {
        self.plans.chunk_rows()
    }

    /// The passes in which `n` tokens after `committed` ones are best read, as the runner's limits
    /// cut them and finer.
    pub(crate) fn passes(
        &self,
        chunks: PrefillChunks,
        committed: usize,
        n: usize,
    ) -> Vec<Range<usize>> {
        let passes = chunks.split(committed, n);
        if self.prefill_as_steps {
            return passes;
        }
        let mut finer = Vec::with_capacity(passes.len());
        for pass in passes {
            let mut begin = pass.start;
            for rows in self.plans.pieces(committed + begin, pass.len()) {
                finer.push(begin..begin + rows);
                begin += rows;
            }
        }
        finer
    }

    /// Bytes at an address of any region, after everything queued.
    #[cfg(feature = "inspect")]
    pub(crate) fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        self.wait_for_all_copies()?;
        self.wait_for_commit()?;
        self.regions.read(&self.gpu, address, bytes)
    }

    /// Writes entries of a slot's page table from entry `first` on, after everything queued; does
    /// not wait for it.
    pub(crate) fn write_table(
        &mut self,
        slot: usize,
        first: usize,
        places: &[usize],
    ) -> Result<(), DeviceError> {
        // What is queued may be about to copy the entries up.
        self.wait_for_headers()?;
        let begin = slot * self.state.slots.pages_per_sequence + first;
        let range = begin..begin + places.len();
        let table = &mut self.headers.up.table;
        for (entry, place) in table.as_mut_slice()[range.clone()].iter_mut().zip(places) {
            *entry = i32::try_from(*place).expect("pages are far below 2^31");
        }
        self.headers.in_flight = true;
        let to = self.state.page_table + 4 * begin as u64;
        // SAFETY: the next write of the table waits first, by `in_flight`.
        unsafe {
            self.gpu
                .copy_to_device(self.gpu.stream(), to, &self.headers.up.table, range)
        }?;
        self.note_upload()
    }

    /// Puts a slot's recurrent states and hidden row at the beginning of a text; does not wait.
    pub(crate) fn clear_slot(&mut self, slot: usize) -> Result<(), DeviceError> {
        self.wait_for_copies(slot)?;
        self.join_commit()?;
        self.drop_features(slot);
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
        let Some(hidden) = self.state.hidden else {
            return Ok(());
        };
        let row = 4 * self.spec.hidden;
        let at = hidden.at + (slot * HIDDEN_ROWS * row) as u64;
        self.regions.zero(&self.gpu, at, row)
    }

    /// Runs a chunk and returns a row for each request `(row of the chunk, request)`. Without
    /// requests it does not wait.
    pub(crate) fn chunk(
        &mut self,
        head: &mut ChunkHead,
        tokens: &[TokenId],
        requests: &[(usize, &LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        if self.prefill_as_steps {
            let place = (head.slot as usize, head.committed as usize);
            return self.prefill_as_steps(place, tokens, requests);
        }
        let slot = head.slot as usize;
        self.join_commit()?;
        // The context of what was said before it goes first: the chunk may come round to the same
        // places.
        self.consume_features(&[slot])?;
        self.write_chunk(head, tokens, requests)?;
        let key = PlanKey::Chunk(self.plans.chunk_bucket(tokens.len()));
        #[cfg(feature = "inspect")]
        if self.captured_layers.is_some() {
            self.wait_for_copies(slot)?;
            self.upload_chunk(tokens.len())?;
            self.queue_captured(key, tokens.len())?;
            return Ok(Vec::new());
        }
        self.begin_pass(tokens.len())?;
        self.queue_after_copies(key, Some(slot))?;
        self.end_pass(key, tokens.len())?;
        let mut answers = Vec::with_capacity(requests.len());
        for (i, batch) in requests.chunks(step::ROWS).enumerate() {
            if i > 0 {
                // The first batch went up with the chunk.
                self.write_chunk(head, &[], batch)?;
                self.upload_chunk(0)?;
            }
            let bucket = step::bucket(batch.len());
            let requests: Vec<&LogitsRequest> = batch.iter().map(|(_, ask)| *ask).collect();
            self.queue(PlanKey::LmHead(bucket))?;
            let edited = self.queue_edits(PlanKey::EditedLmHead(bucket), &requests)?;
            self.sync()?;
            let masses = false;
            answers.append(&mut self.answer(&requests, Reduced { edited, masses })?);
        }
        Ok(answers)
    }

    /// Writes a chunk's header to page-locked memory.
    fn write_chunk(
        &mut self,
        head: &mut ChunkHead,
        tokens: &[TokenId],
        requests: &[(usize, &LogitsRequest)],
    ) -> Result<(), DeviceError> {
        self.wait_for_headers()?;
        head.request_logits(requests.iter().map(|(row, _)| *row));
        let mut bytes = Vec::with_capacity(ChunkHead::bytes(tokens.len()));
        head.write(tokens, &mut bytes);
        self.headers.up.chunk.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
        if self.plans.is_short_prefill(tokens.len()) && !tokens.is_empty() {
            let nodes = Tree::chain(tokens).expect("a short chunk is at most a tree");
            let mut step = Step::new();
            step.push(head.slot as usize, head.committed as usize, &nodes);
            let bytes = step::bytes_of(&step);
            self.headers.up.nodes.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Has a step come behind copies of the states of its slots.
    fn wait_for_tree_copies(&mut self, step: &Step) -> Result<(), DeviceError> {
        let trees = step.tree.iter().take(step.trees as usize);
        let mut slots = trees.map(|tree| tree.slot as usize);
        slots.try_for_each(|slot| self.wait_for_copies(slot))
    }

    /// Waits for all that is queued on the main stream.
    fn sync(&mut self) -> Result<(), DeviceError> {
        self.gpu.sync()?;
        self.headers.in_flight = self.commit_stream.is_open();
        self.headers.pending_in_flight = false;
        Ok(())
    }

    /// Queues a plan with its header before it and its rows after it.
    fn queue(&mut self, key: PlanKey) -> Result<(), DeviceError> {
        self.queue_after_copies(key, None)
    }

    /// The same, each layer behind copies of the slot's states, where one is named.
    fn queue_after_copies(&mut self, key: PlanKey, slot: Option<usize>) -> Result<(), DeviceError> {
        // Its header has a mark of its own, so that a commit before it is not waited for.
        self.headers.in_flight |= !matches!(key, PlanKey::DraftContext(_));
        let Engine {
            launcher,
            plans,
            headers,
            gpu,
            copy_stream,
            boundary,
            ..
        } = self;
        let addresses = plans.addresses;
        let Headers { up, down, .. } = headers;
        let boundary = boundary.as_ref();
        let note = |gpu: &Gpu| match boundary {
            Some(boundary) => boundary.note_upload(gpu),
            None => Ok(()),
        };
        // What is not captured notes its upload at once.
        let notes_at_once = matches!(key, PlanKey::Chunk(_)) && !launcher.captures(key);
        let first = |gpu: &Gpu| {
            up.queue(gpu, addresses, plans, key)?;
            if notes_at_once { note(gpu) } else { Ok(()) }
        };
        let last = |gpu: &Gpu| download(gpu, down, addresses, plans, key);
        let ends = plans.all.get(&key).map_or(&[][..], |plan| &plan.layer_ends);
        let layer_waits = slot.map_or_else(Vec::new, |slot| copy_stream.layer_waits(slot, ends));
        launcher.run(gpu, key, &layer_waits, first, last)?;
        if !notes_at_once {
            note(gpu)?;
        }
        slot.into_iter()
            .for_each(|slot| copy_stream.clear_waits(slot));
        Ok(())
    }

    /// Queues the edits of rows and their reduction; false where none has any, or they are too many
    /// and will be made on the host.
    fn queue_edits(
        &mut self,
        key: PlanKey,
        requests: &[&LogitsRequest],
    ) -> Result<bool, DeviceError> {
        let reduce = self.plans.reduce;
        let items: Vec<(usize, &LogitsProcessors)> = requests
            .iter()
            .enumerate()
            .filter_map(|(i, ask)| Some((i, ask.processors.as_deref()?)))
            .collect();
        if items.is_empty() {
            return Ok(false);
        }
        let blob = logits::edits(&items, reduce.vocab);
        if blob.len() > EDIT_BYTES {
            return Ok(false);
        }
        self.headers.up.edits.as_mut_slice()[..blob.len()].copy_from_slice(&blob);
        let (gpu, to) = (&self.gpu, self.plans.addresses.edits);
        // SAFETY: written again only by the next pass, after this one's wait.
        unsafe { gpu.copy_to_device(gpu.stream(), to, &self.headers.up.edits, 0..blob.len()) }?;
        self.queue(key)?;
        Ok(true)
    }

    /// Rows from the GPU's reduction, or from whole rows of logits.
    fn answer(
        &mut self,
        requests: &[&LogitsRequest],
        made: Reduced,
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let reduce = self.plans.reduce;
        let mut answers = Vec::with_capacity(requests.len());
        for (i, ask) in requests.iter().enumerate() {
            let best = reduce.read(self.headers.down.rows.as_slice(), i);
            let is_as_asked = made.edited || ask.processors.is_none();
            let query = made.query(ask);
            let part = query.and_then(|query| self.mass_part(i, query, &best));
            answers.push(match (ask.selection, part) {
                (_, Some(part)) => part,
                (LogitsSelection::TopK(k), _) if k <= reduce.k && is_as_asked => top(best, k),
                // The GPU's log-sum-exp, where it made one, so that a full row equals its top.
                _ => {
                    let lse = is_as_asked.then_some(best.lse);
                    host_logits::from_logits(ask, self.logits(i)?, lse, best.raw_lse)
                }
            });
        }
        Ok(answers)
    }

    /// A whole row of logits.
    fn logits(&mut self, row: usize) -> Result<Vec<f32>, DeviceError> {
        let reduce = self.plans.reduce;
        self.logits_row((row, reduce.stride), reduce.vocab)
    }

    /// The first `n` logits of a row, rows being `stride` values apart.
    fn logits_row(
        &mut self,
        (row, stride): (usize, usize),
        n: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        let from = self.plans.addresses.logits + (4 * row * stride) as u64;
        let (gpu, to) = (&self.gpu, &mut self.headers.logits);
        // SAFETY: read after the wait below.
        unsafe { gpu.copy_to_host(gpu.stream(), to, 0..n, from) }?;
        gpu.sync()?;
        Ok(to.as_slice()[..n].to_vec())
    }
}

/// What the GPU has made of the rows of a pass besides the reduction of raw logits.
#[derive(Debug, Clone, Copy, Default)]
struct Reduced {
    /// The edits of all rows, and the reduction of the edited ones.
    edited: bool,
    /// The masses of all rows with a query.
    masses: bool,
}

/// The first `k` of the best tokens of a row.
fn top(best: logits::TopLogits, k: usize) -> LogitsRow {
    let n = k.min(best.ids.len());
    LogitsRow {
        ids: best.ids[..n].iter().map(|id| TokenId(*id)).collect(),
        logits: best.logits[..n].to_vec(),
        raw: best.raw[..n].to_vec(),
        lse: best.lse,
        raw_lse: best.raw_lse,
        mass: 0.0,
    }
}
