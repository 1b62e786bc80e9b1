//! Scripted sources on a virtual clock, for tests of the choice between them: texts of several
//! kinds, on which the acceptance of each source differs.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::Duration;

use conformance::fake::{FakeDraft, FakeRunner, FakeSpec};
use contract::{
    Capacity, CommitItem, DeviceError, DraftCandidates, DraftItem, LogitsRequest, LogitsRow,
    MtpDraftItem, NodeIdx, Runner, RunnerInfo, SeqId, SnapshotId, SnapshotInfo, SnapshotLocation,
    TokenId, VerifyItem,
};

use super::config::SpeculationConfig;
use super::costs::CostTable;
use super::proposer::MixedProposer;
use super::sources::{DraftSource, SourceSet};
use super::tree_proposer::{TreeProposer, TreeRequest, TreeResult};
use crate::stats::StepTimes;

/// A kind of text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// Share of positions at which the draft model's, or the head's, first candidate is right.
    pub(super) block: f64,
    pub(super) mtp: f64,
    /// Share of the text that repeats earlier passages.
    pub(super) copied: f64,
    pub(super) surprisal: f64,
}

pub(super) const KINDS: [Kind; 7] = [
    kind("code", (0.88, 0.75), 0.2, 0.01),
    kind("chat", (0.55, 0.8), 0.05, 0.05),
    kind("json", (0.93, 0.9), 0.3, 0.003),
    kind("prose", (0.3, 0.45), 0.0, 0.4),
    kind("source", (0.5, 0.6), 0.85, 0.01),
    kind("agent", (0.75, 0.7), 0.5, 0.01),
    kind("noise", (0.02, 0.02), 0.0, 1.5),
];

pub(super) const fn kind(
    name: &'static str,
    (block, mtp): (f64, f64),
    copied: f64,
    surprisal: f64,
) -> Kind {
    Kind {
        name,
        block,
        mtp,
        copied,
        surprisal,
    }
}

/// A device: the costs of its passes, and those of a committed token that waits for the next draft
/// of the draft model or of the head, which stores its keys and values then. The table lacks the
/// latter, as does a measured one.
#[derive(Debug, Clone)]
pub(super) struct Device {
    pub(super) name: &'static str,
    pub(super) costs: CostTable,
    waiting: [f64; 2],
}

/// A device bound by arithmetic: drafts and rows are dear.
pub(super) fn cpu() -> Device {
    let verify = [
        (1, 0.64),
        (2, 0.76),
        (4, 1.09),
        (8, 2.02),
        (16, 3.44),
        (24, 4.85),
    ];
    device("cpu", &verify, (0.91, 0.02), (0.3, 0.01))
}

/// A device bound by reading weights.
pub(super) fn gpu() -> Device {
    let verify = [(1, 6.2), (8, 6.5), (16, 6.8), (24, 7.1)];
    device("gpu", &verify, (1.1, 0.002), (0.35, 0.001))
}

/// A device by milliseconds: of a verify, and of a block and of a depth of the head, each with that
/// of a waiting token.
fn device(
    name: &'static str,
    verify: &[(usize, f64)],
    block: (f64, f64),
    mtp: (f64, f64),
) -> Device {
    let seconds = verify.iter().map(|p| (p.0, p.1 * 1e-3)).collect();
    let costs = CostTable::new(seconds)
        .and_then(|table| table.with_draft(DraftSource::Block, vec![(1, block.0 * 1e-3)]))
        .and_then(|table| table.with_draft(DraftSource::Mtp, vec![(1, mtp.0 * 1e-3)]))
        .unwrap();
    Device {
        name,
        costs,
        waiting: [block.1 * 1e-3, mtp.1 * 1e-3],
    }
}

struct TextRng(u64);

impl TextRng {
    fn unit(&mut self) -> f64 {
        // Knuth's MMIX generator; its high bits suffice here.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / f64::from(1 << 24)
    }

    fn token(&mut self) -> TokenId {
        TokenId((self.unit() * 20_000.0) as u32)
    }
}

/// A text of a kind: `prompt` known tokens, then the reply.
fn text(kind: Kind, tokens: usize, random: &mut TextRng) -> Vec<TokenId> {
    let mut text: Vec<TokenId> = (0..200).map(|_| random.token()).collect();
    while text.len() < tokens {
        let length = 12 + (40.0 * random.unit()) as usize;
        if random.unit() < kind.copied {
            let from = (random.unit() * (text.len() - 100) as f64) as usize;
            text.extend_from_within(from..from + length);
        } else {
            text.extend((0..length).map(|_| random.token()));
        }
    }
    text.truncate(tokens);
    text
}

