//! The vocabulary and the chat templates of a file.

use contract::{PreTokenizer, TokenId, TokenKind, Vocab};

use crate::error::ModelError;
use crate::source::Source;

/// Control strings that end a generation besides the file's own token, looked up by text.
const ENDS: [&str; 5] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];
const TEMPLATE: &str = "tokenizer.chat_template";

/// Reads the vocabulary; it must have exactly `rows` tokens, the rows of the embedding.
pub(crate) fn read(source: &Source<'_>, rows: usize) -> Result<Vocab, ModelError> {
    let model = text(source, "tokenizer.ggml.model")?;
    if model.as_deref() != Some("gpt2") {
        return Err(source.unsupported(
            format!(
                "tokenizer.ggml.model {}",
                model.as_deref().unwrap_or("(missing)")
            ),
            "use a file with a byte-level BPE vocabulary (gpt2)",
        ));
    }
    let pre = match text(source, "tokenizer.ggml.pre")?.as_deref() {
        Some("qwen2") => PreTokenizer::Qwen2,
        Some("qwen35") => PreTokenizer::Qwen35,
        other => {
            return Err(source.unsupported(
                format!("tokenizer.ggml.pre {}", other.unwrap_or("(missing)")),
                "use a file with pre-tokenizer qwen2 or qwen35",
            ));
        }
    };
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let tokens =
        texts(source, TOKENS)?.ok_or_else(|| source.full_key(TOKENS, "is missing".to_owned()))?;
    if tokens.len() != rows {
        let have = tokens.len();
        return Err(source.full_key(
            TOKENS,
            format!("has {have} tokens, but token_embd.weight has {rows} rows"),
        ));
    }
    let kinds = kinds(source, tokens.len())?;
    let merges = merges(source)?;
    let token = |key: &str| special(source, key, tokens.len());
    let eos_token = token("tokenizer.ggml.eos_token_id")?;
    let mut eos: Vec<TokenId> = eos_token
        .into_iter()
        .chain(token("tokenizer.ggml.eot_token_id")?)
        .collect();
    for end in ENDS {
        // From the back, because control strings stand last and a plain token never equals one.
        if let Some(at) = tokens.iter().rposition(|t| t == end) {
            eos.push(TokenId(at as u32));
        }
    }
    let mut seen = Vec::new();
    eos.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    let add_bos = source.read(|meta| meta.boolean("tokenizer.ggml.add_bos_token"))?;
    Ok(Vocab {
        bos_token: token("tokenizer.ggml.bos_token_id")?,
        pad_token: token("tokenizer.ggml.padding_token_id")?,
        chat_template: text(source, TEMPLATE)?,
        named_templates: named_templates(source)?,
        tokens,
        kinds,
        merges,
        pre,
        eos,
        eos_token,
        add_bos: add_bos.unwrap_or(false),
    })
}

fn text(source: &Source<'_>, key: &str) -> Result<Option<String>, ModelError> {
    Ok(source.read(|meta| meta.text(key))?.map(str::to_owned))
}

fn texts(source: &Source<'_>, key: &str) -> Result<Option<Vec<String>>, ModelError> {
    let texts = source.read(|meta| meta.texts(key))?;
    Ok(texts.map(|texts| texts.into_iter().map(str::to_owned).collect()))
}

/// Numbers of the format: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
fn kinds(source: &Source<'_>, tokens: usize) -> Result<Vec<TokenKind>, ModelError> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(numbers) = source.read(|meta| meta.integers(KEY))? else {
        return Ok(vec![TokenKind::Normal; tokens]);
    };
    if numbers.len() != tokens {
        let have = numbers.len();
        return Err(source.full_key(KEY, format!("has {have} entries for {tokens} tokens")));
    }
    numbers
        .into_iter()
        .enumerate()
        .map(|(at, entry)| match entry {
            1 => Ok(TokenKind::Normal),
            2 => Ok(TokenKind::Unknown),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            6 => Ok(TokenKind::Byte),
            _ => Err(source.full_key(KEY, format!("has no kind from 1 to 6 at index {at}"))),
        })
        .collect()
}

/// `left right`, cut at the first space after the first character, because a token may begin with a space.
fn merges(source: &Source<'_>) -> Result<Vec<(String, String)>, ModelError> {
    const KEY: &str = "tokenizer.ggml.merges";
    let Some(lines) = texts(source, KEY)? else {
        return Err(source.full_key(KEY, "is missing".to_owned()));
    };
    lines
        .into_iter()
        .enumerate()
        .map(|(at, line)| {
            let first = line.chars().next().map_or(0, char::len_utf8);
            let cut = line[first..].find(' ').map(|space| space + first);
            match cut {
                Some(cut) => Ok((line[..cut].to_owned(), line[cut + 1..].to_owned())),
                None => Err(source.full_key(KEY, format!("has no pair at index {at}: {line:?}"))),
            }
        })
        .collect()
}

fn special(source: &Source<'_>, key: &str, tokens: usize) -> Result<Option<TokenId>, ModelError> {
    match source.read(|meta| meta.integer(key))? {
        None => Ok(None),
        Some(id) if id < tokens as u64 => Ok(Some(TokenId(id as u32))),
        // Some files say "none" as the largest number.
        Some(id) if id == u64::from(u32::MAX) => Ok(None),
        Some(id) => {
            Err(source.full_key(key, format!("is {id}, but there are {tokens} tokens only")))
        }
    }
}

fn named_templates(source: &Source<'_>) -> Result<Vec<(String, String)>, ModelError> {
    let prefix = format!("{TEMPLATE}.");
    let mut all = Vec::new();
    for (key, _) in source.file().meta().iter() {
        if let Some(name) = key.strip_prefix(&prefix)
            && let Some(template) = text(source, key)?
        {
            all.push((name.to_owned(), template));
        }
    }
    Ok(all)
}
