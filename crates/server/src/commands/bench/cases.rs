//! The benchmark cases. Each begins with the same committed tokens, restored from a snapshot on the
//! device.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use contract::{
    AttentionWindow, CommitItem, Conditioning, DraftItem, DraftSpec, LoadConfig, LogitsProcessors,
    LogitsRequest, LogitsRow, MassCut, MassPart, MassQuery, MtpDraftItem, MtpRow, NodeIdx, Runner,
    SeqId, SnapshotId, SnapshotLocation, TokenCount, TokenId, Tree, VerifyItem,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::cost::Cost;
use super::cpu_time::cpu_seconds;
use super::report::{Energy, Report, ReportLine};
use super::step_shape::StepShape;

/// Candidates per drafted position, and per verified node.
const CANDIDATES: usize = 8;
/// Rows per depth of the wider drafts of a multi-token-prediction head, its root's depth excepted.
const MTP_WIDTH: usize = 4;
/// Divides the logits of sampled tokens. Random weights give flat rows; this makes them as steep as
/// those of a trained model.
const SAMPLING_DIVISOR: f32 = 0.01;
/// Tokens with a penalty.
const PENALIZED: usize = 512;
/// The case whose tokens are drawn at random, not decoded.
const RANDOM_TOKENS: &str = "tg, random tokens";
/// The longest branch of a random tree, which is the depth of the DFlash draft.
const MAX_BRANCH: usize = 15;

/// A runner with sequences at the depth of the current case.
pub(super) struct Bench {
    runner: Box<dyn Runner>,
    report: Report,
    reps: usize,
    vocab: usize,
    chunk: usize,
    max_len: usize,
    cost: Cost,
    /// Name of the case of a draft model, and its cost.
    draft: Option<(String, Cost)>,
    /// Of one depth of the multi-token-prediction head.
    mtp_cost: Option<Cost>,
    sequences: Vec<SeqId>,
    /// The snapshot that cases start from, and its depth.
    start: Option<(usize, SnapshotId)>,
    random: StdRng,
    /// Whether each case continues where the one before it ended, instead of starting from the
    /// snapshot.
    continues: bool,
    /// Milliseconds of prefill so far, and the tokens that were prefilled or decoded.
    prefilled: (f64, usize),
    /// The attention window of all trees.
    window: AttentionWindow,
}

/// The name of a draft's case: later kinds than DFlash are named, with the rows of their block.
fn draft_case(spec: &DraftSpec) -> String {
    let kind = match spec.conditioning {
        Conditioning::Independent => return "draft".to_owned(),
        Conditioning::Pairwise(_) => "dflash2",
        Conditioning::Markov(_) => "dspark",
    };
    format!("draft {kind} {}", spec.block)
}

impl Bench {
    pub(super) fn new(
        runner: Box<dyn Runner>,
        config: &LoadConfig,
        report: Report,
        reps: usize,
    ) -> Bench {
        Bench {
            vocab: config.target.vocab,
            chunk: config.limits.prefill_chunk,
            max_len: config.limits.context,
            cost: Cost::of(&config.target, config.kv),
            draft: config
                .draft
                .as_ref()
                .map(|draft| (draft_case(&draft.spec), Cost::of_draft(&draft.spec))),
            mtp_cost: Cost::of_mtp(
                &config.target,
                config.kv,
                runner.info().mtp.and_then(|mtp| mtp.vocab),
            ),
            runner,
            report,
            reps: reps.max(1),
            sequences: Vec::new(),
            start: None,
            random: StdRng::seed_from_u64(1),
            continues: false,
            prefilled: (0.0, 0),
            window: AttentionWindow::FULL,
        }
    }

    /// Lets each case continue where the one before it ended.
    pub(super) fn continuing(mut self) -> Bench {
        self.continues = true;
        self
    }

    /// Sets the attention window of the next cases.
    pub(super) fn set_window(&mut self, window: AttentionWindow) {
        self.window = window;
    }

    /// Closes the sequences and returns the report.
    pub(super) fn finish(mut self) -> Report {
        self.reset();
        self.report
    }

