//! One reply as tokens, and how far a text has come in it.

use chat::{SpecialTokens, Tokenizer};
use contract::{LogitsRequest, LogitsRow, LogitsSelection, TokenId, TokenKind};

/// Logit of what comes next; far above what any penalty takes away.
const NEXT: f32 = 1000.0;
/// Logit of a token that spells a part of what comes next, and more for each of its bytes.
const SPELLS: f32 = 400.0;
/// Logit of the end while something is still to be said: where masks forbid all of that.
const END_EARLY: f32 = 100.0;
/// Logit of everything else.
const NEVER: f32 = -20.0;

/// What is to be said.
#[derive(Debug, PartialEq)]
pub(super) struct ScriptedReply {
    tokens: Vec<TokenId>,
    /// All tokens' bytes, one after another.
    bytes: Vec<u8>,
    /// Where each token begins in `bytes`.
    starts: Vec<usize>,
}

/// How far a text has come in a reply: bytes of it that were said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ReplyOffset(usize);

impl ScriptedReply {
    /// The reply as the tokenizer cuts it; a text that cannot be cut is said as nothing.
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

    /// Where the text stands after one more token.
    ///
    /// A token that spells what comes next goes on there. A control token that comes later jumps behind it, so
    /// that reasoning which is closed early is left away. Any other token was forced, and moves nothing.
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

    /// The row that `ask` wants at `place`, over `vocab` tokens.
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
        let masked = request.edits.as_ref().is_some_and(|e| e.allowed.is_some());
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

/// The row in which `token` is all but certain.
pub(super) fn certain(token: TokenId, request: &LogitsRequest, vocab: usize) -> LogitsRow {
    let mut raw = vec![NEVER; vocab];
    if let Some(x) = raw.get_mut(token.index()) {
        *x = NEXT;
    }
    answer(raw, request)
}

/// What an ask wants of raw logits `[vocab]`.
fn answer(raw: Vec<f32>, request: &LogitsRequest) -> LogitsRow {
    let mut logits = raw.clone();
    if let Some(edits) = &request.edits {
        edits.apply(&mut logits);
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
    }
}

/// The `k` best tokens, best first, ties to the lower id.
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
