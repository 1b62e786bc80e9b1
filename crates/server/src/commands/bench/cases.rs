//! The cases. Each begins from the same committed tokens, kept as a snapshot on the device.

use std::time::Instant;

use anyhow::Context;
use contract::{
    AttentionWindow, CommitItem, DraftItem, LogitsRequest, LogitsRow, NodeIdx, OpenPlan, Runner,
    SeqId, SnapshotId, SnapshotLocation, TokenId, Tree, VerifyItem,
};

use super::cost::Cost;
use super::report::{Energy, Report, ReportLine};
use super::step_shape::StepShape;

/// Candidates of a drafted position, and of a verified node.
const CANDIDATES: usize = 8;
/// The longest branch of a made-up tree; the draft of the day looks no further.
const SPINE: usize = 15;

/// A runner with sequences at a depth.
pub(super) struct Bench {
    runner: Box<dyn Runner>,
    report: Report,
    reps: usize,
    vocab: usize,
    chunk: usize,
    max_len: usize,
    cost: Cost,
    draft_cost: Option<Cost>,
    sequences: Vec<SeqId>,
    /// The depth that the snapshot has.
    start: Option<(usize, SnapshotId)>,
    random: u64,
    /// Whether all cases go on with one text, rather than each from the same tokens.
    along: bool,
    /// Milliseconds of reading so far, and the tokens that were read or decoded.
    reading: (f64, usize),
    /// What of the text the trees of all cases see.
    window: AttentionWindow,
}

impl Bench {
    pub(super) fn new(
        runner: Box<dyn Runner>,
        plan: &OpenPlan,
        report: Report,
        reps: usize,
    ) -> Bench {
        Bench {
            vocab: plan.target.vocab,
            chunk: plan.limits.prefill_chunk,
            max_len: plan.limits.context,
            cost: Cost::of(&plan.target, plan.kv),
            draft_cost: plan
                .draft
                .as_ref()
                .map(|draft| Cost::of_draft(&draft.spec, &plan.target)),
            runner,
            report,
            reps: reps.max(1),
            sequences: Vec::new(),
            start: None,
            random: 0x9e37_79b9_7f4a_7c15,
            along: false,
            reading: (0.0, 0),
            window: AttentionWindow::FULL,
        }
    }

    /// Lets every case go on where the one before it ended.
    pub(super) fn along_one_text(mut self) -> Bench {
        self.along = true;
        self
    }

    /// Lets the trees of the cases that follow see the text through `window`.
    pub(super) fn see_through(&mut self, window: AttentionWindow) {
        self.window = window;
    }

    /// Closes what is open; gives the report back.
    pub(super) fn end(mut self) -> Report {
        self.leave();
        self.report
    }

    /// Reads on until `depth` tokens are committed; tells the time of all reading so far.
    pub(super) fn read_to(&mut self, depth: usize) -> anyhow::Result<()> {
        if self.sequences.is_empty() {
            let seq = self.runner.open(self.max_len)?;
            self.sequences.push(seq);
            // The first pass of all waits for the device to wake up.
            self.one(seq)?;
        }
        let (seq, there) = (self.sequences[0], self.reading.1);
        let prompt = self.tokens(depth.saturating_sub(there));
        let start = Instant::now();
        self.read(seq, &prompt)?;
        self.reading.0 += start.elapsed().as_secs_f64() * 1e3;
        self.reading.1 += prompt.len();
        self.report.line(&ReportLine {
            case: "read from 0".to_owned(),
            depth,
            ms: vec![self.reading.0],
            tokens: depth,
            bytes: 0.0,
            flops: self.cost.prompt_flops(depth, 0),
            energy: Energy::default(),
        })
    }

    /// `pp`: reading a prompt, until the row after its last token is on the host.
    pub(super) fn prefill(&mut self, depth: usize, tokens: usize) -> anyhow::Result<()> {
        let prompt = self.tokens(tokens);
        let line = self.runs(format!("pp {tokens}"), depth, 1, |bench, seqs| {
            bench.read(seqs[0], &prompt).map(|_| ())
        })?;
        self.report.line(&ReportLine {
            tokens,
            flops: self.cost.prompt_flops(tokens, depth),
            ..line
        })
    }

