//! Recordings of what the bundled pair and the target's own head draft after every token of some
//! replies, for replays in simulated time.

use std::path::{Path, PathBuf};

use chat::SpecialTokens;
use contract::{
    Backend, CommitItem, DraftCandidates, DraftItem, KvFormat, KvFormats, Limits, LoadConfig,
    LogitsRequest, LogitsRow, MtpDraftItem, MtpRow, NodeIdx, Runner, RunnerInfo, SeqId, TokenId,
    Tree, VerifyItem,
};
use cpu::CpuBackend;

use super::prompt_table::entries;
use super::speculation_ab::{SOURCE_TOKENS, SOURCES};
use super::tune::{Prompt, prompts, render};
use super::{ModelSource, draft, model};
use crate::open;
use crate::settings::GenerationDefaults;

/// Prompts from source files: as many as of any other class.
const N_SOURCES: usize = 5;
/// Tokens of a source file that its second copy begins with.
const REPEATED_TOKENS: usize = 80;
/// Tokens of a reply.
const TOKENS: usize = 64;
/// Recorded candidates per drafted position, as many as schedulers request.
pub(super) const CANDIDATES: usize = 8;
/// Recorded depths of the head. Deeper ones are rarely worth their time on a CPU.
const HEAD_DEPTHS: usize = 5;
/// The most drafted nodes of a tree, as in serving.
pub(super) const BUDGET: usize = 22;

/// The outputs of target and draft for one prompt.
pub(super) struct Recording {
    pub(super) class: String,
    pub(super) prompt: Vec<TokenId>,
    /// The greedy reply.
    pub(super) tokens: Vec<TokenId>,
    /// The logits row of each of its tokens.
    pub(super) rows: Vec<LogitsRow>,
    /// The draft's candidates with each token but the last as root.
    pub(super) drafts: Vec<DraftCandidates>,
    /// The head's candidates with each token but the last as root, by depth along the reply.
    pub(super) heads: Vec<Vec<DraftCandidates>>,
}

fn ember(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember");
    root.join(name)
}

/// Recordings of the bundled pair for the prompts of the benchmark.
pub(super) fn record_all() -> (RunnerInfo, Vec<Recording>) {
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
    let mut others = entries(own).unwrap();
    others.retain(|entry| {
        ["json", "prose"]
            .iter()
            .any(|class| entry["class"] == *class)
    });
    all.extend(render(&others, "benches/prompts.jsonl", &loaded).unwrap());
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
    let mut info = runner.info().clone();
    let head = info.mtp.as_mut().unwrap();
    head.max_depth = head.max_depth.min(HEAD_DEPTHS);
    (info, recordings)
}

/// Generates a greedy reply, then drafts after every token of it.
fn record(runner: &mut dyn Runner, prompt: Prompt, eos: &[TokenId]) -> Recording {
    let (seq, first) = prefill(runner, &prompt.tokens);
    let (mut tokens, mut rows) = (vec![first.ids[0]], vec![first]);
    while let Some(root) = tokens.last().copied()
        && tokens.len() < TOKENS
        && !eos.contains(&root)
    {
        let row = advance(runner, seq, root);
        tokens.push(row.ids[0]);
        rows.push(row);
    }
    runner.close(seq);
    let depth = runner.info().draft_depth.unwrap();
    let (seq, _) = prefill(runner, &prompt.tokens);
    let (mut drafts, mut heads) = (Vec::new(), Vec::new());
    for at in 0..tokens.len() - 1 {
        let items = [DraftItem {
            seq,
            root: tokens[at],
        }];
        drafts.append(&mut runner.draft(&items, depth, CANDIDATES).unwrap());
        let depths = tokens[at..tokens.len() - 1].iter().take(HEAD_DEPTHS);
        let row = |(row, token): (usize, &TokenId)| {
            let item = MtpDraftItem {
                seq,
                parent: row.checked_sub(1).map(|before| MtpRow(before as u16)),
                token: *token,
            };
            runner.draft_mtp(&[item], CANDIDATES).unwrap().remove(0)
        };
        heads.push(depths.enumerate().map(row).collect());
        advance(runner, seq, tokens[at]);
    }
    runner.close(seq);
    Recording {
        class: prompt.class,
        prompt: prompt.tokens,
        tokens,
        rows,
        drafts,
        heads,
    }
}

/// A sequence with a prompt, and the row behind it.
fn prefill(runner: &mut dyn Runner, prompt: &[TokenId]) -> (SeqId, LogitsRow) {
    let seq = runner.open(prompt.len() + TOKENS).unwrap();
    let requests = [(prompt.len() - 1, LogitsRequest::top_k(1))];
    let mut rows = runner.prefill(seq, prompt, &requests).unwrap();
    (seq, rows.remove(0))
}

/// Commits a token; returns the row behind it.
fn advance(runner: &mut dyn Runner, seq: SeqId, root: TokenId) -> LogitsRow {
    let tree = &Tree::root(root);
    let requests = &[LogitsRequest::top_k(1)];
    let item = VerifyItem {
        seq,
        tree,
        requests,
    };
    let row = runner.verify(&[item]).unwrap().remove(0).remove(0);
    let path = &tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path }]).unwrap();
    row
}
