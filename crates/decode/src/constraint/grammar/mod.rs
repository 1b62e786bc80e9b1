//! Grammars over tokens: which tokens may follow a text of a language, and which must.
//!
//! A grammar is given in Lark's notation, with inline JSON schemas (`%json { … }`) and special
//! tokens by id (`<[17]>`). Matching is done by the `llguidance` crate. This module answers for
//! tree nodes, with one matcher each.

use std::fmt;
use std::sync::Arc;

use contract::{TokenId, TokenMask};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId as TokenId32, TokenizerEnv,
};
use llguidance::{Matcher, ParserFactory};

/// Stack of the thread that compiles a grammar: with [`MAX_LINES`] and [`MAX_GROUPS`], rules that
/// lead to each other and groups in groups cannot exceed it.
const COMPILE_STACK_BYTES: usize = 512 << 20;
/// Maximum lines of a grammar, and so of rules.
const MAX_LINES: usize = 20_000;
/// Maximum opening parentheses in a grammar.
const MAX_GROUPS: usize = 50_000;
/// Maximum number of lexer states of a grammar, at 1 to 2 kB each.
const MAX_LEXER_STATES: usize = 65_536;

/// Forced tokens that [`Grammar::check`] follows.
const MAX_CHECKED_TOKENS: usize = 64;

/// The content of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VocabEntry {
    /// Bytes of text.
    Text(Vec<u8>),
    /// A special token; grammars name it by its id only.
    Special,
}

/// A rejected grammar, with a message for its author.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct GrammarError {
    /// What is wrong with it.
    pub detail: String,
}

/// Tokenizes text as the model does.
pub type Tokenize = dyn Fn(&str) -> Vec<TokenId> + Send + Sync;

/// Compiles grammars for one vocabulary. Its construction takes time proportional to the
/// vocabulary; share it.
pub struct GrammarCompiler {
    factory: ParserFactory,
    /// Length of a logits row, which may exceed the number of tokens.
    vocab: usize,
}

/// A language over the tokens of one vocabulary.
#[derive(Clone)]
pub struct Grammar {
    start: Arc<Matcher>,
    vocab: usize,
    eos: TokenId,
}

impl GrammarCompiler {
    /// A compiler for `vocab_entries`, `[tokens]`, with rows of `vocab` logits. `eos` are the end
    /// tokens, at least one.
    pub fn new(
        vocab_entries: &[VocabEntry],
        vocab: usize,
        eos: &[TokenId],
        tokenize: Arc<Tokenize>,
    ) -> Result<GrammarCompiler, GrammarError> {
        let invalid = |detail: String| GrammarError { detail };
        let n_entries = u32::try_from(vocab_entries.len()).map_err(|_| {
            invalid(format!(
                "a vocabulary of {} tokens is too large",
                vocab_entries.len()
            ))
        })?;
        let eos: Vec<TokenId32> = eos
            .iter()
            .map(|id| id.0)
            .filter(|id| *id < n_entries)
            .collect();
        let Some(first) = eos.first() else {
            return Err(invalid(
                "the vocabulary has no token that ends a text".to_owned(),
            ));
        };
        let bytes: Vec<Vec<u8>> = vocab_entries.iter().map(trie_bytes).collect();
        let trie = TokTrie::from(&TokRxInfo::new(n_entries, *first), &bytes).with_eos_tokens(&eos);
        let env: TokEnv = Arc::new(TrieEnv { trie, tokenize });
        let capabilities = InferenceCapabilities {
            ff_tokens: true,
            ..InferenceCapabilities::default()
        };
        // Slices of the vocabulary that are allowed as a whole: JSON string content, text within a
        // line, and such text without the first letter of most tags.
        let mut slices = SlicedBiasComputer::general_slices();
        slices.push(r"[^\n<]+".to_owned());
        slices.push(r"[^\n]+".to_owned());
        let mut factory = ParserFactory::new(&env, capabilities, &slices)
            .map_err(|error| invalid(summarize(&error.to_string())))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: MAX_LEXER_STATES,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(GrammarCompiler { factory, vocab })
    }

