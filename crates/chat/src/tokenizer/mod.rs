//! A tokenizer, built in memory from a [`Vocab`]: byte-level BPE or SentencePiece.
//!
//! Special strings are split off first. Ordinary text between them is merged: for BPE it is
//! normalised if the family does so (NFC), split by the vocabulary's regular expression and mapped
//! to the byte alphabet; for SentencePiece its spaces are replaced. All token bytes lie
//! in one table, so decoding is a copy, exact to the byte.

mod byte_alphabet;
mod encode_cache;
mod encode_limit;
mod pre_tokenize;
mod sentence_piece;
mod special_strings;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use contract::{
    FimTokens, ModelMarkup, PreTokenizer, ReasoningTags, TemplateMarkup, TokenId, TokenKind, Vocab,
};
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Vocab as BpeVocab};

use self::byte_alphabet::ByteAlphabet;
use self::encode_cache::EncodeCache;
pub use self::encode_limit::{CancelFlag, EncodeLimit};
use self::pre_tokenize::PreTokenizerSplitter;
use self::sentence_piece::{PieceMerger, SPACE};
use self::special_strings::SpecialStrings;
use crate::error::ChatError;
use crate::template::RenderedPrompt;

/// The longest piece between word boundaries. Merging takes about 100 times a piece's memory.
const LONGEST_PIECE_BYTES: usize = 1 << 20;

/// Whether special strings in a text become their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Control and user-defined strings become their tokens. For text written by the server.
    Parse,
    /// They are plain text. For text from clients.
    AsText,
}

/// Unicode normalisation before splitting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnicodeNormalizer {
    /// NFC, as Qwen models are trained.
    Nfc,
    /// None, as other models are trained.
    Off,
}

/// A tokenizer. Build it once and share it by `Arc`; encoding takes `&self`.
pub struct Tokenizer {
    merger: Merger,
    specials: SpecialStrings,
    encode_cache: EncodeCache,
    normalizer: UnicodeNormalizer,
    /// Bytes of all tokens, concatenated.
    bytes: Vec<u8>,
    /// Range of each token in `bytes`.
    spans: Vec<Range<u32>>,
    /// Length of the longest token, in bytes.
    longest_bytes: usize,
    kinds: Vec<TokenKind>,
    eos: Vec<TokenId>,
    prefix: Option<TokenId>,
    fim: Option<FimTokens>,
    defined_markup: TemplateMarkup,
    markup: Arc<ModelMarkup>,
}

/// How ordinary text becomes tokens.
enum Merger {
    ByteLevel {
        bpe: Box<BPE>,
        splitter: PreTokenizerSplitter,
        alphabet: Box<ByteAlphabet>,
    },
    Pieces(PieceMerger),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("n_tokens", &self.spans.len())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer, with the normalizer of the vocabulary's family.
    ///
    /// Fails with [`ErrorKind::Setup`](crate::ErrorKind::Setup) if the tables disagree: lengths, a
    /// duplicate token, a byte of plain text without a token, a merge whose parts or result are
    /// missing. Some published vocabularies lack rare control bytes; a text loses these.
    pub fn new(vocab: &Vocab) -> Result<Tokenizer, ChatError> {
        let composes = matches!(vocab.pre, PreTokenizer::Qwen2 | PreTokenizer::Qwen35);
        let normalizer = if composes && vocab.pieces.is_none() {
            UnicodeNormalizer::Nfc
        } else {
            UnicodeNormalizer::Off
        };
        Tokenizer::with_normalizer(vocab, normalizer)
    }

    /// Builds the tokenizer with the normalizer chosen; errors as [`Tokenizer::new`].
    pub fn with_normalizer(
        vocab: &Vocab,
        normalizer: UnicodeNormalizer,
    ) -> Result<Tokenizer, ChatError> {
        let n_tokens = vocab.tokens.len();
        if n_tokens != vocab.kinds.len() {
            return Err(ChatError::setup(format!(
                "the vocabulary has {n_tokens} tokens but {} token types",
                vocab.kinds.len()
            )));
        }
        let alphabet = ByteAlphabet::new();
        let specials = SpecialStrings::new(vocab)?;
        let (bytes, spans) = token_bytes(vocab, &alphabet)?;
        for id in vocab.eos.iter().chain(&vocab.bos_token) {
            if id.index() >= n_tokens {
                return Err(ChatError::setup(format!(
                    "special token id {id} is outside the vocabulary of {n_tokens} tokens"
                )));
            }
        }
        let merger = match &vocab.pieces {
            Some(pieces) => Merger::Pieces(PieceMerger::new(vocab, pieces)?),
            None => Merger::ByteLevel {
                bpe: Box::new(build_bpe(vocab, &alphabet)?),
                splitter: PreTokenizerSplitter::new(vocab.pre)?,
                alphabet: Box::new(alphabet),
            },
        };
        let longest_bytes = spans.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        Ok(Tokenizer {
            longest_bytes,
            merger,
            specials,
            encode_cache: EncodeCache::default(),
            normalizer,
            bytes,
            spans,
            kinds: vocab.kinds.clone(),
            eos: vocab.eos.clone(),
            prefix: vocab.bos_token.filter(|_| vocab.add_bos),
            fim: vocab.fim,
            markup: Arc::new(vocab.markup.clone().into()),
            defined_markup: vocab.markup.clone(),
        })
    }

