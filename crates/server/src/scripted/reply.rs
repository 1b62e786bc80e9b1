//! A scripted reply as tokens, and the offset of a text in it.

use chat::{SpecialTokens, Tokenizer};
use contract::{LogitsRequest, LogitsRow, LogitsSelection, TokenId, TokenKind};

/// Logit of the next token; far above any penalty.
const NEXT: f32 = 1000.0;
/// Logit of a token that spells a prefix of the rest; it grows with each byte.
const SPELLS: f32 = 400.0;
/// Logit of the end before the reply is complete, for masks that forbid the rest.
const END_EARLY: f32 = 100.0;
/// Logit of all other tokens.
const NEVER: f32 = -20.0;

/// Reply tokens.
#[derive(Debug, PartialEq)]
pub(super) struct ScriptedReply {
    tokens: Vec<TokenId>,
    /// Bytes of all tokens.
    bytes: Vec<u8>,
    /// Start of each token in `bytes`.
    starts: Vec<usize>,
}

/// Byte offset in a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ReplyOffset(usize);

impl ScriptedReply {
    /// The tokenised reply; empty if the text does not tokenise.
    pub(super) fn new(text: &str, tokenizer: &Tokenizer) -> ScriptedReply {
        let tokens = match tokenizer.encode(text, SpecialTokens::Parse) {
            Ok(tokens) => tokens,
            Err(error) => {
                tracing::warn!(%error, "a reply of the script has no tokens");
                Vec::new()
            }
        };
        let mut bytes = Vec::with_capacity(text.len());
        let mut starts = Vec::with_capacity(tokens.len());
        for token in &tokens {
            starts.push(bytes.len());
            bytes.extend_from_slice(tokenizer.bytes(*token));
        }
        ScriptedReply {
            tokens,
            bytes,
            starts,
        }
    }

    /// Offset after one more token.
    ///
    /// A token that spells the next bytes advances. A later control token jumps behind it, which
    /// skips reasoning that ended early. Any other token was forced and does not advance.
    pub(super) fn after(
        &self,
        offset: ReplyOffset,
        token: TokenId,
        tokenizer: &Tokenizer,
    ) -> ReplyOffset {
        let bytes = tokenizer.bytes(token);
        if !bytes.is_empty() && self.bytes[offset.0..].starts_with(bytes) {
            return ReplyOffset(offset.0 + bytes.len());
        }
        let kind = tokenizer.kind(token);
        if !matches!(kind, TokenKind::Control | TokenKind::UserDefined) {
            return offset;
        }
        let mut later = self.starts.iter().zip(&self.tokens);
        match later.find(|(start, other)| **start >= offset.0 && **other == token) {
            Some((start, _)) => ReplyOffset(start + bytes.len()),
            None => offset,
        }
    }

    /// Logits row for `request` at `offset`, over `vocab` tokens.
    pub(super) fn row(
        &self,
        offset: ReplyOffset,
        request: &LogitsRequest,
        (tokenizer, vocab): (&Tokenizer, usize),
    ) -> LogitsRow {
        if request.selection == LogitsSelection::None {
            return LogitsRow::default();
        }
        let rest = &self.bytes[offset.0..];
        let mut raw = vec![NEVER; vocab];
        let mut set = |token: TokenId, logit: f32| {
            if let Some(x) = raw.get_mut(token.index()) {
                *x = logit;
            }
        };
        let canonical = self.starts.binary_search(&offset.0).ok();
        let masked = request
            .processors
            .as_ref()
            .is_some_and(|e| e.allowed.is_some());
        if masked || canonical.is_none() {
            for id in (0..vocab as u32).map(TokenId) {
                let bytes = tokenizer.bytes(id);
                if !bytes.is_empty() && rest.starts_with(bytes) {
                    set(id, SPELLS + bytes.len().min(256) as f32);
                }
            }
        }
        let end = if rest.is_empty() { NEXT } else { END_EARLY };
        for (rank, eos) in tokenizer.eos().iter().enumerate() {
            set(*eos, end - rank as f32);
        }
        if let Some(next) = canonical.and_then(|at| self.tokens.get(at)) {
            set(*next, NEXT);
        }
        answer(raw, request)
    }
}

/// Logits row in which `token` is nearly certain.
pub(super) fn certain(token: TokenId, request: &LogitsRequest, vocab: usize) -> LogitsRow {
    let mut raw = vec![NEVER; vocab];
    if let Some(x) = raw.get_mut(token.index()) {
        *x = NEXT;
    }
    answer(raw, request)
}

/// Requested selection of raw logits `[vocab]`.
fn answer(raw: Vec<f32>, request: &LogitsRequest) -> LogitsRow {
    let mut logits = raw.clone();
    if let Some(processors) = &request.processors {
        processors.apply(&mut logits);
    }
    let ids: Vec<TokenId> = match request.selection {
        LogitsSelection::None => return LogitsRow::default(),
        LogitsSelection::Full => (0..raw.len() as u32).map(TokenId).collect(),
        LogitsSelection::TopK(k) => best(&logits, k),
    };
    LogitsRow {
        logits: ids.iter().map(|id| logits[id.index()]).collect(),
        raw: ids.iter().map(|id| raw[id.index()]).collect(),
        lse: log_sum_exp(&logits),
        raw_lse: log_sum_exp(&raw),
        ids,
        mass: 0.0,
    }
}

/// Top `k` tokens, best first, ties to the lower id.
fn best(logits: &[f32], k: usize) -> Vec<TokenId> {
    let mut ids: Vec<TokenId> = (0..logits.len() as u32).map(TokenId).collect();
    let by_rank = |a: &TokenId, b: &TokenId| {
        let (x, y) = (logits[a.index()], logits[b.index()]);
        y.total_cmp(&x).then(a.cmp(b))
    };
    if k < ids.len() {
        ids.select_nth_unstable_by(k, by_rank);
        ids.truncate(k);
    }
    ids.sort_unstable_by(by_rank);
    ids
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return max;
    }
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    (f64::from(max) + sum.ln()) as f32
}
