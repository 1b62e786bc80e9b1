//! `hearth eval`: token ids through the model, logits to a file.

use std::fs;

use anyhow::{Context, bail};
use contract::{CommitItem, LogitsRequest, LogitsRow, NodeIdx, Runner, TokenId, Tree, VerifyItem};

use crate::cli::EvalArgs;
use crate::commands::eval_draft;
use crate::commands::npy::NpyWriter;
use crate::open::{self, MemoryRequest};
use crate::progress::TaskProgress;

pub(super) fn eval(args: &EvalArgs) -> anyhow::Result<()> {
    let loaded = open::load(&args.model)?;
    let ids = read_ids(args, loaded.spec.vocab)?;
    if let (Some(draft), Some(at)) = (&args.draft, args.at) {
        eval_draft::write(args, &loaded, &ids, (draft, at))?;
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