    /// Compiles a grammar in Lark's notation.
    ///
    /// # Errors
    /// [`GrammarError`] if it is malformed or goes over a limit.
    pub fn compile(&self, lark: &str) -> Result<Grammar, GrammarError> {
        let refused = |detail: String| GrammarError { detail };
        let (lines, groups) = (lark.lines().count(), lark.matches('(').count());
        if lines > MAX_LINES || groups > MAX_GROUPS {
            return Err(refused(format!(
                "the grammar has {lines} lines and {groups} opening parentheses; at most \
                 {MAX_LINES} and {MAX_GROUPS} are taken"
            )));
        }
        let grammar = TopLevelGrammar::from_lark(lark.to_owned());
        // The parser follows rules and groups by recursion.
        let start = std::thread::scope(|scope| {
            let parse = || Matcher::new(self.factory.create_parser(grammar));
            let thread = std::thread::Builder::new().name("grammar".to_owned());
            let thread = thread.stack_size(COMPILE_STACK_BYTES);
            let thread = thread.spawn_scoped(scope, parse);
            let thread = thread.map_err(|error| refused(format!("no thread for it: {error}")))?;
            let parsed = thread.join();
            parsed.map_err(|_| refused("the grammar does not compile".to_owned()))
        })?;
        match start.get_error() {
            Some(error) => Err(GrammarError {
                detail: summarize(&error),
            }),
            None => Ok(Grammar {
                start: Arc::new(start),
                vocab: self.vocab,
                eos: TokenId(self.factory.tok_env().tok_trie().eos_token()),
            }),
        }
    }
}

/// The part of an error that its author understands, without internal notation or matcher state.
fn summarize(error: &str) -> String {
    let line = error.lines().find(|line| !line.trim().is_empty());
    let line = line.unwrap_or("not understood");
    let inner = ["failed to compile JSON schema: "]
        .iter()
        .find_map(|lead| line.split_once(lead).map(|(_, rest)| rest));
    // A regular expression is quoted over several lines, with the reason last.
    let reason = error
        .lines()
        .find_map(|line| line.strip_prefix("error: "))
        .filter(|_| line.ends_with("parse error:") || inner == Some("regex parse error:"));
    let what = inner.unwrap_or(line);
    // Its text goes on with an option of the compiler that no request can set.
    if what.starts_with("oneOf constraints are not supported") {
        return "keyword 'oneOf' is not supported where several branches may match".to_owned();
    }
    match (what, reason) {
        (what, Some(reason)) => format!("{} {reason}", what.trim_end()),
        (what, None) => what.to_owned(),
    }
}

/// A token's bytes for the trie. A first byte that no text has marks special tokens.
fn trie_bytes(word: &VocabEntry) -> Vec<u8> {
    match word {
        VocabEntry::Text(bytes) if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) => {
            bytes.clone()
        }
        // A token without bytes occurs in no text. The marker byte alone is no text either.
        VocabEntry::Text(_) | VocabEntry::Special => Vec::new(),
    }
}

/// The vocabulary as the matcher needs it.
struct TrieEnv {
    trie: TokTrie,
    tokenize: Arc<Tokenize>,
}

