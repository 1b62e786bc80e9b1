//! `hearth imatrix`: runs a text through a model and writes how much each input of a matrix counts.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, bail};
use chat::{SpecialTokens, Tokenizer};
use contract::TokenId;
use cpu::importance::{InputSums, collect};
use model::importance::{ImportanceSums, write};

use crate::cli::{DeviceArgs, ImatrixArgs};
use crate::commands::new_file::{NewFile, check_output, written_line};
use crate::open::by_name::in_cache;
use crate::open::{self, MemoryRequest};
use crate::progress::TaskProgress;

pub(super) fn imatrix(args: &ImatrixArgs) -> anyhow::Result<()> {
    let device = DeviceArgs {
        device: match args.device.device.as_str() {
            "auto" | "cpu" => "cpu".to_owned(),
            other => bail!("--device {other}: inputs are summed on the CPU only; leave it out"),
        },
        ..args.device.clone()
    };
    check_output(&args.output, args.force)?;
    let path = in_cache(&args.model);
    let loaded = open::load(&path)?;
    if loaded
        .spec
        .layers
        .iter()
        .any(|layer| layer.ffn.dense().is_none())
    {
        bail!(
            "{}: inputs of experts are not summed yet; use a model without experts",
            path.display()
        );
    }
    let chunks = chunks(args)?;
    let backend = open::device(&device)?;
    let request = MemoryRequest {
        sequences: 1,
        context: Some(args.chunk_tokens),
        tree_nodes: 1,
    };
    let fitted = open::fit(backend.as_ref(), &loaded, &device, request)?;
    let piece = fitted.config.limits.prefill_chunk;
    let mut runner = open::open(backend.as_ref(), fitted.config, &mut |_| {})?;
    let progress = TaskProgress::new("summing inputs");
    let (result, sums) = collect(|| -> anyhow::Result<()> {
        for (done, tokens) in chunks.iter().enumerate() {
            progress.set(done as u64, chunks.len() as u64);
            let seq = runner.open(tokens.len())?;
            for piece in tokens.chunks(piece) {
                runner.prefill(seq, piece, &[])?;
            }
            runner.close(seq);
        }
        Ok(())
    });
    result?;
    drop(progress);
    let entries: BTreeMap<String, InputSums> = sums
        .into_iter()
        .map(|(name, sums)| (name.to_string(), sums))
        .collect();
    let matrices = entries.iter().map(|(name, sums)| ImportanceSums {
        tensor: name,
        squares: &sums.squares,
        rows: sums.rows,
    });
    let (new, out) = NewFile::begin(&args.output, args.force)?;
    let text = args.text.display().to_string();
    let out = write(out, matrices, &text, (chunks.len(), args.chunk_tokens))?;
    new.keep(out)?;
    written_line(&args.output)
}

/// The text in whole chunks; the first token of each is the model's beginning of a text if it has
/// one.
fn chunks(args: &ImatrixArgs) -> anyhow::Result<Vec<Vec<TokenId>>> {
    let name = args.text.display();
    let text = fs::read_to_string(&args.text).with_context(|| format!("cannot read {name}"))?;
    let vocab = model::load_vocab(&in_cache(&args.model))?;
    let tokenizer = Tokenizer::new(&vocab).context("the model's tokenizer")?;
    let ids = tokenizer.encode(&text, SpecialTokens::AsText)?;
    let mut chunks: Vec<Vec<TokenId>> = ids
        .chunks_exact(args.chunk_tokens)
        .map(<[TokenId]>::to_vec)
        .take(args.chunks.unwrap_or(usize::MAX))
        .collect();
    if chunks.is_empty() {
        bail!(
            "{name}: {} tokens are less than a chunk of {}; use a longer text or --chunk-tokens",
            ids.len(),
            args.chunk_tokens
        );
    }
    if let Some(bos) = vocab.bos_token.filter(|_| vocab.add_bos) {
        chunks.iter_mut().for_each(|chunk| chunk[0] = bos);
    }
    Ok(chunks)
}
