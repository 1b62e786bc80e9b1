//! `hearth tokenize`: text on standard input, ids on standard output.

use std::io::{Read, Write};

use anyhow::Context;
use chat::{SpecialTokens, Tokenizer};

use crate::cli::TokenizeArgs;
use crate::open::by_name::in_cache;
use crate::open::model_path::check_model;

pub(super) fn tokenize(args: &TokenizeArgs) -> anyhow::Result<()> {
    let path = in_cache(&args.model);
    check_model(&path)?;
    let tokenizer = Tokenizer::new(&model::load_vocab(&path)?)
        .with_context(|| format!("{}: tokenizer.ggml", path.display()))?;
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .read_to_end(&mut bytes)
        .context("cannot read standard input")?;
    let text = String::from_utf8(bytes).context("standard input is not UTF-8")?;
    let special = if args.no_special {
        SpecialTokens::AsText
    } else {
        SpecialTokens::Parse
    };
    let ids: Vec<u32> = tokenizer
        .encode(&text, special)?
        .into_iter()
        .map(|id| id.0)
        .collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(&ids)?)?;
    Ok(())
}