impl TokenizerEnv for TrieEnv {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId32> {
        let whole = std::str::from_utf8(bytes).ok();
        let ids = whole.map(|text| (self.tokenize)(text));
        let ids: Option<Vec<TokenId32>> = ids.map(|ids| ids.iter().map(|id| id.0).collect());
        // Tokenizers that normalize, or parse special tokens, do not reproduce the bytes.
        ids.filter(|ids| self.trie.decode_raw(ids) == bytes)
            .unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}

impl Grammar {
    /// Checks that a text can reach its first choice of tokens within the matcher's limits.
    pub fn check(&self) -> Result<(), GrammarError> {
        let mut state = self.begin();
        let mut ahead = Vec::new();
        while ahead.len() < MAX_CHECKED_TOKENS
            && let Some(token) = state.forced(&ahead)
            && token != self.eos
        {
            ahead.push(token);
        }
        state.advance(&ahead);
        if state.forced(&[]).is_none() {
            state.allowed(&[]);
        }
        match state.error() {
            Some(detail) => Err(GrammarError {
                detail: detail.to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// The state at the start of a text.
    pub(crate) fn begin(&self) -> GrammarState {
        GrammarState {
            // A deep clone, so that requests share no lock and no lexer states.
            cursors: vec![PathCursor::new(self.start.deep_clone())],
            vocab: self.vocab,
            eos: self.eos,
        }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

/// The grammar state of one text.
///
/// Every queried path has its own matcher, cloned from that of its longest prefix. A matcher caches
/// its last mask, which most tokens within a string keep, and loses it on rollback.
pub(crate) struct GrammarState {
    /// The first cursor is after all advanced tokens, with an empty path.
    cursors: Vec<PathCursor>,
    vocab: usize,
    eos: TokenId,
}

/// The matcher at the end of one path.
struct PathCursor {
    /// Tokens after the advanced ones.
    path: Vec<TokenId>,
    /// Stops changing once the text is complete.
    matcher: Matcher,
    /// Why the matcher failed: the language exceeds a limit.
    error_text: Option<String>,
}

impl PathCursor {
    fn new(matcher: Matcher) -> PathCursor {
        PathCursor {
            path: Vec::new(),
            matcher,
            error_text: None,
        }
    }

    /// Advances the matcher to the end of `path`, which extends the cursor's path.
    fn advance_to(&mut self, path: &[TokenId]) {
        for token in &path[self.path.len()..] {
            if self.error_text.is_none()
                && !self.matcher.is_stopped()
                && let Err(error) = self.matcher.consume_token(token.0)
            {
                self.error_text = Some(summarize(&error.to_string()));
            }
        }
        self.path = path.to_vec();
    }

    fn fork(&self) -> PathCursor {
        PathCursor {
            path: self.path.clone(),
            matcher: self.matcher.clone(),
            error_text: self.error_text.clone(),
        }
    }
}

impl GrammarState {
    /// Index of the cursor at the longest prefix of `path`.
    fn nearest(&self, path: &[TokenId]) -> usize {
        let before = self.cursors.iter().enumerate();
        let before = before.filter(|(_, cursor)| path.starts_with(&cursor.path));
        before
            .max_by_key(|(_, cursor)| cursor.path.len())
            .map_or(0, |(at, _)| at)
    }

    /// The cursor at the end of `path`.
    fn at(&mut self, path: &[TokenId]) -> &mut PathCursor {
        let mut at = self.nearest(path);
        if self.cursors[at].path.len() < path.len() {
            let mut cursor = self.cursors[at].fork();
            cursor.advance_to(path);
            at = self.cursors.len();
            self.cursors.push(cursor);
        }
        &mut self.cursors[at]
    }

    /// The only token that may follow `path`; the end token if the text is complete.
    pub(crate) fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let eos = self.eos;
        let cursor = self.at(path);
        if cursor.error_text.is_some() {
            return None;
        }
        if cursor.matcher.is_stopped() {
            return Some(eos);
        }
        let run = cursor.matcher.compute_ff_tokens();
        run.first().map(|id| TokenId(*id))
    }

    /// The tokens that may follow `path`; the end token after a failure.
    pub(crate) fn allowed(&mut self, path: &[TokenId]) -> Arc<TokenMask> {
        let (vocab, eos) = (self.vocab, self.eos);
        let cursor = self.at(path);
        let set = match &cursor.error_text {
            Some(_) => None,
            None => match cursor.matcher.compute_mask_or_eos() {
                Ok(set) => Some(set),
                Err(error) => {
                    cursor.error_text = Some(summarize(&error.to_string()));
                    None
                }
            },
        };
        Arc::new(match set {
            Some(set) => {
                let pairs = set.as_slice().chunks(2);
                let vocab_entries = pairs.map(|pair| {
                    let high = pair.get(1).copied().unwrap_or(0);
                    u64::from(pair[0]) | u64::from(high) << 32
                });
                TokenMask::from_words(vocab, vocab_entries)
            }
            None => {
                let mut ending = TokenMask::none(vocab);
                ending.insert(eos);
                ending
            }
        })
    }

    /// Advances over accepted tokens.
    pub(crate) fn advance(&mut self, tokens: &[TokenId]) {
        let at = self.nearest(tokens);
        let mut cursor = self.cursors.swap_remove(at);
        cursor.advance_to(tokens);
        cursor.path.clear();
        self.cursors.clear();
        self.cursors.push(cursor);
    }

    /// Why the matcher failed: the language exceeds a limit.
    pub(crate) fn error(&self) -> Option<&str> {
        self.cursors[0].error_text.as_deref()
    }
}

#[cfg(test)]
mod tests;