    /// Prefills until `depth` tokens are committed, and reports the time of all prefill so far.
    pub(super) fn prefill_to(&mut self, depth: usize) -> anyhow::Result<()> {
        if self.sequences.is_empty() {
            let seq = self.runner.open(self.max_len)?;
            self.sequences.push(seq);
            // The first pass warms the device up.
            self.step_once(seq)?;
        }
        let (seq, there) = (self.sequences[0], self.prefilled.1);
        let prompt = self.tokens(depth.saturating_sub(there));
        let start = Instant::now();
        self.prefill_chunks(seq, &prompt)?;
        self.prefilled.0 += start.elapsed().as_secs_f64() * 1e3;
        self.prefilled.1 += prompt.len();
        self.report.line(&ReportLine {
            case: "prefill from 0".to_owned(),
            depth,
            ms: vec![self.prefilled.0],
            cpu_ms: Vec::new(),
            tokens: depth,
            bytes: 0.0,
            flops: self.cost.prompt_flops(depth, 0),
            energy: Energy::default(),
        })
    }

    /// `pp`: prefills a prompt, until the logits row after its last token is on the host.
    pub(super) fn prefill(&mut self, depth: usize, tokens: usize) -> anyhow::Result<()> {
        let prompt = self.tokens(tokens);
        let line = self.time_runs(format!("pp {tokens}"), depth, 1, |bench, seqs| {
            bench.prefill_chunks(seqs[0], &prompt).map(|_| ())
        })?;
        self.report.line(&ReportLine {
            tokens,
            flops: self.cost.prompt_flops(tokens, depth),
            ..line
        })
    }

    /// `tg`: decodes token by token. On the host are the best token, a sampled one with and without
    /// penalties or what top-p needs, where the device gives that, or the whole logits row. With
    /// experts, also with tokens drawn at random, which spread the choice of experts.
    pub(super) fn decode(&mut self, depth: usize, tokens: usize) -> anyhow::Result<()> {
        let queried = |part| LogitsRequest {
            mass: Some(MassQuery {
                divisor: SAMPLING_DIVISOR,
                part,
            }),
            ..LogitsRequest::full()
        };
        let cut = MassCut {
            share: 0.95,
            floor: 0.0,
        };
        let sampled = queried(MassPart::AtShare(0.5));
        let penalized = LogitsRequest {
            processors: Some(self.penalties()),
            ..sampled.clone()
        };
        let spread = self.cost.has_experts();
        let spread = spread.then(|| (RANDOM_TOKENS, LogitsRequest::top_k(1)));
        let requests = [
            ("tg", LogitsRequest::top_k(1)),
            ("tg, sampled", sampled),
            ("tg, penalties", penalized),
            ("tg, top-p", queried(MassPart::Best(cut))),
            ("tg, full row", LogitsRequest::full()),
        ];
        for (name, request) in requests.into_iter().chain(spread) {
            let first = self.token();
            let case = self.case_name(format!("{name} {tokens}"));
            let line = self.time_runs(case, depth, 1, |bench, seqs| {
                let mut next = first;
                for _ in 0..tokens {
                    let tree = Tree::root(next).with_window(bench.window);
                    let row = bench.verify_trees(&[(seqs[0], &tree)], &request)?;
                    next = if name == RANDOM_TOKENS {
                        bench.token()
                    } else {
                        argmax(&row)?
                    };
                    let path = tree.path_to(NodeIdx::ROOT);
                    let commit = CommitItem {
                        seq: seqs[0],
                        path: &path,
                    };
                    bench.runner.commit(&[commit])?;
                    bench.prefilled.1 += 1;
                }
                Ok(())
            })?;
            let middle = depth + tokens / 2;
            self.report.line(&ReportLine {
                tokens,
                bytes: self.cost.step_bytes((1, 1), self.attended(middle)) * tokens as f64,
                ..line
            })?;
        }
        Ok(())
    }

