//! What drafting pays with the bundled pair, in time that a table charges: the same on every machine, however busy.
//!
//! Target and draft run once over every prompt, one token after the other, and what they said is kept: the row that
//! each token was chosen from, and the draft's candidates after it. Since no tree changes a text, that is all that
//! any way of drafting could ask of them. Each way is then a scheduler of its own over what was kept, and each of
//! its passes takes the time that the stored costs name.

#![allow(clippy::print_stderr, reason = "figures are printed")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use chat::SpecialTokens;
use contract::{
    Backend, Capacity, CommitItem, DeviceError, DraftCandidates, DraftItem, KvFormat, KvFormats,
    Limits, LogitsRequest, LogitsRow, NodeIdx, OpenPlan, Runner, RunnerInfo, SeqId, SnapshotId,
    SnapshotInfo, SnapshotLocation, TokenId, Tree, VerifyItem,
};
use cpu::CpuBackend;
use decode::{
    CostTable, Event, GenerationParams, Job, JobId, Progress, Sampling, Scheduler, SchedulerConfig,
    Speculation,
};

use super::speculation_ab::{OF_SOURCE, SOURCES};
use super::tune::{Prompt, prompts};
use super::{ModelSource, draft, model};
use crate::open;
use crate::settings::GenerationDefaults;

/// Sources that are continued: as many as prompts of any other class.
const OF_SOURCES: usize = 5;
/// How often a long-lived server is asked them all.
const TIMES: usize = 12;
/// Tokens of an answer.
const TOKENS: usize = 64;
/// Candidates kept of each drafted position: what schedulers ask for.
const CANDIDATES: usize = 8;
/// Drafted nodes of a tree at most, as in serving.
const BUDGET: usize = 22;
/// What is wanted of every class, and of code.
const NEVER_BELOW: f64 = 0.97;
const ON_CODE: f64 = 1.25;

/// Milliseconds of passes, as measured on a quiet machine.
struct Table {
    /// `(rows, of a verify and its commit)`.
    verify: &'static [(usize, f64)],
    /// Of one sequence.
    draft: f64,
}

/// Two cores of an AMD EPYC, as in `benches/results/speculation_cpu.jsonl`.
const CORES: Table = Table {
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
const CARD: Table = Table {
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

impl Table {
    /// The same, with drafts and rows beyond the first so many times as dear.
    fn costs(&self, dear: f64) -> CostTable {
        let one = self.verify[0].1;
        let point = |&(rows, ms): &(usize, f64)| (rows, (one + dear * (ms - one)) * 1e-3);
        let verify = self.verify.iter().map(point).collect();
        CostTable::new(verify, vec![(1, dear * self.draft * 1e-3)]).unwrap()
    }
}

/// What target and draft say to one prompt.
struct Recording {
    class: String,
    prompt: Vec<TokenId>,
    /// The greedy answer.
    tokens: Vec<TokenId>,
    /// The row that each token of it was chosen from.
    rows: Vec<LogitsRow>,
    /// What the draft says with each token but the last as root.
    drafts: Vec<DraftCandidates>,
}

fn ember(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember");
    root.join(name)
}

/// Answers of the bundled pair to the prompts of the bench.
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
    let side = open::text_side(&loaded, None, None, GenerationDefaults::default()).unwrap();
    for text in SOURCES.into_iter().take(OF_SOURCES) {
        let mut tokens = side.tokenizer.encode(text, SpecialTokens::AsText).unwrap();
        tokens.truncate(OF_SOURCE);
        let class = "source".to_owned();
        all.push(Prompt { class, tokens });
    }
    let longest = all.iter().map(|prompt| prompt.tokens.len()).max().unwrap();
    let kv = KvFormat::F16;
    let plan = OpenPlan {
        target: loaded.spec.clone(),
        weights: loaded.weights.clone(),
        draft: Some(draft(&loaded, beside.to_str(), &source, kv).unwrap()),
        batch_invariant: false,
        kv: KvFormats { k: kv, v: kv },
        limits: Limits {
            sequences: 1,
            context: longest + TOKENS,
            tree_nodes: BUDGET + 1,
            prefill_chunk: 512,
            pool: None,
        },
    };
    let backend = CpuBackend::new(cpu::CpuOptions::default());
    let mut runner = backend.open(plan, &mut |_| {}).unwrap();
    let eos = &loaded.vocab.eos;
    let recordings = all
        .into_iter()
        .map(|prompt| record(&mut *runner, prompt, eos));
    let recordings = recordings.collect();
    (runner.info().clone(), recordings)
}

/// Answers one prompt greedily and drafts behind every token.
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
    /// Seconds that passes have cost by the table.
    static SPENT: Cell<f64> = const { Cell::new(0.0) };
    /// What a clock shows, in seconds.
    static NOW: Cell<f64> = const { Cell::new(0.0) };
    /// Whether the clock is held up, and by what luck.
    static HELD_UP: Cell<Option<u64>> = const { Cell::new(None) };
}