    /// The ids of `text`. Nothing is added at either end.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, ChatError> {
        self.encode_up_to(text, special, usize::MAX)
    }

    /// As [`encode`](Tokenizer::encode), but stops at the limit: the cost depends on it and not on
    /// the text. Also fails if the limit's flag is set.
    pub fn encode_up_to<'a>(
        &self,
        text: &str,
        special: SpecialTokens,
        limit: impl Into<EncodeLimit<'a>>,
    ) -> Result<Vec<TokenId>, ChatError> {
        let everything = 0..text.len();
        let literals = match special {
            SpecialTokens::Parse => &[],
            SpecialTokens::AsText => std::slice::from_ref(&everything),
        };
        self.encode_masked(text, literals, limit.into())
    }

    /// The ids of a rendered prompt: special strings from the template match, those from a client's
    /// text do not. The beginning-of-text token is prepended if the file asks for it.
    pub fn encode_rendered(&self, rendered: &RenderedPrompt) -> Result<Vec<TokenId>, ChatError> {
        self.encode_rendered_up_to(rendered, usize::MAX.into())
    }

    /// As [`encode_rendered`](Tokenizer::encode_rendered), but stops at the limit. Also fails if
    /// the limit's flag is set.
    pub fn encode_rendered_up_to(
        &self,
        rendered: &RenderedPrompt,
        limit: EncodeLimit<'_>,
    ) -> Result<Vec<TokenId>, ChatError> {
        let ids = self.encode_masked(&rendered.text, &rendered.literals, limit)?;
        Ok(self.with_prefix(ids))
    }

    /// The ids of a prompt that is rendered by nobody: special strings match, and the
    /// beginning-of-text token is prepended if the file asks for it.
    pub fn encode_prompt_up_to(
        &self,
        text: &str,
        limit: EncodeLimit<'_>,
    ) -> Result<Vec<TokenId>, ChatError> {
        let ids = self.encode_up_to(text, SpecialTokens::Parse, limit)?;
        Ok(self.with_prefix(ids))
    }

    /// The tokens of a text with a gap, if the model has them.
    pub fn fim(&self) -> Option<&FimTokens> {
        self.fim.as_ref()
    }

    /// The ids with the beginning-of-text token in front, if the file asks for it.
    pub(crate) fn with_prefix(&self, ids: Vec<TokenId>) -> Vec<TokenId> {
        match self.prefix {
            Some(prefix) if ids.first() != Some(&prefix) => {
                let mut with_prefix = Vec::with_capacity(ids.len() + 1);
                with_prefix.push(prefix);
                with_prefix.extend(ids);
                with_prefix
            }
            _ => ids,
        }
    }

    /// The ids of `text`; special strings that overlap `literals` (byte ranges, in order) are plain
    /// text.
    fn encode_masked(
        &self,
        text: &str,
        literals: &[Range<usize>],
        limit: EncodeLimit<'_>,
    ) -> Result<Vec<TokenId>, ChatError> {
        let mut ids = Vec::with_capacity((text.len() / 3).min(limit.tokens));
        let mut start = 0;
        for found in self.specials.find_all(text, literals) {
            self.encode_ordinary(&text[start..found.range.start], limit, &mut ids)?;
            if ids.len() > limit.tokens {
                return Ok(ids);
            }
            ids.push(found.id);
            start = found.range.end;
        }
        self.encode_ordinary(&text[start..], limit, &mut ids)?;
        Ok(ids)
    }

    fn encode_ordinary(
        &self,
        text: &str,
        limit: EncodeLimit<'_>,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), ChatError> {
        if text.is_empty() {
            return Ok(());
        }
        if let Some(tokens) = self.encode_cache.find(text) {
            ids.extend_from_slice(&tokens);
            return Ok(());
        }
        let begin = ids.len();
        let segment = text;
        let composed = match self.normalizer {
            UnicodeNormalizer::Nfc if !text.is_ascii() => Some(compose(text)),
            _ => None,
        };
        let text = composed.as_deref().unwrap_or(text);
        let all = self.encode_pieces(text, limit, ids)?;
        if all.is_continue() {
            self.encode_cache.keep(segment, &ids[begin..]);
        }
        Ok(())
    }

    /// Appends the tokens of a normalised text, piece by piece. Breaks at the limit.
    fn encode_pieces(
        &self,
        text: &str,
        limit: EncodeLimit<'_>,
        ids: &mut Vec<TokenId>,
    ) -> Result<ControlFlow<()>, ChatError> {
        let check = |piece: &str| {
            if piece.len() > LONGEST_PIECE_BYTES {
                return Err(ChatError::invalid(format!(
                    "the text cannot be tokenised: a run of {} bytes has no word boundary; at most {LONGEST_PIECE_BYTES} are taken",
                    piece.len()
                )));
            }
            if limit.is_cancelled() {
                return Err(cancelled());
            }
            Ok(())
        };
        let flow = |ids: &[TokenId]| {
            if ids.len() > limit.tokens {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        match &self.merger {
            Merger::Pieces(merger) => {
                for piece in merger.pieces(&merger.escape(text)) {
                    check(piece)?;
                    merger.encode(piece, ids);
                    if flow(ids).is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                Ok(ControlFlow::Continue(()))
            }
            Merger::ByteLevel {
                bpe,
                splitter,
                alphabet,
            } => {
                let mut mapped = String::new();
                splitter.split(text, |piece| {
                    check(piece)?;
                    alphabet.map(piece, &mut mapped);
                    let tokens = bpe.tokenize(&mapped).map_err(|err| {
                        ChatError::invalid(format!("the text could not be tokenised: {err}"))
                    })?;
                    ids.extend(tokens.iter().map(|token| TokenId(token.id)));
                    Ok(flow(ids))
                })
            }
        }
    }

    /// A lower bound on the number of tokens of `text`, without encoding it: enough to reject a
    /// text that is far too long.
    pub fn min_token_count(&self, text: &str) -> usize {
        // NFC shortens text by a factor of three at most.
        let shortest = if text.is_ascii() {
            text.len()
        } else {
            text.len() / 3
        };
        shortest / self.longest_bytes.max(1)
    }

    /// The bytes of a token; empty for an id outside the vocabulary. A control token has the bytes
    /// of its string.
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        match self.spans.get(id.index()) {
            Some(span) => &self.bytes[span.start as usize..span.end as usize],
            None => &[],
        }
    }

    /// The kind of a token; `Unused` for an id outside the vocabulary.
    pub fn kind(&self, id: TokenId) -> TokenKind {
        self.kinds
            .get(id.index())
            .copied()
            .unwrap_or(TokenKind::Unused)
    }

    /// The first byte of each of `ids` in `text`, which they encode.
    ///
    /// `None` if their bytes are not those of the text, for example because encoding normalised it.
    /// A begin token and the space that some families put before a text take no bytes of it.
    pub fn token_starts(&self, text: &str, ids: &[TokenId]) -> Option<Vec<usize>> {
        let mut starts = Vec::with_capacity(ids.len());
        let mut at = 0;
        for (index, id) in ids.iter().enumerate() {
            starts.push(at);
            let (bytes, rest) = (self.bytes(*id), text.as_bytes().get(at..)?);
            if rest.starts_with(bytes) {
                at += bytes.len();
            } else if let [b' ', bytes @ ..] = bytes
                && rest.starts_with(bytes)
            {
                at += bytes.len();
            } else if index > 0 || self.prefix != Some(*id) {
                return None;
            }
        }
        (at == text.len()).then_some(starts)
    }

    /// The id of a control or user-defined string.
    pub fn id_of(&self, text: &str) -> Option<TokenId> {
        self.specials.id_of(text)
    }

    /// Tags around reasoning and tool calls, with defaults for those that the model does not
    /// define.
    pub fn markup(&self) -> &Arc<ModelMarkup> {
        &self.markup
    }

    /// Tags around reasoning; `None` for a model that does not reason.
    pub fn reasoning_tags(&self) -> Option<&ReasoningTags> {
        self.defined_markup.reasoning.as_ref()
    }

    /// Whether the model defines tags of tool calls.
    pub fn defines_tool_calls(&self) -> bool {
        self.defined_markup.tool_calls.is_some()
    }

    /// Number of ids.
    pub fn n_tokens(&self) -> usize {
        self.spans.len()
    }

    /// Tokens that end a generation.
    pub fn eos(&self) -> &[TokenId] {
        &self.eos
    }

    /// The text of `ids`, control tokens included; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.bytes(*id)).copied().collect();
        String::from_utf8(bytes)
            .unwrap_or_else(|err| String::from_utf8_lossy(err.as_bytes()).into_owned())
    }
}

