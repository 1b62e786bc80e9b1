//! The vocabulary of a file: tokens, kinds, merges, special ids, chat templates.

use contract::{PreTokenizer, SentencePieces, TokenId, TokenKind, Vocab};
use gguf::{Array, GgufFile, Value};

use crate::ModelError;
use crate::fim;
use crate::markup;
use crate::names::EMBEDDING;
use crate::reader::{key_error, missing};

const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const TEMPLATE: &str = "tokenizer.chat_template";

/// Tokens that end a turn in all our families, whatever the file names as its end of text: markers
/// of turns and of documents, and three that only occur in code completion.
const STOP_TOKENS: [&str; 9] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];
/// Keys of tokens that end a turn.
const STOP_KEYS: [&str; 3] = [
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
];

/// Reads the vocabulary, one token for each of `rows` of the embedding.
pub(crate) fn read(file: &GgufFile, rows: Option<u64>) -> Result<Vocab, ModelError> {
    let meta = file.meta();
    let at = |e| key_error(file, e);
    let refuse = |key: &str, detail: String| ModelError::Key {
        file: file.name().to_owned(),
        key: key.to_owned(),
        detail,
    };
    const MODEL: &str = "tokenizer.ggml.model";
    let has_pieces = match meta
        .text(MODEL)
        .map_err(at)?
        .ok_or_else(|| missing(file, MODEL))?
    {
        "gpt2" => false,
        "llama" => true,
        other => {
            let detail = format!(
                "{}; only gpt2 (byte-level BPE) and llama (SentencePiece) are supported",
                other.escape_debug()
            );
            return Err(refuse(MODEL, detail));
        }
    };
    let texts = meta
        .texts(TOKENS)
        .map_err(at)?
        .ok_or_else(|| missing(file, TOKENS))?;
    let tokens: Vec<String> = texts.into_iter().map(str::to_owned).collect();
    if let Some(rows) = rows
        && rows != tokens.len() as u64
    {
        let detail = format!("{} tokens, but {EMBEDDING} has {rows} rows", tokens.len());
        return Err(refuse(TOKENS, detail));
    }
    let token = |key: &str| -> Result<Option<TokenId>, ModelError> {
        let Some(id) = meta.integer(key).map_err(at)? else {
            return Ok(None);
        };
        match u32::try_from(id) {
            Ok(id) if (id as usize) < tokens.len() => Ok(Some(TokenId(id))),
            _ => Err(refuse(
                key,
                format!("token {id} of a vocabulary of {}", tokens.len()),
            )),
        }
    };
    let mut eos = Vec::new();
    for key in STOP_KEYS {
        eos.extend(token(key)?);
    }
    for (id, text) in tokens.iter().enumerate() {
        if STOP_TOKENS.contains(&text.as_str()) {
            eos.push(TokenId(id as u32));
        }
    }
    eos.sort_unstable();
    eos.dedup();
    let (merges, pre, pieces) = if has_pieces {
        let unknown = token("tokenizer.ggml.unknown_token_id")?;
        let pieces = sentence_pieces(file, tokens.len(), unknown)?;
        (Vec::new(), PreTokenizer::default(), Some(pieces))
    } else {
        (merges(file)?, pre_tokenizer(file)?, None)
    };
    let adds_bos = has_pieces || pre == PreTokenizer::LlamaBpe;
    let chat_template = meta.text(TEMPLATE).map_err(at)?.map(str::to_owned);
    let named_templates = named_templates(file)?;
    Ok(Vocab {
        kinds: kinds(file, &tokens)?,
        merges,
        pre,
        pieces,
        eos,
        eos_token: token("tokenizer.ggml.eos_token_id")?,
        bos_token: token("tokenizer.ggml.bos_token_id")?,
        pad_token: token("tokenizer.ggml.padding_token_id")?,
        add_bos: meta
            .boolean("tokenizer.ggml.add_bos_token")
            .map_err(at)?
            .unwrap_or(adds_bos),
        markup: markup::of_templates(
            chat_template
                .iter()
                .map(String::as_str)
                .chain(named_templates.iter().map(|(_, source)| source.as_str())),
        ),
        chat_template,
        named_templates,
        fim: fim::tokens(&tokens, token)?,
        tokens,
    })
}