    /// `tg`: one token after the other, the best and then the whole row on the host.
    pub(super) fn decode(&mut self, depth: usize, tokens: usize) -> anyhow::Result<()> {
        for (name, ask) in [
            ("tg", LogitsRequest::top_k(1)),
            ("tg, full row", LogitsRequest::full()),
        ] {
            let first = self.token();
            let case = self.named(format!("{name} {tokens}"));
            let line = self.runs(case, depth, 1, |bench, seqs| {
                let mut next = first;
                for _ in 0..tokens {
                    let tree = Tree::root(next).with_window(bench.window);
                    let row = bench.verified(&[(seqs[0], &tree)], &ask)?;
                    next = best(&row)?;
                    let path = tree.path_to(NodeIdx::ROOT);
                    let commit = CommitItem {
                        seq: seqs[0],
                        path: &path,
                    };
                    bench.runner.commit(&[commit])?;
                    bench.reading.1 += 1;
                }
                Ok(())
            })?;
            let middle = depth + tokens / 2;
            self.report.line(&ReportLine {
                tokens,
                bytes: self.cost.step_bytes(1, self.seen(middle)) * tokens as f64,
                ..line
            })?;
        }
        Ok(())
    }

    /// `verify`: a tree of each sequence, until the candidates of every node are on the host; then the same
    /// with a path kept, until the device could begin the next step.
    pub(super) fn verify(&mut self, depth: usize, form: StepShape) -> anyhow::Result<()> {
        let trees: Vec<Tree> = (0..form.trees)
            .map(|_| self.tree(form.nodes))
            .collect::<anyhow::Result<_>>()?;
        let name = match form.trees {
            1 => form.nodes.to_string(),
            trees => format!("{trees}x{}", form.nodes),
        };
        let bytes = self.cost.step_bytes(form.trees, self.seen(depth));
        let tokens = form.trees * form.nodes;
        let ask = LogitsRequest::top_k(CANDIDATES);
        let line = self.runs(
            self.named(format!("verify {name}")),
            depth,
            form.trees,
            |bench, seqs| {
                let items: Vec<_> = seqs.iter().copied().zip(&trees).collect();
                bench.verified(&items, &ask)?;
                seqs.iter()
                    .try_for_each(|&seq| Ok(bench.runner.discard(seq)?))
            },
        )?;
        self.report.line(&ReportLine {
            tokens,
            bytes,
            ..line
        })?;
        let case = self.named(format!("step {name}"));
        let line = self.runs(case, depth, form.trees, |bench, seqs| {
            let items: Vec<_> = seqs.iter().copied().zip(&trees).collect();
            bench.verified(&items, &ask)?;
            let paths: Vec<_> = trees
                .iter()
                .map(|tree| longest(tree).truncated(SPINE / 2))
                .collect();
            let commits: Vec<_> = seqs
                .iter()
                .zip(&paths)
                .map(|(&seq, path)| CommitItem { seq, path })
                .collect();
            bench.runner.commit(&commits)?;
            bench.reading.1 += paths[0].len();
            // The device's commit shows in what comes after it: one token, whose own time is taken off below.
            bench.one(seqs[0])
        })?;
        let alone = self.runs(String::new(), depth, 1, |bench, seqs| bench.one(seqs[0]))?;
        let one = median(&alone.ms);
        self.report.line(&ReportLine {
            tokens,
            bytes,
            ms: line.ms.iter().map(|ms| (ms - one).max(0.0)).collect(),
            ..line
        })
    }