/// The error of work whose flag is set; nobody reads it.
fn cancelled() -> ChatError {
    ChatError::invalid("the request was given up before its text was encoded")
}

fn compose(text: &str) -> String {
    let mut normalised = tokenizers::NormalizedString::from(text);
    normalised.nfc();
    normalised.get().to_owned()
}

fn build_bpe(vocab: &Vocab, alphabet: &ByteAlphabet) -> Result<BPE, ChatError> {
    let mut table = BpeVocab::with_capacity(vocab.tokens.len());
    let mut longest_bytes = 0;
    for (index, (token, kind)) in vocab.tokens.iter().zip(&vocab.kinds).enumerate() {
        if *kind != TokenKind::Normal {
            continue;
        }
        let id = u32::try_from(index)
            .map_err(|_| ChatError::setup("the vocabulary has more than 2^32 tokens"))?;
        longest_bytes = longest_bytes.max(token.len());
        if let Some(other) = table.insert(token.clone(), id) {
            return Err(ChatError::setup(format!(
                "tokens {other} and {id} of the vocabulary are both {token:?}"
            )));
        }
    }
    let is_missing = |byte: u8| {
        let mut letter = [0; 4];
        !table.contains_key(&*alphabet.letter(byte).encode_utf8(&mut letter))
    };
    let missing: Vec<u8> = (0..=u8::MAX).filter(|byte| is_missing(*byte)).collect();
    let in_texts = |byte: &&u8| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~');
    if let Some(byte) = missing.iter().find(in_texts) {
        return Err(ChatError::setup(format!(
            "the vocabulary has no token for byte {byte:#04x}, so not every text could be encoded"
        )));
    }
    // Bytes that UTF-8 never has are no loss.
    let lost = missing
        .iter()
        .filter(|byte| !matches!(byte, 0xc0 | 0xc1 | 0xf5..));
    let lost: Vec<String> = lost.map(|byte| format!("{byte:#04x}")).collect();
    if !lost.is_empty() {
        let bytes = lost.join(", ");
        tracing::info!(
            bytes,
            "the vocabulary has no token for some bytes: prompts lose them"
        );
    }
    // The builder copies both halves into a buffer of the longest token's length, so every merge is
    // checked first.
    let mut joined = String::with_capacity(longest_bytes);
    for (rank, (left, right)) in vocab.merges.iter().enumerate() {
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        for part in [left, right, &joined] {
            if !table.contains_key(part) {
                return Err(ChatError::setup(format!(
                    "merge {rank} ({left:?} + {right:?}) needs {part:?}, which is not a token"
                )));
            }
        }
    }
    BPE::builder()
        .ignore_merges(vocab.pre == PreTokenizer::LlamaBpe)
        .vocab_and_merges(table, vocab.merges.clone())
        .build()
        .map_err(|err| ChatError::setup(format!("the vocabulary cannot be used: {err}")))
}