fn pre_tokenizer(file: &GgufFile) -> Result<PreTokenizer, ModelError> {
    const KEY: &str = "tokenizer.ggml.pre";
    let found = file.meta().text(KEY).map_err(|e| key_error(file, e))?;
    match found.ok_or_else(|| missing(file, KEY))? {
        "qwen2" => Ok(PreTokenizer::Qwen2),
        "qwen35" => Ok(PreTokenizer::Qwen35),
        "llama-bpe" | "llama3" | "llama-v3" => Ok(PreTokenizer::LlamaBpe),
        "gpt-2" => Ok(PreTokenizer::Gpt2),
        "smollm" | "starcoder" => Ok(PreTokenizer::Smollm),
        other => Err(ModelError::Key {
            file: file.name().to_owned(),
            key: KEY.to_owned(),
            detail: format!(
                "{}; supported are qwen2, qwen35, llama-bpe, gpt-2, smollm and starcoder",
                other.escape_debug()
            ),
        }),
    }
}

/// The scores of a SentencePiece vocabulary.
fn sentence_pieces(
    file: &GgufFile,
    n_tokens: usize,
    unknown: Option<TokenId>,
) -> Result<SentencePieces, ModelError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    const PREFIX: &str = "tokenizer.ggml.add_space_prefix";
    let at = |e| key_error(file, e);
    let scores = file.meta().floats(SCORES).map_err(at)?;
    let scores = scores.ok_or_else(|| missing(file, SCORES))?;
    let nan = scores.iter().position(|score| score.is_nan());
    let detail = match nan {
        Some(token) => format!("the score of token {token} is not a number"),
        None => format!("{} scores for {n_tokens} tokens", scores.len()),
    };
    if nan.is_some() || scores.len() != n_tokens {
        return Err(ModelError::Key {
            file: file.name().to_owned(),
            key: SCORES.to_owned(),
            detail,
        });
    }
    Ok(SentencePieces {
        scores: scores.to_vec(),
        space_prefix: file.meta().boolean(PREFIX).map_err(at)?.unwrap_or(true),
        unknown,
    })
}

/// Whether a control token only pads the table: Gemma has 6,242 of them, `<unused0>` and so on.
fn is_filler(token: &str) -> bool {
    let number = token.strip_prefix("<unused");
    let number = number.and_then(|rest| rest.strip_suffix('>'));
    number.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

fn kinds(file: &GgufFile, tokens: &[String]) -> Result<Vec<TokenKind>, ModelError> {
    let refuse = |key: String, detail: String| {
        Err(ModelError::Key {
            file: file.name().to_owned(),
            key,
            detail,
        })
    };
    let found = file
        .meta()
        .integers(KINDS)
        .map_err(|e| key_error(file, e))?;
    let found = found.ok_or_else(|| missing(file, KINDS))?;
    if found.len() != tokens.len() {
        let detail = format!("{} kinds for {} tokens", found.len(), tokens.len());
        return refuse(KINDS.to_owned(), detail);
    }
    let mut kinds = Vec::with_capacity(found.len());
    for (i, kind) in found.into_iter().enumerate() {
        kinds.push(match kind {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 if is_filler(&tokens[i]) => TokenKind::Unused,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            other => {
                let detail = format!("{other} is not a kind of token, which is 1 to 6");
                return refuse(format!("{KINDS}[{i}]"), detail);
            }
        });
    }
    Ok(kinds)
}

fn merges(file: &GgufFile) -> Result<Vec<(String, String)>, ModelError> {
    let found = file.meta().texts(MERGES).map_err(|e| key_error(file, e))?;
    let found = found.ok_or_else(|| missing(file, MERGES))?;
    let mut merges = Vec::with_capacity(found.len());
    for (i, merge) in found.into_iter().enumerate() {
        // The left part is never empty, so a space in front belongs to it.
        let space = merge
            .char_indices()
            .skip(1)
            .find(|&(_, c)| c == ' ')
            .map(|(at, _)| at);
        match space.map(|at| (&merge[..at], &merge[at + 1..])) {
            Some((left, right)) if !right.is_empty() => {
                merges.push((left.to_owned(), right.to_owned()));
            }
            _ => {
                return Err(ModelError::Key {
                    file: file.name().to_owned(),
                    key: format!("{MERGES}[{i}]"),
                    detail: format!(
                        "\"{}\" is not two parts with a space between",
                        merge.escape_debug()
                    ),
                });
            }
        }
    }
    Ok(merges)
}

/// Templates under `tokenizer.chat_template.<name>`.
fn named_templates(file: &GgufFile) -> Result<Vec<(String, String)>, ModelError> {
    let mut named = Vec::new();
    for (key, value) in file.meta().iter() {
        let Some(name) = key.strip_prefix("tokenizer.chat_template.") else {
            continue;
        };
        if matches!(value, Value::Array(Array::String(_))) {
            continue;
        }
        if let Some(text) = file.meta().text(key).map_err(|e| key_error(file, e))? {
            named.push((name.to_owned(), text.to_owned()));
        }
    }
    Ok(named)
}