    /// `draft`: candidates for every position of a block, on the host.
    pub(super) fn draft(&mut self, depth: usize) -> anyhow::Result<()> {
        let Some(cost) = self.draft_cost else {
            return Ok(());
        };
        let positions = self
            .runner
            .info()
            .draft_depth
            .context("the runner has no draft")?;
        let root = self.token();
        let line = self.runs("draft".to_owned(), depth, 1, |bench, seqs| {
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

    /// One run to warm up and then the timed ones, each from the same start on `sequences` sequences.
    fn runs(
        &mut self,
        case: String,
        depth: usize,
        sequences: usize,
        mut run: impl FnMut(&mut Bench, &[SeqId]) -> anyhow::Result<()>,
    ) -> anyhow::Result<ReportLine> {
        let mut ms = Vec::with_capacity(self.reps);
        let mut energy = Energy::default();
        for rep in 0..=self.reps {
            let seqs = self.arrive(depth, sequences)?;
            let before = self.report.reading();
            let start = Instant::now();
            run(self, &seqs)?;
            let took = start.elapsed();
            if rep > 0 {
                ms.push(took.as_secs_f64() * 1e3);
                if let Some((before, after)) = before.zip(self.report.reading()) {
                    energy.add(before, after, took);
                }
            }
        }
        Ok(ReportLine {
            case,
            depth,
            ms,
            tokens: 1,
            bytes: 0.0,
            flops: 0.0,
            energy,
        })
    }

    /// So many sequences at `depth`, by restoring the first one's snapshot.
    fn arrive(&mut self, depth: usize, sequences: usize) -> anyhow::Result<Vec<SeqId>> {
        if self.along {
            let seqs = self.sequences.clone();
            seqs.iter().try_for_each(|&seq| self.one(seq))?;
            return Ok(seqs);
        }
        if self.start.is_none_or(|(at, _)| at != depth) {
            self.leave();
            let seq = self.runner.open(self.max_len)?;
            self.sequences.push(seq);
            let prompt = self.tokens(depth);
            self.read(seq, &prompt)?;
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
        // A copy of the state may still be under way: one token waits for it, and is taken back.
        for &seq in &seqs {
            self.one(seq)?;
        }
        Ok(seqs)
    }

    /// Frees the snapshot and the sequences.
    fn leave(&mut self) {
        if let Some((_, snapshot)) = self.start.take() {
            self.runner.free_snapshot(snapshot);
        }
        for seq in self.sequences.drain(..) {
            self.runner.close(seq);
        }
    }

    /// Feeds a prompt in chunks; the row after it, if it is not empty.
    fn read(&mut self, seq: SeqId, prompt: &[TokenId]) -> anyhow::Result<Option<LogitsRow>> {
        let mut last = None;
        let chunks = prompt.len().div_ceil(self.chunk.max(1));
        for (index, tokens) in prompt.chunks(self.chunk.max(1)).enumerate() {
            let requests: &[_] = match index + 1 == chunks {
                true => &[(tokens.len() - 1, LogitsRequest::top_k(1))],
                false => &[],
            };
            last = self.runner.prefill(seq, tokens, requests)?.pop();
        }
        Ok(last)
    }

    /// One token of one sequence, waited for and taken back.
    fn one(&mut self, seq: SeqId) -> anyhow::Result<()> {
        let tree = Tree::root(TokenId(1)).with_window(self.window);
        self.verified(&[(seq, &tree)], &LogitsRequest::top_k(1))?;
        Ok(self.runner.discard(seq)?)
    }

    /// Verifies trees with one ask for every node; the last row.
    fn verified(
        &mut self,
        items: &[(SeqId, &Tree)],
        ask: &LogitsRequest,
    ) -> anyhow::Result<LogitsRow> {
        let nodes = items.iter().map(|(_, tree)| tree.len()).max().unwrap_or(0);
        let requests = vec![ask.clone(); nodes];
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
        row.context("the device gave no row")
    }

    /// A tree as a draft would make it: a spine, and siblings beside its first nodes.
    fn tree(&mut self, nodes: usize) -> anyhow::Result<Tree> {
        let mut tree = Tree::root(self.token()).with_window(self.window);
        let mut spine = vec![NodeIdx::ROOT];
        while tree.len() < nodes && spine.len() <= SPINE.min(nodes.div_ceil(2)) {
            let end = spine[spine.len() - 1];
            spine.push(tree.push(end, self.token())?);
        }
        let mut at = 0;
        while tree.len() < nodes {
            tree.push(spine[at % spine.len()], self.token())?;
            at += 1;
        }
        Ok(tree)
    }

    /// Tokens that a row at `depth` sees.
    fn seen(&self, depth: usize) -> usize {
        depth - self.window.masked(depth).len()
    }

    /// The name of a case, with the window that it looks through.
    fn named(&self, case: String) -> String {
        match self.window.is_full() {
            true => case,
            false => format!("{case}, window {}", self.window.tokens()),
        }
    }

    fn tokens(&mut self, n: usize) -> Vec<TokenId> {
        (0..n).map(|_| self.token()).collect()
    }

    /// A token drawn from all (xorshift).
    fn token(&mut self) -> TokenId {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let id = self.random % self.vocab.max(1) as u64;
        TokenId(u32::try_from(id).unwrap_or(0))
    }
}

/// The path down the first branch.
fn longest(tree: &Tree) -> contract::TreePath {
    let deepest = tree
        .nodes()
        .max_by_key(|&node| (tree.depth(node), std::cmp::Reverse(node)))
        .unwrap_or(NodeIdx::ROOT);
    tree.path_to(deepest)
}

fn best(row: &LogitsRow) -> anyhow::Result<TokenId> {
    let best = row
        .ids
        .iter()
        .zip(&row.raw)
        .max_by(|a, b| a.1.total_cmp(b.1));
    best.map(|(&id, _)| id)
        .context("the device gave an empty row")
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