/// The bytes of all tokens, and each token's range in them.
fn token_bytes(
    vocab: &Vocab,
    alphabet: &ByteAlphabet,
) -> Result<(Vec<u8>, Vec<Range<u32>>), ChatError> {
    let mut bytes = Vec::with_capacity(vocab.tokens.iter().map(String::len).sum());
    let mut spans = Vec::with_capacity(vocab.tokens.len());
    for (token, kind) in vocab.tokens.iter().zip(&vocab.kinds) {
        let start = bytes.len();
        match kind {
            TokenKind::Normal if vocab.pieces.is_some() => {
                bytes.extend_from_slice(token.replace(SPACE, " ").as_bytes());
            }
            TokenKind::Normal => alphabet.unmap(token, &mut bytes),
            TokenKind::Byte => match parse_byte(token) {
                Some(byte) => bytes.push(byte),
                None => bytes.extend_from_slice(token.as_bytes()),
            },
            _ => bytes.extend_from_slice(token.as_bytes()),
        }
        let position = |at: usize| {
            u32::try_from(at).map_err(|_| ChatError::setup("the vocabulary's text exceeds 4 GiB"))
        };
        spans.push(position(start)?..position(bytes.len())?);
    }
    Ok((bytes, spans))
}

/// `<0x0A>` as 10.
fn parse_byte(token: &str) -> Option<u8> {
    u8::from_str_radix(token.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok()
}

#[cfg(test)]
mod tests;
