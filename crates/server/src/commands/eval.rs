//! `hearth eval`: token ids through the model, logits to a file.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use contract::{
    CommitItem, DraftCandidates, DraftItem, LogitsRequest, LogitsRow, MtpDraftItem, MtpRow,
    NodeIdx, Runner, SeqId, TokenId, Tree, VerifyItem,
};

use crate::cli::EvalArgs;
use crate::commands::npy::NpyWriter;
use crate::open::drafting::{self, Drafting};
use crate::open::{self, MemoryRequest};
use crate::progress::TaskProgress;

/// The value of `--draft` that names the model's own multi-token-prediction head.
const OWN_HEAD: &str = "mtp";

pub(super) fn eval(args: &EvalArgs) -> anyhow::Result<()> {
    let loaded = open::load(&args.model)?;
    let ids = read_ids(args, loaded.spec.vocab)?;
    if let (Some(draft), Some(out), Some(at)) = (&args.draft, &args.draft_logits, args.at) {
        draft_logits(args, &loaded, &ids, (draft, out, at))?;
        if args.logits.is_none() && args.greedy.is_none() {
            return Ok(());
        }
    }
    let steps = args.greedy.unwrap_or(0);
    let backend = open::device(&args.device)?;
    let request = MemoryRequest {
        sequences: 1,
        context: Some(ids.len() + steps),
        tree_nodes: 1,
    };
    let fitted = open::fit(backend.as_ref(), &loaded, &args.device, request)?;
    let context = fitted.config.limits.context;
    if ids.len() + steps > context {
        bail!(
            "{} ids and {steps} steps exceed --max-ctx {context}",
            ids.len()
        );
    }
    let chunk = fitted.config.limits.prefill_chunk;
    let mut runner = open::open(backend.as_ref(), fitted.config, &mut |_| {})?;

    let mut npy = match &args.logits {
        Some(path) => {
            let npy = NpyWriter::create(path, ids.len(), loaded.spec.vocab);
            Some(npy.with_context(|| format!("cannot write {}", path.display()))?)
        }
        None => None,
    };
    let seq = runner.open(ids.len() + steps)?;
    let progress = TaskProgress::new("evaluating");
    let mut last = LogitsRow::default();
    for (at, tokens) in ids.chunks(chunk).enumerate() {
        let first = if npy.is_some() { 0 } else { tokens.len() - 1 };
        let requests: Vec<_> = (first..tokens.len())
            .map(|i| (i, LogitsRequest::full()))
            .collect();
        let rows = runner.prefill(seq, tokens, &requests)?;
        if let Some(npy) = &mut npy {
            rows.iter()
                .try_for_each(|row| npy.row(&row.raw))
                .context("cannot write logits")?;
        }
        last = rows
            .into_iter()
            .last()
            .context("the device returned no logits row")?;
        progress.set((at * chunk + tokens.len()) as u64, ids.len() as u64);
    }
    if let Some(npy) = npy {
        npy.finish().context("cannot write logits")?;
    }
    if let Some(path) = &args.out_ids {
        let out = greedy(runner.as_mut(), seq, &last, steps)?;
        let text = serde_json::to_string(&out)?;
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Writes the draft's logits for the block whose root is `ids[at]`.
fn draft_logits(
    args: &EvalArgs,
    loaded: &model::LoadedModel,
    ids: &[TokenId],
    (draft, out, at): (&Path, &Path, usize),
) -> anyhow::Result<()> {
    let Some(&root) = ids.get(at).filter(|_| at > 0) else {
        bail!(
            "--at {at}: use 1 to {}, the index of an id with others before it",
            ids.len() - 1
        );
    };
    let vocab = loaded.spec.vocab;
    let mut drafting = Drafting::none();
    let of_head = draft == Path::new(OWN_HEAD);
    if of_head {
        if loaded.spec.mtp.is_none() {
            bail!("--draft mtp: the model has no multi-token-prediction head");
        }
        drafting.mtp = true;
    } else {
        let options = drafting::options(args.draft_swa);
        let found = drafting::load_draft(draft, &loaded.spec, options)?;
        let reference = args.device.cpu_reference;
        drafting.config = Some(drafting::draft_config(found, reference, false));
    }
    let backend = open::device(&args.device)?;
    let request = MemoryRequest {
        sequences: 1,
        context: Some(ids.len()),
        tree_nodes: 1,
    };
    let fitted =
        open::fit_with_draft(backend.as_ref(), loaded, &args.device, (request, &drafting))?;
    let chunk = fitted.config.limits.prefill_chunk;
    let mut runner = open::open(backend.as_ref(), fitted.config, &mut |_| {})?;
    let seq = runner.open(ids.len())?;
    for tokens in ids[..at].chunks(chunk) {
        runner.prefill(seq, tokens, &[])?;
    }
    let drafted = if of_head {
        greedy_chain(runner.as_mut(), (seq, root), usize::from(args.draft_depth))?
    } else {
        let depth = runner
            .info()
            .draft_depth
            .context("the device has no draft model")?;
        let drafted = runner.draft(&[DraftItem { seq, root }], depth, vocab)?;
        let drafted = drafted.into_iter().next();
        drafted.context("the device returned no draft candidates")?
    };
    let depth = drafted.lse.len();
    if drafted.k != vocab || depth == 0 || drafted.ids.len() != depth * vocab {
        bail!(
            "the device returned {} draft candidates of {vocab}",
            drafted.k
        );
    }
    let write = || -> std::io::Result<()> {
        let mut npy = NpyWriter::create(out, depth, vocab)?;
        let mut logits = vec![0.0; vocab];
        for row in 0..depth {
            let of_row = row * vocab..(row + 1) * vocab;
            let pairs = drafted.ids[of_row.clone()]
                .iter()
                .zip(&drafted.log_probs[of_row]);
            for (id, log_prob) in pairs {
                logits[id.index()] = log_prob + drafted.lse[row];
            }
            npy.row(&logits)?;
        }
        npy.finish()
    };
    write().with_context(|| format!("cannot write {}", out.display()))
}

/// The head's candidates along its greedy chain behind `root`, over the whole vocabulary.
fn greedy_chain(
    runner: &mut dyn Runner,
    (seq, root): (SeqId, TokenId),
    depth: usize,
) -> anyhow::Result<DraftCandidates> {
    let vocab = runner.info().vocab;
    let limits = runner.info().mtp;
    if limits.is_none() {
        bail!("--draft mtp: the device does not run multi-token-prediction heads");
    }
    let mut all = DraftCandidates {
        ids: Vec::with_capacity(depth * vocab),
        log_probs: Vec::with_capacity(depth * vocab),
        lse: Vec::with_capacity(depth),
        k: vocab,
        ..DraftCandidates::default()
    };
    let (mut parent, mut token) = (None, root);
    for row in 0..depth {
        let item = MtpDraftItem { seq, parent, token };
        let found = runner.draft_mtp(&[item], vocab)?.into_iter().next();
        let found = found.context("the device returned no draft candidates")?;
        let best = found.ids.first();
        token = *best.context("the device returned no draft candidates")?;
        parent = Some(MtpRow(u16::try_from(row)?));
        all.ids.extend(found.ids);
        all.log_probs.extend(found.log_probs);
        all.lse.extend(found.lse);
    }
    Ok(all)
}

fn read_ids(args: &EvalArgs, vocab: usize) -> anyhow::Result<Vec<TokenId>> {
    let name = args.ids.display();
    let text = fs::read(&args.ids).with_context(|| format!("cannot read {name}"))?;
    let ids: Vec<u32> = serde_json::from_slice(&text)
        .with_context(|| format!("{name} is not a JSON array of token ids"))?;
    if ids.is_empty() {
        bail!("{name} holds no ids");
    }
    if let Some((at, id)) = ids
        .iter()
        .enumerate()
        .find(|(_, id)| **id as usize >= vocab)
    {
        bail!("{name}: id {id} at index {at} is beyond the vocabulary of {vocab}");
    }
    Ok(ids.into_iter().map(TokenId).collect())
}

/// Generates `steps` tokens greedily; of equal logits, the lowest id wins.
fn greedy(
    runner: &mut dyn Runner,
    seq: contract::SeqId,
    row: &LogitsRow,
    steps: usize,
) -> anyhow::Result<Vec<u32>> {
    let mut out = Vec::with_capacity(steps);
    let mut next = argmax(row)?;
    while out.len() < steps {
        out.push(next.0);
        if out.len() == steps {
            break;
        }
        let tree = Tree::root(next);
        let rows = runner.verify(&[VerifyItem {
            seq,
            tree: &tree,
            requests: &[LogitsRequest::top_k(1)],
        }])?;
        let path = tree.path_to(NodeIdx::ROOT);
        runner.commit(&[CommitItem { seq, path: &path }])?;
        next = argmax(
            rows.first()
                .and_then(|rows| rows.first())
                .context("the device returned no logits row")?,
        )?;
    }
    Ok(out)
}

fn argmax(row: &LogitsRow) -> anyhow::Result<TokenId> {
    let mut best: Option<(TokenId, f32)> = None;
    for (&id, &logit) in row.ids.iter().zip(&row.raw) {
        if best.is_none_or(|(_, highest)| logit > highest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id)
        .context("the device returned an empty logits row")
}