/// A runner that drafts the text's own continuation, right or wrong by the kind's shares. It only
/// drafts.
struct ScriptedRunner {
    info: RunnerInfo,
    kind: Kind,
    text: Vec<TokenId>,
    /// Position of the root.
    root: usize,
    /// Seed of the candidates.
    seed: u64,
    /// Per drafted row of the head: its position, and whether its path is the text.
    rows: Vec<(usize, bool)>,
    /// Committed tokens that wait for a block, and for the head.
    waiting: [usize; 2],
    /// Seconds of the drafts since the last step.
    seconds: f64,
    device: Device,
}

impl ScriptedRunner {
    fn new(device: Device) -> ScriptedRunner {
        let fake = FakeRunner::new(FakeSpec {
            draft: Some(FakeDraft {
                depth: 15,
                acceptance_rate: 0.0,
            }),
            mtp: Some(FakeDraft {
                depth: 7,
                acceptance_rate: 0.0,
            }),
            ..FakeSpec::default()
        });
        ScriptedRunner {
            info: fake.info().clone(),
            kind: KINDS[0],
            text: Vec::new(),
            root: 0,
            seed: 0,
            rows: Vec::new(),
            waiting: [0; 2],
            seconds: 0.0,
            device,
        }
    }

    /// Counts a pass of a source, whose tokens no longer wait.
    fn pass(&mut self, source: DraftSource) {
        let at = source.index();
        let waiting = std::mem::take(&mut self.waiting[at]) as f64;
        self.seconds += self.device.costs.draft(source, 1) + waiting * self.device.waiting[at];
    }

    /// A source's candidates for the token at a position, the first one right with chance `right`.
    ///
    /// Drafts know how certain they are, but not well: they state more than they hold. Whether a
    /// source is right about a token depends on the token alone, so all ways of drafting a text are
    /// compared on the same luck.
    fn row(&self, source: DraftSource, at: usize, right: f64, found: &mut DraftCandidates) {
        let place = (2 * at + source.index()) as u64;
        let mut random = TextRng(self.seed ^ place.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        random.unit();
        let sure = (right + 0.3 * (random.unit() - 0.5)).clamp(0.01, 0.99);
        let stated = sure.powf(0.7);
        let is_right = random.unit() < sure;
        let is_second = !is_right && random.unit() < 0.4;
        let token = self.text.get(at).copied().unwrap_or_default();
        for rank in 0..4 {
            let own = if rank == 0 && is_right || rank == 1 && is_second {
                token
            } else {
                random.token()
            };
            let chance = match rank {
                0 => stated,
                rank => (1.0 - stated) * 0.5_f64.powi(rank),
            };
            found.ids.push(own);
            found.log_probs.push(chance.ln() as f32);
        }
        found.lse.push(0.0);
    }
}

fn empty() -> DraftCandidates {
    DraftCandidates {
        k: 4,
        ..DraftCandidates::default()
    }
}

fn unused<T>() -> Result<T, DeviceError> {
    Err(DeviceError::InvalidCall {
        call: "scripted",
        detail: "the runner only drafts".to_owned(),
    })
}

impl Runner for ScriptedRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        _k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        assert_eq!(items.len(), 1);
        self.pass(DraftSource::Block);
        let mut found = empty();
        for ahead in 1..=depth {
            // Far positions are harder.
            let right = self.kind.block * 0.985_f64.powi(ahead as i32 - 1);
            self.row(DraftSource::Block, self.root + ahead, right, &mut found);
        }
        Ok(vec![found])
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        _k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.pass(DraftSource::Mtp);
        let mut all = Vec::new();
        for item in items {
            let (at, is_text) = match item.parent {
                None => {
                    self.rows.clear();
                    (self.root, true)
                }
                Some(parent) => {
                    let (before, is_text) = self.rows[parent.index()];
                    let at = before + 1;
                    (at, is_text && self.text.get(at) == Some(&item.token))
                }
            };
            self.rows.push((at, is_text));
            let right = if is_text { self.kind.mtp } else { 0.0 };
            let mut found = empty();
            self.row(DraftSource::Mtp, at + 1, right, &mut found);
            all.push(found);
        }
        Ok(all)
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            sequences: 0,
            tokens: 0,
            evictable_tokens: 0,
            snapshot_bytes: 0,
        }
    }

    fn open(&mut self, _max_len: usize) -> Result<SeqId, DeviceError> {
        unused()
    }

    fn close(&mut self, _seq: SeqId) {}

    fn prefill(
        &mut self,
        _seq: SeqId,
        _tokens: &[TokenId],
        _requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        unused()
    }

    fn verify(&mut self, _items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        unused()
    }

    fn commit(&mut self, _items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        unused()
    }

    fn discard(&mut self, _seq: SeqId) -> Result<(), DeviceError> {
        unused()
    }

    fn snapshot(
        &mut self,
        _seq: SeqId,
        _location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        unused()
    }

    fn restore(&mut self, _seq: SeqId, _snapshot: SnapshotId) -> Result<(), DeviceError> {
        unused()
    }

    fn free_snapshot(&mut self, _snapshot: SnapshotId) {}

    fn export(&mut self, _id: SnapshotId, _sink: &mut dyn Write) -> Result<(), DeviceError> {
        unused()
    }

    fn import(&mut self, _source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        unused()
    }
}