fn now() -> Duration {
    Duration::from_secs_f64(NOW.get())
}

/// A pass of so many seconds. On a machine with other work, the clock shows 0.8 to 2.8 times as many, mostly few.
fn pass(seconds: f64) {
    SPENT.set(SPENT.get() + seconds);
    let held_up = HELD_UP.get().map_or(1.0, |dice| {
        // Knuth's MMIX generator; its high bits are good enough for dice.
        let dice = dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        HELD_UP.set(Some(dice));
        0.8 + 2.0 * ((dice >> 40) as f64 / f64::from(1 << 24)).powi(8)
    });
    NOW.set(NOW.get() + seconds * held_up);
}

/// Says again what was said, one sequence at a time, in the time of a table.
struct ReplayRunner {
    info: RunnerInfo,
    recordings: Rc<Vec<Recording>>,
    costs: CostTable,
    /// What every token is as unexpected as, where that is not to be known, in nats.
    doubt: Option<f32>,
    open: Option<Open>,
    opened: u64,
}

/// The sequence that is open.
struct Open {
    seq: SeqId,
    max_len: usize,
    /// What was read so far, until it is a prompt.
    read: Vec<TokenId>,
    /// Which prompt it is.
    which: usize,
    /// Tokens of the answer that are committed.
    said: usize,
}

impl ReplayRunner {
    fn row(&self, which: usize, token: usize) -> LogitsRow {
        // Beyond the end nothing is walked, and any row will do.
        let rows = &self.recordings[which].rows;
        let mut row = rows[token.min(rows.len() - 1)].clone();
        if let Some(doubt) = self.doubt {
            row.lse = row.logits[0] + doubt;
        }
        row
    }

