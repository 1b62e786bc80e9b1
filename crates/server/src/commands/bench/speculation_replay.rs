//! The speed-up of drafting with the bundled pair, in simulated time, so that it is the same on
//! every machine.
//!
//! Target and block draft run once over every prompt, token by token; the target's own head is left
//! out, since what it drafts depends on the tree so far. The recording has the row of each
//! generated token and the draft's candidates after it. Trees never change a reply, so a recording
//! serves every way of drafting. Each way runs a scheduler over the recordings, and each of its
//! passes takes the time of a stored cost table.

#![allow(clippy::print_stderr, reason = "the test prints its speed-ups")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use chat::SpecialTokens;
use contract::{
    Backend, Capacity, CommitItem, DeviceError, DraftCandidates, DraftItem, KvFormat, KvFormats,
    Limits, LoadConfig, LogitsRequest, LogitsRow, NodeIdx, Runner, RunnerInfo, SeqId, SnapshotId,
    SnapshotInfo, SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cpu::CpuBackend;
use decode::{
    CostTable, DraftSource, Event, GenerationParams, Job, JobId, Sampling, Scheduler,
    SchedulerConfig, SchedulerState, SpeculationConfig,
};

use super::prompt_table::entries;
use super::speculation_ab::{SOURCE_TOKENS, SOURCES};
use super::tune::{Prompt, prompts, render};
use super::{ModelSource, draft, model};
use crate::open::{self, drafting};
use crate::settings::GenerationDefaults;

/// Prompts from source files: as many as of any other class.
const N_SOURCES: usize = 5;
/// Tokens of a source file that its second copy begins with.
const REPEATED_TOKENS: usize = 80;
/// Repetitions of all prompts on a long-lived server.
const REPETITIONS: usize = 12;
/// Tokens of a reply.
const TOKENS: usize = 64;
/// Recorded candidates per drafted position, as many as schedulers request.
const CANDIDATES: usize = 8;
/// The most drafted nodes of a tree, as in serving.
const BUDGET: usize = 22;
/// The required speed-up of every class.
const MIN_SPEEDUP: f64 = 0.97;
/// The required speed-up of code.
const MIN_SPEEDUP_ON_CODE: f64 = 1.25;

/// The required speed-up of some classes on the CPU, in the order of the prompts.
const MIN_SPEEDUPS: [(&str, f64); 4] = [
    ("code", 1.6),
    ("chat", 1.45),
    ("prose", 1.1),
    ("repeated", 1.3),
];

/// Milliseconds of passes, as measured on an idle machine.
struct PassTimes {
    /// Rows of a verify, and the time of the verify and its commit.
    verify: &'static [(usize, f64)],
    /// The draft pass of one sequence.
    draft: f64,
}

/// Two cores of an AMD EPYC, as in `benches/results/speculation_cpu.jsonl`.
const CPU: PassTimes = PassTimes {
    verify: &[
        (1, 0.669),
        (2, 0.756),
        (4, 1.087),
        (8, 2.016),
        (16, 3.435),
        (24, 4.845),
    ],
    draft: 0.909,
};

/// One H200, as in `benches/results/speculation_card.jsonl`.
const GPU: PassTimes = PassTimes {
    verify: &[
        (1, 0.387),
        (2, 0.438),
        (8, 0.438),
        (9, 0.607),
        (16, 0.607),
        (17, 0.740),
        (23, 0.740),
    ],
    draft: 0.199,
};

impl PassTimes {
    /// A cost table in which drafts and the rows beyond the first cost `scale` times as much.
    fn costs(&self, scale: f64) -> CostTable {
        let one = self.verify[0].1;
        let point = |&(rows, ms): &(usize, f64)| (rows, (one + scale * (ms - one)) * 1e-3);
        let verify = self.verify.iter().map(point).collect();
        CostTable::new(verify)
            .and_then(|costs| {
                costs.with_draft(DraftSource::Block, vec![(1, scale * self.draft * 1e-3)])
            })
            .unwrap()
    }
}

/// The outputs of target and draft for one prompt.
struct Recording {
    class: String,
    prompt: Vec<TokenId>,
    /// The greedy reply.
    tokens: Vec<TokenId>,
    /// The logits row of each of its tokens.
    rows: Vec<LogitsRow>,
    /// The draft's candidates with each token but the last as root.
    drafts: Vec<DraftCandidates>,
}

fn ember(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember");
    root.join(name)
}

/// Recordings of the bundled pair for the prompts of the benchmark.
fn record_all() -> (RunnerInfo, Vec<Recording>) {
    let (target, beside) = (ember("ember.gguf"), ember("ember-draft.gguf"));
    let source = ModelSource {
        model: Some(&target),
        synthetic: None,
        seed: 1,
        bundled: None,
    };
    let loaded = model(&source).unwrap();
    let mut all = prompts(None, &loaded).unwrap();
    let own = include_str!("../../../../../benches/prompts.jsonl");
    let mut prose = entries(own).unwrap();
    prose.retain(|entry| entry["class"] == "prose");
    all.extend(render(&prose, "benches/prompts.jsonl", &loaded).unwrap());
    let side = open::text_side(&loaded, None, None, GenerationDefaults::default()).unwrap();
    for text in SOURCES.into_iter().take(N_SOURCES) {
        let mut tokens = side.tokenizer.encode(text, SpecialTokens::AsText).unwrap();
        tokens.truncate(SOURCE_TOKENS);
        let class = "source".to_owned();
        // The same file once more, as agents repeat what they edit.
        let mut repeated = tokens.clone();
        repeated.extend_from_slice(&tokens[..REPEATED_TOKENS.min(tokens.len())]);
        all.push(Prompt { class, tokens });
        let class = "repeated".to_owned();
        all.push(Prompt {
            class,
            tokens: repeated,
        });
    }
    let longest = all.iter().map(|prompt| prompt.tokens.len()).max().unwrap();
    let kv = KvFormat::F16;
    let config = LoadConfig {
        target: drafting::Drafting::none().target(&loaded.spec),
        weights: loaded.weights.clone(),
        draft: Some(draft(&loaded, beside.to_str(), &source, kv).unwrap()),
        batch_invariant: false,
        kv: KvFormats { k: kv, v: kv },
        limits: Limits {
            sequences: 1,
            context: longest + TOKENS,
            tree_nodes: BUDGET + 1,
            prefill_chunk: 512,
            pool_tokens: None,
        },
    };
    let backend = CpuBackend::new(cpu::CpuOptions::default());
    let mut runner = backend.open(config, &mut |_| {}).unwrap();
    let eos = &loaded.vocab.eos;
    let recordings = all
        .into_iter()
        .map(|prompt| record(&mut *runner, prompt, eos));
    let recordings = recordings.collect();
    (runner.info().clone(), recordings)
}

/// Generates a greedy reply and drafts after every token.
fn record(runner: &mut dyn Runner, prompt: Prompt, eos: &[TokenId]) -> Recording {
    let depth = runner.info().draft_depth.unwrap();
    let seq = runner.open(prompt.tokens.len() + TOKENS).unwrap();
    let requests = [(prompt.tokens.len() - 1, LogitsRequest::top_k(1))];
    let mut rows = runner.prefill(seq, &prompt.tokens, &requests).unwrap();
    let (mut tokens, mut drafts) = (vec![rows[0].ids[0]], Vec::new());
    while let Some(root) = tokens.last().copied()
        && tokens.len() < TOKENS
        && !eos.contains(&root)
    {
        let items = [DraftItem { seq, root }];
        drafts.append(&mut runner.draft(&items, depth, CANDIDATES).unwrap());
        let tree = Tree::root(root);
        let requests = [LogitsRequest::top_k(1)];
        let tree = &tree;
        let requests = &requests;
        let item = VerifyItem {
            seq,
            tree,
            requests,
        };
        let row = runner.verify(&[item]).unwrap().remove(0).remove(0);
        let path = &tree.path_to(NodeIdx::ROOT);
        runner.commit(&[CommitItem { seq, path }]).unwrap();
        tokens.push(row.ids[0]);
        rows.push(row);
    }
    runner.close(seq);
    Recording {
        class: prompt.class,
        prompt: prompt.tokens,
        tokens,
        rows,
        drafts,
    }
}

thread_local! {
    /// Seconds of all passes, by the cost table.
    static SPENT: Cell<f64> = const { Cell::new(0.0) };
    /// The clock, in seconds.
    static NOW: Cell<f64> = const { Cell::new(0.0) };
    /// State of the random delays, if passes are delayed.
    static DELAYS: Cell<Option<u64>> = const { Cell::new(None) };
}

fn now() -> Duration {
    Duration::from_secs_f64(NOW.get())
}

/// Advances the time by a pass of `seconds`. With delays, the clock advances by 0.8 to 2.8 times as
/// much, mostly by little more than 0.8 times.
fn pass(seconds: f64) {
    SPENT.set(SPENT.get() + seconds);
    let factor = DELAYS.get().map_or(1.0, |state| {
        // Knuth's MMIX generator, of which the high bits are used.
        let state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        DELAYS.set(Some(state));
        0.8 + 2.0 * ((state >> 40) as f64 / f64::from(1 << 24)).powi(8)
    });
    NOW.set(NOW.get() + seconds * factor);
}

/// Replays recordings, one sequence at a time, in the time of a cost table.
struct ReplayRunner {
    info: RunnerInfo,
    recordings: Rc<Vec<Recording>>,
    costs: CostTable,
    /// A constant surprisal of every token in nats, which hides the target's own.
    surprisal: Option<f32>,
    open: Option<OpenSequence>,
    opened: u64,
}

/// The open sequence.
struct OpenSequence {
    seq: SeqId,
    max_len: usize,
    /// The prefilled tokens.
    prefilled: Vec<TokenId>,
    /// Index of the recording of this prompt.
    recording: usize,
    /// Committed tokens of the reply.
    committed: usize,
}

impl ReplayRunner {
    fn row(&self, recording: usize, token: usize) -> LogitsRow {
        // No token beyond the reply's end is accepted, so any row will do there.
        let rows = &self.recordings[recording].rows;
        let mut row = rows[token.min(rows.len() - 1)].clone();
        if let Some(surprisal) = self.surprisal {
            row.lse = row.logits[0] + surprisal;
        }
        row
    }

    fn opened(&mut self) -> &mut OpenSequence {
        self.open.as_mut().unwrap()
    }
}

impl Runner for ReplayRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn capacity(&self) -> Capacity {
        let used = self.open.as_ref().map_or(0, |open| open.max_len);
        Capacity {
            sequences: usize::from(self.open.is_none()),
            tokens: self.info.pool.tokens() - used,
            evictable_tokens: 0,
            snapshot_bytes: 0,
        }
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.opened += 1;
        let seq = SeqId(self.opened);
        self.open = Some(OpenSequence {
            seq,
            max_len,
            prefilled: Vec::new(),
            recording: usize::MAX,
            committed: 0,
        });
        Ok(seq)
    }

    fn close(&mut self, seq: SeqId) {
        self.open.take_if(|open| open.seq == seq);
    }

    fn prefill(
        &mut self,
        _seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let recordings = Rc::clone(&self.recordings);
        let open = self.opened();
        open.prefilled.extend(tokens);
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let which = recordings
            .iter()
            .position(|recording| recording.prompt == open.prefilled);
        open.recording = which.unwrap();
        let which = open.recording;
        Ok(vec![self.row(which, 0)])
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        pass(self.costs.draft(DraftSource::Block, items.len()));
        let recordings = Rc::clone(&self.recordings);
        let open = self.opened();
        let recording = &recordings[open.recording];
        assert_eq!(
            (items[0].root, k),
            (recording.tokens[open.committed], CANDIDATES)
        );
        let mut found = recording.drafts[open.committed].clone();
        found.ids.truncate(depth * k);
        found.log_probs.truncate(depth * k);
        found.lse.truncate(depth);
        Ok(vec![found])
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let tree = items[0].tree;
        pass(self.costs.verify(tree.len()));
        let open = self.open.as_ref().unwrap();
        // A node on the reply's path has the row of the next token; other nodes are never accepted.
        let row = |node: NodeIdx| self.row(open.recording, open.committed + tree.depth(node) + 1);
        Ok(vec![tree.nodes().map(row).collect()])
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        self.opened().committed += items[0].path.len();
        Ok(())
    }

    fn discard(&mut self, _seq: SeqId) -> Result<(), DeviceError> {
        Ok(())
    }

    fn snapshot(
        &mut self,
        _seq: SeqId,
        _place: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        Err(unsupported("snapshot"))
    }

    fn restore(&mut self, _seq: SeqId, _snapshot: SnapshotId) -> Result<(), DeviceError> {
        Err(unsupported("restore"))
    }

    fn free_snapshot(&mut self, _snapshot: SnapshotId) {}

    fn export(&mut self, _id: SnapshotId, _sink: &mut dyn Write) -> Result<(), DeviceError> {
        Err(unsupported("export"))
    }

    fn import(&mut self, _source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        Err(unsupported("import"))
    }
}