    /// Penalties of tokens that occurred before.
    fn penalties(&self) -> Arc<LogitsProcessors> {
        let apart = (self.vocab / PENALIZED).max(1);
        let ids = (0..self.vocab).step_by(apart).take(PENALIZED);
        let counts = ids.map(|id| TokenCount {
            token: TokenId(id as u32),
            seen: true,
            generated: 1,
        });
        Arc::new(LogitsProcessors {
            repetition: 1.1,
            frequency: 0.2,
            presence: 0.3,
            counts: counts.collect(),
            ..LogitsProcessors::default()
        })
    }

    /// `verify`: verifies a tree per sequence, until the candidates of every node are on the host.
    ///
    /// `step` then commits a path too, until the device can start the next step.
    pub(super) fn verify(&mut self, depth: usize, shape: StepShape) -> anyhow::Result<()> {
        let trees: Vec<Tree> = (0..shape.trees)
            .map(|_| self.tree(shape.nodes))
            .collect::<anyhow::Result<_>>()?;
        let name = match shape.trees {
            1 => shape.nodes.to_string(),
            trees => format!("{trees}x{}", shape.nodes),
        };
        let tokens = shape.trees * shape.nodes;
        let step = (shape.trees, tokens);
        let bytes = self.cost.step_bytes(step, self.attended(depth));
        let request = LogitsRequest::top_k(CANDIDATES);
        let line = self.time_runs(
            self.case_name(format!("verify {name}")),
            depth,
            shape.trees,
            |bench, seqs| {
                let items: Vec<_> = seqs.iter().copied().zip(&trees).collect();
                bench.verify_trees(&items, &request)?;
                seqs.iter()
                    .try_for_each(|&seq| Ok(bench.runner.discard(seq)?))
            },
        )?;
        self.report.line(&ReportLine {
            tokens,
            bytes,
            ..line
        })?;
        let case = self.case_name(format!("step {name}"));
        let line = self.time_runs(case, depth, shape.trees, |bench, seqs| {
            let items: Vec<_> = seqs.iter().copied().zip(&trees).collect();
            bench.verify_trees(&items, &request)?;
            let paths: Vec<_> = trees
                .iter()
                .map(|tree| longest_path(tree).truncated(MAX_BRANCH / 2))
                .collect();
            let commits: Vec<_> = seqs
                .iter()
                .zip(&paths)
                .map(|(&seq, path)| CommitItem { seq, path })
                .collect();
            bench.runner.commit(&commits)?;
            bench.prefilled.1 += paths[0].len();
            // The commit is asynchronous, so a single token follows it, whose own time is
            // subtracted below.
            bench.step_once(seqs[0])
        })?;
        let alone = self.time_runs(String::new(), depth, 1, |bench, seqs| {
            bench.step_once(seqs[0])
        })?;
        let one = median(&alone.ms);
        self.report.line(&ReportLine {
            tokens,
            bytes,
            ms: line.ms.iter().map(|ms| (ms - one).max(0.0)).collect(),
            cpu_ms: Vec::new(),
            ..line
        })
    }

    /// `draft`: drafts a block, until the candidates of every position are on the host.
    pub(super) fn draft(&mut self, depth: usize) -> anyhow::Result<()> {
        let Some((case, cost)) = self.draft.clone() else {
            return Ok(());
        };
        let positions = self
            .runner
            .info()
            .draft_depth
            .context("the runner has no draft model")?;
        let root = self.token();
        let line = self.time_runs(case, depth, 1, |bench, seqs| {
            let items = [DraftItem { seq: seqs[0], root }];
            bench.runner.draft(&items, positions, CANDIDATES)?;
            Ok(())
        })?;
        self.report.line(&ReportLine {
            tokens: positions,
            bytes: cost.weight_bytes,
            ..line
        })
    }

