//! The draft's part of `hearth eval`: its logits and its greedy chain behind one root, to files.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use contract::{DraftItem, DraftLogits, MtpDraftItem, MtpRow, Runner, SeqId, TokenId};

use crate::cli::EvalArgs;
use crate::commands::npy::NpyWriter;
use crate::open::drafting::{self, Drafting};
use crate::open::{self, MemoryRequest};

/// The value of `--draft` that names the model's own multi-token-prediction head.
const OWN_HEAD: &str = "mtp";

/// Writes what the draft says behind the root `ids[at]`.
pub(super) fn write(
    args: &EvalArgs,
    loaded: &model::LoadedModel,
    ids: &[TokenId],
    (draft, at): (&Path, usize),
) -> anyhow::Result<()> {
    if args.draft_logits.is_none() && args.draft_chain.is_none() {
        bail!("--draft: nothing to write; add --draft-logits FILE or --draft-chain FILE");
    }
    let Some(&root) = ids.get(at).filter(|_| at > 0) else {
        bail!(
            "--at {at}: use 1 to {}, the index of an id with others before it",
            ids.len() - 1
        );
    };
    let mut drafting = Drafting::none();
    let of_head = draft == Path::new(OWN_HEAD);
    if of_head {
        if loaded.spec.mtp.is_none() {
            bail!("--draft mtp: the model has no multi-token-prediction head");
        }
        drafting.mtp = true;
    } else {
        let options = model::DraftOptions {
            width: drafting::width(args.draft_width),
            ..drafting::options(args.draft_swa)
        };
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
    let DraftLogits { logits, chain } = if of_head {
        head_logits(runner.as_mut(), (seq, root), usize::from(args.draft_depth))?
    } else {
        runner.draft_logits(DraftItem { seq, root })?
    };
    let vocab = loaded.spec.vocab;
    if logits.is_empty() || !logits.len().is_multiple_of(vocab) {
        bail!(
            "the device returned {} draft logits of {vocab}",
            logits.len()
        );
    }
    if let Some(out) = &args.draft_logits {
        let write = || -> std::io::Result<()> {
            let mut npy = NpyWriter::create(out, logits.len() / vocab, vocab)?;
            logits.chunks(vocab).try_for_each(|row| npy.row(row))?;
            npy.finish()
        };
        write().with_context(|| format!("cannot write {}", out.display()))?;
    }
    if let Some(out) = &args.draft_chain {
        let ids: Vec<u32> = chain.iter().map(|token| token.0).collect();
        let text = serde_json::to_string(&ids)?;
        fs::write(out, text).with_context(|| format!("cannot write {}", out.display()))?;
    }
    Ok(())
}

/// The logits of the model's own head along its greedy chain behind `root`.
fn head_logits(
    runner: &mut dyn Runner,
    (seq, root): (SeqId, TokenId),
    depth: usize,
) -> anyhow::Result<DraftLogits> {
    let vocab = runner.info().vocab;
    if runner.info().mtp.is_none() {
        bail!("--draft mtp: the device does not run multi-token-prediction heads");
    }
    let mut logits = vec![f32::NEG_INFINITY; depth * vocab];
    let (mut parent, mut token, mut chain) = (None, root, Vec::with_capacity(depth));
    for (row, logits) in logits.chunks_mut(vocab).enumerate() {
        let item = MtpDraftItem { seq, parent, token };
        let found = runner.draft_mtp(&[item], vocab)?.into_iter().next();
        let found = found.filter(|found| found.k == vocab && found.lse.len() == 1);
        let found = found.context("the device returned no draft candidates")?;
        for (id, log_prob) in found.ids.iter().zip(&found.log_probs) {
            logits[id.index()] = log_prob + found.lse[0];
        }
        token = found.ids[0];
        chain.push(token);
        parent = Some(MtpRow(u16::try_from(row)?));
    }
    Ok(DraftLogits { logits, chain })
}