fn unsupported(call: &'static str) -> DeviceError {
    DeviceError::InvalidCall {
        call,
        detail: "a replay has no snapshots".to_owned(),
    }
}

/// The recordings of all prompts.
type Recordings = (RunnerInfo, Rc<Vec<Recording>>);

/// How the number of drafted nodes is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
enum SpeculationMode {
    /// By measured costs, as in serving.
    Stop,
    /// By measured costs, with a constant surprisal in nats instead of the target's own.
    ConstantSurprisal(f32),
    /// Always a whole tree.
    Always,
}

/// Speed-up of each class (plain time over drafted time) over the prompts in `order`, on a new
/// server.
fn speedups(
    of: &Recordings,
    order: &[usize],
    (mode, costs): (SpeculationMode, CostTable),
) -> BTreeMap<String, f64> {
    let (info, recordings) = of;
    let runner = ReplayRunner {
        info: info.clone(),
        recordings: Rc::clone(recordings),
        costs: costs.clone(),
        surprisal: match mode {
            SpeculationMode::ConstantSurprisal(nats) => Some(nats),
            SpeculationMode::Stop | SpeculationMode::Always => None,
        },
        open: None,
        opened: 0,
    };
    let config = SchedulerConfig {
        max_sequences: 1,
        speculation: SpeculationConfig {
            budget: BUDGET,
            costs: (mode != SpeculationMode::Always).then(|| costs.clone()),
            ..SpeculationConfig::default()
        },
        clock: Some(now),
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(Box::new(runner), config);
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for recording in order.iter().map(|i| &recordings[*i]) {
        let (reply, seconds) = generate(&mut scheduler, recording);
        assert_eq!(reply, recording.tokens, "{mode:?} changed a reply");
        let plainly = (reply.len() - 1) as f64 * costs.verify(1);
        let sum = sums.entry(recording.class.clone()).or_default();
        *sum = (sum.0 + plainly, sum.1 + seconds);
    }
    let gain = |(class, sum): (String, (f64, f64))| (class, sum.0 / sum.1);
    sums.into_iter().map(gain).collect()
}

/// A reply, and the seconds from its first token to its last.
fn generate(scheduler: &mut Scheduler, recording: &Recording) -> (Vec<TokenId>, f64) {
    let job = Job {
        id: JobId(0),
        prompt: recording.prompt.as_slice().into(),
        choices: 1,
        params: GenerationParams {
            sampling: Sampling::greedy(),
            max_tokens: recording.tokens.len(),
            use_prefix_cache: false,
            ..GenerationParams::default()
        },
        priority: 0,
    };
    scheduler.submit(job).unwrap();
    let (mut events, mut reply, mut start) = (Vec::new(), Vec::new(), None);
    loop {
        let progress = scheduler.step(&mut events).unwrap();
        for (_, event) in events.drain(..) {
            match event {
                Event::Tokens { tokens, .. } => {
                    reply.extend(tokens.iter().map(|token| token.id));
                    start.get_or_insert(SPENT.get());
                }
                Event::Failed { error } => panic!("{error}"),
                _ => {}
            }
        }
        if progress == SchedulerState::Idle {
            return (reply, SPENT.get() - start.unwrap());
        }
    }
}

/// Whether every class has its required speed-up.
fn suffices(speedups: &BTreeMap<String, f64>) -> bool {
    let code = speedups
        .get("code")
        .is_none_or(|speedup| *speedup >= MIN_SPEEDUP_ON_CODE);
    code && speedups.values().all(|speedup| *speedup >= MIN_SPEEDUP)
}

#[test]
fn drafting_speeds_code_up_and_slows_no_class_down() {
    let (info, recordings) = record_all();
    let of = (info, Rc::new(recordings));
    let all: Vec<usize> = (0..of.1.len()).collect();
    let stop = speedups(&of, &all, (SpeculationMode::Stop, CPU.costs(1.0)));
    eprintln!("  plain time over drafted time: {stop:.3?}");
    assert_eq!(stop.len(), 7);
    assert!(suffices(&stop), "{stop:?}");
    for (class, least) in MIN_SPEEDUPS {
        assert!(stop[class] >= least, "{class}: {stop:?}");
    }
    // Neither the order nor the machine matters: reversed order, each class alone, and passes that
    // cost less or more than plain decoding.
    let reversed: Vec<usize> = all.iter().rev().copied().collect();
    let mut orders = vec![all.clone(), reversed];
    for class in stop.keys() {
        let own = all.iter().filter(|i| of.1[**i].class == *class);
        orders.push(own.copied().collect());
    }
    for order in &orders {
        for scale in [0.8, 1.0, 1.2] {
            let found = speedups(&of, order, (SpeculationMode::Stop, CPU.costs(scale)));
            let worst = found.values().copied().fold(f64::INFINITY, f64::min);
            eprintln!("  costs times {scale}: {found:.3?}");
            assert!(worst >= MIN_SPEEDUP, "{scale}, {order:?}: {found:?}");
        }
    }
    // Random delays on a long-lived server do not mislead the controller.
    let repeated = all.repeat(REPETITIONS);
    DELAYS.set(Some(3));
    let busy = speedups(&of, &repeated, (SpeculationMode::Stop, CPU.costs(1.0)));
    DELAYS.set(None);
    eprintln!("  {REPETITIONS} repetitions with delays: {busy:.3?}");
    assert!(suffices(&busy), "{busy:?}");
    // With cheap drafts, nearly every step drafts.
    let gpu = speedups(&of, &all, (SpeculationMode::Stop, GPU.costs(1.0)));
    eprintln!("  on a GPU: {gpu:.3?}");
    assert!(suffices(&gpu) && gpu["code"] > 3.0, "{gpu:?}");
    // Without measured costs, drafting slows sources down.
    let always = speedups(&of, &all, (SpeculationMode::Always, CPU.costs(1.0)));
    eprintln!("  a whole tree every time: {always:.3?}");
    assert!(always["source"] < 0.5 && !suffices(&always), "{always:?}");
    // With a constant surprisal of 0, every text promises much: failed trials use up the budget,
    // and code gains too little.
    let both = [&orders[0], &orders[1]];
    let fails = |mode: SpeculationMode| {
        let cases = both
            .iter()
            .flat_map(|order| [1.0, 1.2].map(|scale| (*order, scale)));
        let mut found = cases.map(|(order, scale)| speedups(&of, order, (mode, CPU.costs(scale))));
        found.find(|speedups| !suffices(speedups))
    };
    assert_eq!(fails(SpeculationMode::Stop), None);
    let found = fails(SpeculationMode::ConstantSurprisal(0.0));
    eprintln!("  constant surprisal of 0 nats: {found:.3?}");
    assert!(found.is_some(), "a constant surprisal suffices too");
}