    /// `mtp N` and `mtp N wide`: drafts `N` depths with the multi-token-prediction head, a chain or
    /// four rows per depth, until the candidates of every row are on the host.
    pub(super) fn draft_mtp(&mut self, depth: usize) -> anyhow::Result<()> {
        let limits = self.runner.info().mtp;
        let (Some(cost), Some(limits)) = (self.mtp_cost.clone(), limits) else {
            return Ok(());
        };
        let root = self.token();
        for (name, width) in [("", 1), (" wide", MTP_WIDTH)] {
            for depths in 1..=limits.max_depth {
                let case = format!("mtp {depths}{name}");
                let line = self.time_runs(case, depth, 1, |bench, seqs| {
                    let seq = seqs[0];
                    let row = |parent: Option<usize>| MtpDraftItem {
                        seq,
                        parent: parent.map(|row| MtpRow(row as u16)),
                        token: root,
                    };
                    bench.runner.draft_mtp(&[row(None)], CANDIDATES)?;
                    // The first row of the depth before is the parent of all.
                    let mut parent = 0;
                    for _ in 1..depths {
                        let items = vec![row(Some(parent)); width];
                        bench.runner.draft_mtp(&items, CANDIDATES)?;
                        parent += if parent == 0 { 1 } else { width };
                    }
                    Ok(())
                })?;
                let each = cost.step_bytes((1, 1), self.attended(depth));
                self.report.line(&ReportLine {
                    tokens: depths,
                    bytes: depths as f64 * each,
                    ..line
                })?;
            }
        }
        Ok(())
    }

    /// A warm-up run and then the timed runs, each from the same start on `sequences` sequences.
    fn time_runs(
        &mut self,
        case: String,
        depth: usize,
        sequences: usize,
        mut run: impl FnMut(&mut Bench, &[SeqId]) -> anyhow::Result<()>,
    ) -> anyhow::Result<ReportLine> {
        let mut ms = Vec::with_capacity(self.reps);
        let mut cpu_ms = Vec::with_capacity(self.reps);
        let mut energy = Energy::default();
        for rep in 0..=self.reps {
            let seqs = self.sequences_at(depth, sequences)?;
            let before = self.report.meter_reading();
            let cpu_start = cpu_seconds();
            let start = Instant::now();
            run(self, &seqs)?;
            let took = start.elapsed();
            if rep > 0 {
                cpu_ms.push((cpu_seconds() - cpu_start) * 1e3);
                ms.push(took.as_secs_f64() * 1e3);
                if let Some((before, after)) = before.zip(self.report.meter_reading()) {
                    energy.add(before, after, took);
                }
            }
        }
        Ok(ReportLine {
            case,
            depth,
            ms,
            cpu_ms,
            tokens: 1,
            bytes: 0.0,
            flops: 0.0,
            energy,
        })
    }

    /// `sequences` sequences at `depth`, restored from the first one's snapshot.
    fn sequences_at(&mut self, depth: usize, sequences: usize) -> anyhow::Result<Vec<SeqId>> {
        if self.continues {
            let seqs = self.sequences.clone();
            seqs.iter().try_for_each(|&seq| self.step_once(seq))?;
            return Ok(seqs);
        }
        if self.start.is_none_or(|(at, _)| at != depth) {
            self.reset();
            let seq = self.runner.open(self.max_len)?;
            self.sequences.push(seq);
            let prompt = self.tokens(depth);
            self.prefill_chunks(seq, &prompt)?;
            let info = self.runner.snapshot(seq, SnapshotLocation::Device)?;
            self.start = Some((depth, info.id));
        }
        while self.sequences.len() > sequences {
            if let Some(seq) = self.sequences.pop() {
                self.runner.close(seq);
            }
        }
        while self.sequences.len() < sequences {
            let seq = self.runner.open(self.max_len)?;
            self.sequences.push(seq);
        }
        let seqs = self.sequences.clone();
        if let Some((_, snapshot)) = self.start {
            for &seq in &seqs {
                self.runner.restore(seq, snapshot)?;
            }
        }
        // A restore may still be copying the state; a discarded token waits for it.
        for &seq in &seqs {
            self.step_once(seq)?;
        }
        Ok(seqs)
    }

    /// Frees the snapshot and the sequences.
    fn reset(&mut self) {
        if let Some((_, snapshot)) = self.start.take() {
            self.runner.free_snapshot(snapshot);
        }
        for seq in self.sequences.drain(..) {
            self.runner.close(seq);
        }
    }