    fn opened(&mut self) -> &mut Open {
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
        self.open = Some(Open {
            seq,
            max_len,
            read: Vec::new(),
            which: usize::MAX,
            said: 0,
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
        open.read.extend(tokens);
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let which = recordings
            .iter()
            .position(|recording| recording.prompt == open.read);
        open.which = which.unwrap();
        let which = open.which;
        Ok(vec![self.row(which, 0)])
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        pass(self.costs.draft(items.len()));
        let recordings = Rc::clone(&self.recordings);
        let open = self.opened();
        let recording = &recordings[open.which];
        assert_eq!(
            (items[0].root, k),
            (recording.tokens[open.said], CANDIDATES)
        );
        let mut found = recording.drafts[open.said].clone();
        found.ids.truncate(depth * k);
        found.log_probs.truncate(depth * k);
        found.lse.truncate(depth);
        Ok(vec![found])
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let tree = items[0].tree;
        pass(self.costs.verify(tree.len()));
        let open = self.open.as_ref().unwrap();
        // A node on the way of the text is followed by its next token; no other is ever walked.
        let row = |node: NodeIdx| self.row(open.which, open.said + tree.depth(node) + 1);
        Ok(vec![tree.nodes().map(row).collect()])
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        self.opened().said += items[0].path.len();
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
        Err(none("snapshot"))
    }

    fn restore(&mut self, _seq: SeqId, _snapshot: SnapshotId) -> Result<(), DeviceError> {
        Err(none("restore"))
    }

    fn free_snapshot(&mut self, _snapshot: SnapshotId) {}

    fn export(&mut self, _id: SnapshotId, _sink: &mut dyn Write) -> Result<(), DeviceError> {
        Err(none("export"))
    }

    fn import(&mut self, _source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        Err(none("import"))
    }
}

fn none(call: &'static str) -> DeviceError {
    DeviceError::InvalidCall {
        call,
        detail: "nothing of the kind was kept".to_owned(),
    }
}

/// What was kept of all prompts.
type Kept = (RunnerInfo, Rc<Vec<Recording>>);

/// How drafting is decided upon.
#[derive(Debug, Clone, Copy, PartialEq)]
enum SpeculationMode {
    /// As in serving.
    Stop,
    /// The same without knowing how sure the target is: every token is as unexpected as any other, in nats.
    Blind(f32),
    /// A whole tree every time.
    Always,
}

/// Plain time over drafted time of each class, all these prompts once, on a server that has just begun, where passes
/// cost this.
fn gains(
    of: &Kept,
    order: &[usize],
    (way, costs): (SpeculationMode, CostTable),
) -> BTreeMap<String, f64> {
    let (info, recordings) = of;
    let runner = ReplayRunner {
        info: info.clone(),
        recordings: Rc::clone(recordings),
        costs: costs.clone(),
        doubt: match way {
            SpeculationMode::Blind(nats) => Some(nats),
            SpeculationMode::Stop | SpeculationMode::Always => None,
        },
        open: None,
        opened: 0,
    };
    let config = SchedulerConfig {
        max_sequences: 1,
        speculation: Speculation {
            budget: BUDGET,
            costs: (way != SpeculationMode::Always).then(|| costs.clone()),
            ..Speculation::default()
        },
        clock: Some(now),
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(Box::new(runner), config);
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for recording in order.iter().map(|i| &recordings[*i]) {
        let (said, seconds) = answer(&mut scheduler, recording);
        assert_eq!(said, recording.tokens, "{way:?} changed an answer");
        let plainly = (said.len() - 1) as f64 * costs.verify(1);
        let sum = sums.entry(recording.class.clone()).or_default();
        *sum = (sum.0 + plainly, sum.1 + seconds);
    }
    let gain = |(class, sum): (String, (f64, f64))| (class, sum.0 / sum.1);
    sums.into_iter().map(gain).collect()
}

/// An answer, and the seconds from its first token to its last.
fn answer(scheduler: &mut Scheduler, recording: &Recording) -> (Vec<TokenId>, f64) {
    let job = Job {
        id: JobId(0),
        prompt: recording.prompt.as_slice().into(),
        choices: 1,
        params: GenerationParams {
            sampling: Sampling::greedy(),
            max_tokens: recording.tokens.len(),
            use_saved: false,
            ..GenerationParams::default()
        },
        priority: 0,
    };
    scheduler.submit(job).unwrap();
    let (mut events, mut said, mut start) = (Vec::new(), Vec::new(), None);
    loop {
        let progress = scheduler.step(&mut events).unwrap();
        for (_, event) in events.drain(..) {
            match event {
                Event::Tokens { tokens, .. } => {
                    said.extend(tokens.iter().map(|token| token.id));
                    start.get_or_insert(SPENT.get());
                }
                Event::Failed { error } => panic!("{error}"),
                _ => {}
            }
        }
        if progress == Progress::Idle {
            return (said, SPENT.get() - start.unwrap());
        }
    }
}

/// Whether gains are what is wanted.
fn suffices(gains: &BTreeMap<String, f64>) -> bool {
    let code = gains.get("code").is_none_or(|gain| *gain >= ON_CODE);
    code && gains.values().all(|gain| *gain >= NEVER_BELOW)
}

#[test]
fn drafting_pays_on_code_and_costs_next_to_nothing_where_it_does_not() {
    let (info, recordings) = record_all();
    let of = (info, Rc::new(recordings));
    let all: Vec<usize> = (0..of.1.len()).collect();
    let stop = gains(&of, &all, (SpeculationMode::Stop, CORES.costs(1.0)));
    eprintln!("  plain time over drafted time: {stop:.3?}");
    assert_eq!(stop.len(), 5);
    assert!(suffices(&stop), "{stop:?}");
    // Neither what came before nor the machine is of the essence: the other way round, every class by itself, and
    // where passes cost less or more beside those of plain decoding.
    let back: Vec<usize> = all.iter().rev().copied().collect();
    let mut orders = vec![all.clone(), back];
    for class in stop.keys() {
        let own = all.iter().filter(|i| of.1[**i].class == *class);
        orders.push(own.copied().collect());
    }
    for order in &orders {
        for dear in [0.8, 1.0, 1.2] {
            let found = gains(&of, order, (SpeculationMode::Stop, CORES.costs(dear)));
            let worst = found.values().copied().fold(f64::INFINITY, f64::min);
            eprintln!("  passes {dear} times as dear: {found:.3?}");
            assert!(worst >= NEVER_BELOW, "{dear}, {order:?}: {found:?}");
        }
    }
    // A server that lives long beside other work draws no wrong conclusions from what holds its passes up.
    let often = all.repeat(TIMES);
    HELD_UP.set(Some(3));
    let busy = gains(&of, &often, (SpeculationMode::Stop, CORES.costs(1.0)));
    HELD_UP.set(None);
    eprintln!("  {TIMES} times over, held up: {busy:.3?}");
    assert!(suffices(&busy), "{busy:?}");
    // Where drafts are cheap, nearly everything is drafted.
    let card = gains(&of, &all, (SpeculationMode::Stop, CARD.costs(1.0)));
    eprintln!("  on a card: {card:.3?}");
    assert!(suffices(&card) && card["code"] > 3.0, "{card:?}");
    // Without the stop it is another matter.
    let always = gains(&of, &all, (SpeculationMode::Always, CORES.costs(1.0)));
    eprintln!("  a whole tree every time: {always:.3?}");
    assert!(always["source"] < 0.5 && !suffices(&always), "{always:?}");
    // So it is where the target's doubt is not known, whatever constant stands for it: sources that come first then
    // speak for all texts, and nothing is drafted any more.
    let both = [&orders[0], &orders[1]];
    let fails = |way: SpeculationMode| {
        let cases = both
            .iter()
            .flat_map(|order| [1.0, 1.2].map(|dear| (*order, dear)));
        let mut gains = cases.map(|(order, dear)| gains(&of, order, (way, CORES.costs(dear))));
        gains.find(|gains| !suffices(gains))
    };
    assert_eq!(fails(SpeculationMode::Stop), None);
    for nats in [0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0] {
        let found = fails(SpeculationMode::Blind(nats));
        eprintln!("  every token as unexpected as {nats} nats: {found:.3?}");
        assert!(found.is_some(), "{nats} nats would do as well");
    }
}