/// Plain seconds and drafted seconds of some replies.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seconds {
    pub(super) plain: f64,
    pub(super) drafted: f64,
}

impl Seconds {
    /// Plain time over drafted time.
    pub(super) fn speedup(self) -> f64 {
        self.plain / self.drafted
    }

    pub(super) fn add(&mut self, other: Seconds) {
        self.plain += other.plain;
        self.drafted += other.drafted;
    }
}

/// A server that answers one request after another, in the time of a device.
pub(super) struct Server {
    proposer: MixedProposer,
    runner: ScriptedRunner,
    texts: TextRng,
    noise: TextRng,
    /// The server's seed, and the number of its replies so far.
    seed: u64,
    replies: u64,
}

impl Server {
    /// A server with some sources. Seeds of texts and of noise follow from `seed`.
    pub(super) fn new(device: &Device, sources: SourceSet, seed: u64) -> Server {
        let config = SpeculationConfig {
            costs: Some(device.costs.clone()),
            ..SpeculationConfig::default()
        };
        Server {
            proposer: MixedProposer::new(config, sources),
            runner: ScriptedRunner::new(device.clone()),
            texts: TextRng(17 + 1009 * seed),
            noise: TextRng(23 + 10_007 * seed),
            seed,
            replies: 0,
        }
    }

    /// A server that drafts at every step with these sources.
    pub(super) fn fixed(device: &Device, sources: SourceSet, seed: u64) -> Server {
        let config = SpeculationConfig {
            costs: Some(device.costs.clone()),
            ..SpeculationConfig::default()
        };
        Server {
            proposer: MixedProposer::fixed(config, sources),
            ..Server::new(device, sources, seed)
        }
    }

    /// The time of a reply of `tokens`.
    pub(super) fn reply(&mut self, kind: Kind, tokens: usize) -> Seconds {
        const PROMPT: usize = 400;
        let Server { runner, noise, .. } = self;
        runner.kind = kind;
        runner.seed = (self.seed << 32) + 1000 * self.replies + 7;
        runner.text = text(kind, PROMPT + tokens, &mut self.texts);
        (runner.root, runner.waiting) = (PROMPT, [0; 2]);
        let end = runner.text.len() - 1;
        let seq = SeqId(self.replies);
        self.replies += 1;
        let costs = runner.device.costs.clone();
        let mut sum = Seconds::default();
        while runner.root < end {
            let history = runner.text[..=runner.root].to_vec();
            let root = TreeRequest {
                seq,
                history: &history,
                max_depth: end - runner.root,
                forced: &[],
                speculate: true,
                surprisal: kind.surprisal * (0.5 + noise.unit()),
            };
            runner.seconds = 0.0;
            let proposed = self.proposer.propose(runner, &[root]).unwrap().remove(0);
            let tree = &proposed.tree;
            let mut node = NodeIdx::ROOT;
            let mut yielded = Vec::new();
            while let Some(next) = runner.text.get(runner.root + yielded.len() + 1) {
                yielded.push(*next);
                match tree.child_with(node, *next) {
                    Some(child) => node = child,
                    None => break,
                }
            }
            let jitter = 0.9 + 0.2 * noise.unit();
            let (draft, verify) = (runner.seconds, costs.verify(tree.len()));
            let times = StepTimes {
                draft: Duration::from_secs_f64(draft * jitter),
                verify: Duration::from_secs_f64(verify * jitter),
                commit: Duration::ZERO,
            };
            let tokens = &yielded[..];
            self.proposer.observe(&[TreeResult { seq, tokens }], times);
            runner.root += tokens.len();
            for waiting in &mut runner.waiting {
                *waiting += tokens.len();
            }
            sum.add(Seconds {
                plain: tokens.len() as f64 * costs.verify(1),
                drafted: draft + verify,
            });
        }
        sum
    }
}

/// Plain time over drafted time per kind of text, of replies of `tokens` in turn on one server.
pub(super) fn speedups(
    device: &Device,
    sources: SourceSet,
    (rounds, tokens): (usize, usize),
    seed: u64,
) -> BTreeMap<&'static str, f64> {
    let mut server = Server::new(device, sources, seed);
    let mut sums: BTreeMap<&'static str, Seconds> = BTreeMap::new();
    for n in 0..rounds * KINDS.len() {
        let kind = KINDS[n % KINDS.len()];
        let reply = server.reply(kind, tokens);
        sums.entry(kind.name).or_default().add(reply);
    }
    sums.into_iter()
        .map(|(name, sum)| (name, sum.speedup()))
        .collect()
}