    /// Prefills a prompt in chunks; returns the row after it, if the prompt is not empty.
    fn prefill_chunks(
        &mut self,
        seq: SeqId,
        prompt: &[TokenId],
    ) -> anyhow::Result<Option<LogitsRow>> {
        let mut last = None;
        let chunks = prompt.len().div_ceil(self.chunk.max(1));
        for (index, tokens) in prompt.chunks(self.chunk.max(1)).enumerate() {
            let requests: &[_] = if index + 1 == chunks {
                &[(tokens.len() - 1, LogitsRequest::top_k(1))]
            } else {
                &[]
            };
            last = self.runner.prefill(seq, tokens, requests)?.pop();
        }
        Ok(last)
    }

    /// Verifies and discards one token, and waits for it.
    fn step_once(&mut self, seq: SeqId) -> anyhow::Result<()> {
        let tree = Tree::root(TokenId(1)).with_window(self.window);
        self.verify_trees(&[(seq, &tree)], &LogitsRequest::top_k(1))?;
        Ok(self.runner.discard(seq)?)
    }

    /// Verifies trees with the same request for every node; returns the last row.
    fn verify_trees(
        &mut self,
        items: &[(SeqId, &Tree)],
        request: &LogitsRequest,
    ) -> anyhow::Result<LogitsRow> {
        let nodes = items.iter().map(|(_, tree)| tree.len()).max().unwrap_or(0);
        let requests = vec![request.clone(); nodes];
        let items: Vec<_> = items
            .iter()
            .map(|(seq, tree)| VerifyItem {
                seq: *seq,
                tree,
                requests: &requests[..tree.len()],
            })
            .collect();
        let rows = self.runner.verify(&items)?;
        let row = rows.into_iter().flatten().last();
        row.context("the device returned no logits row")
    }

    /// A tree of the shape that a draft gives: one long branch, and siblings of its first nodes.
    fn tree(&mut self, nodes: usize) -> anyhow::Result<Tree> {
        let mut tree = Tree::root(self.token()).with_window(self.window);
        let mut branch = vec![NodeIdx::ROOT];
        while tree.len() < nodes && branch.len() <= MAX_BRANCH.min(nodes.div_ceil(2)) {
            let end = branch[branch.len() - 1];
            branch.push(tree.push(end, self.token())?);
        }
        let mut at = 0;
        while tree.len() < nodes {
            tree.push(branch[at % branch.len()], self.token())?;
            at += 1;
        }
        Ok(tree)
    }

    /// Cached tokens that a row at `depth` attends to.
    fn attended(&self, depth: usize) -> usize {
        depth - self.window.masked(depth).len()
    }

    /// The name of a case, with its attention window.
    fn case_name(&self, case: String) -> String {
        if self.window.is_full() {
            case
        } else {
            format!("{case}, window {}", self.window.tokens())
        }
    }

    fn tokens(&mut self, n: usize) -> Vec<TokenId> {
        (0..n).map(|_| self.token()).collect()
    }

    /// A random token of the vocabulary.
    fn token(&mut self) -> TokenId {
        let vocab = u32::try_from(self.vocab).unwrap_or(u32::MAX).max(1);
        TokenId(self.random.random_range(0..vocab))
    }
}

/// The path to the deepest node; of equal ones, the first.
fn longest_path(tree: &Tree) -> contract::TreePath {
    let deepest = tree
        .nodes()
        .max_by_key(|&node| (tree.depth(node), std::cmp::Reverse(node)))
        .unwrap_or(NodeIdx::ROOT);
    tree.path_to(deepest)
}

/// The token with the largest logit.
fn argmax(row: &LogitsRow) -> anyhow::Result<TokenId> {
    let best = row
        .ids
        .iter()
        .zip(&row.raw)
        .max_by(|a, b| a.1.total_cmp(b.1));
    best.map(|(&id, _)| id)
        .context("the device returned an empty logits row")
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
