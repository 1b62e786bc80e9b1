//! GrammarCompiler over tokens: which tokens a text in a language may go on with, and which it must.
//!
//! A language is told in Lark's notation, with JSON schemas inline (`%json { … }`) and special tokens by id
//! (`<[17]>`). The matching itself is the `llguidance` crate's; here it is made to answer about the nodes of a
//! tree, one matcher for each.

use std::fmt;
use std::sync::Arc;

use contract::{TokenId, TokenMask};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId as TokenId32, TokenizerEnv,
};
use llguidance::{Matcher, ParserFactory};

/// The most states that recognising a language's vocab_entries may take, and so its memory: 1 to 2 kB each.
const MAX_LEXER_STATES: usize = 65_536;

/// What a token stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VocabEntry {
    /// These bytes of text.
    Text(Vec<u8>),
    /// A mark that is no text; a grammar can name it only by its id.
    Special,
}

/// A language that was refused, in vocab_entries for whoever wrote it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct GrammarError {
    /// What is wrong with it.
    pub detail: String,
}

/// Turns a text into tokens as the model was taught to read it.
pub type Tokenize = dyn Fn(&str) -> Vec<TokenId> + Send + Sync;

/// Makes grammars for one vocabulary. Building it takes time in proportion to the vocabulary; share it.
pub struct GrammarCompiler {
    factory: ParserFactory,
    /// Length of a row, which may be more than there are vocab_entries.
    vocab: usize,
}

/// One language over the tokens of one vocabulary.
#[derive(Clone)]
pub struct Grammar {
    start: Arc<Matcher>,
    vocab: usize,
    eos: TokenId,
}

impl GrammarCompiler {
    /// For `vocab_entries`, `[tokens]`, in rows of `vocab` tokens; `eos` are the tokens that may end a text, at least
    /// one, and `tokenize` turns text into tokens.
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
        // Sets of vocab_entries that are let through together: those of JSON strings, and all within a line.
        let mut slices = SlicedBiasComputer::general_slices();
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

    /// The language of a grammar in Lark's notation.
    pub fn compile(&self, lark: &str) -> Result<Grammar, GrammarError> {
        let grammar = TopLevelGrammar::from_lark(lark.to_owned());
        let start = Matcher::new(self.factory.create_parser(grammar));
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

/// The vocab_entries of an error that mean something to whoever wrote the grammar: neither where in our own notation it
/// stood, nor the state of the matcher.
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
    match (inner.unwrap_or(line), reason) {
        (what, Some(reason)) => format!("{} {reason}", what.trim_end()),
        (what, None) => what.to_owned(),
    }
}

/// A word as the trie takes it: marks are told from text by a first byte that no text has.
fn trie_bytes(word: &VocabEntry) -> Vec<u8> {
    match word {
        VocabEntry::Text(bytes) if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) => {
            bytes.clone()
        }
        // Without bytes a word is in no text. The byte of the mark alone is no text either.
        VocabEntry::Text(_) | VocabEntry::Special => Vec::new(),
    }
}

/// The vocabulary as the matcher asks for it.
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
        // A tokenizer that composes letters, or takes text for a mark, does not give the text back.
        ids.filter(|ids| self.trie.decode_raw(ids) == bytes)
            .unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}

impl Grammar {
    /// Whether a text can begin at all, within the matcher's limits.
    pub fn check(&self) -> Result<(), GrammarError> {
        let mut follower = self.begin();
        if follower.forced(&[]).is_none() {
            follower.allowed(&[]);
        }
        match follower.fault() {
            Some(detail) => Err(GrammarError {
                detail: detail.to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// Follows a text from its beginning.
    pub(crate) fn begin(&self) -> GrammarState {
        GrammarState {
            // Deep, so that no request waits for another's or fills up the states of another's.
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

/// One text on its way through a grammar.
///
/// Every path that is asked about has a matcher of its own, cloned from the one before it: a matcher remembers its
/// last mask, which most tokens inside of a string do not change, and forgets it when it is taken back.
pub(crate) struct GrammarState {
    /// First the cursor after all tokens told of, whose path is empty.
    cursors: Vec<PathCursor>,
    vocab: usize,
    eos: TokenId,
}

/// Where one path leads.
struct PathCursor {
    /// Tokens beyond those that were told of.
    path: Vec<TokenId>,
    /// Stays where the text is complete, whatever comes then.
    matcher: Matcher,
    /// Why nothing can be said here: the language is beyond the matcher's limits.
    fault: Option<String>,
}

impl PathCursor {
    fn new(matcher: Matcher) -> PathCursor {
        PathCursor {
            path: Vec::new(),
            matcher,
            fault: None,
        }
    }

    /// Brings the matcher from the end of the path to the end of `path`, which begins with it.
    fn advance_to(&mut self, path: &[TokenId]) {
        for token in &path[self.path.len()..] {
            if self.fault.is_none()
                && !self.matcher.is_stopped()
                && let Err(error) = self.matcher.consume_token(token.0)
            {
                self.fault = Some(summarize(&error.to_string()));
            }
        }
        self.path = path.to_vec();
    }

    fn fork(&self) -> PathCursor {
        PathCursor {
            path: self.path.clone(),
            matcher: self.matcher.clone(),
            fault: self.fault.clone(),
        }
    }
}

impl GrammarState {
    /// The cursor at the end of the longest beginning of `path` that has one.
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

    /// The only token that may follow `path`, if there is only one or the text is complete.
    pub(crate) fn forced(&mut self, path: &[TokenId]) -> Option<TokenId> {
        let eos = self.eos;
        let cursor = self.at(path);
        if cursor.fault.is_some() {
            return None;
        }
        if cursor.matcher.is_stopped() {
            return Some(eos);
        }
        let run = cursor.matcher.compute_ff_tokens();
        run.first().map(|id| TokenId(*id))
    }

    /// The tokens that may follow `path`. After a fault, the ending one.
    pub(crate) fn allowed(&mut self, path: &[TokenId]) -> Arc<TokenMask> {
        let (vocab, eos) = (self.vocab, self.eos);
        let cursor = self.at(path);
        let set = match &cursor.fault {
            Some(_) => None,
            None => match cursor.matcher.compute_mask_or_eos() {
                Ok(set) => Some(set),
                Err(error) => {
                    cursor.fault = Some(summarize(&error.to_string()));
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

    /// Tells of tokens that have come.
    pub(crate) fn advance(&mut self, tokens: &[TokenId]) {
        let at = self.nearest(tokens);
        let mut cursor = self.cursors.swap_remove(at);
        cursor.advance_to(tokens);
        cursor.path.clear();
        self.cursors.clear();
        self.cursors.push(cursor);
    }

    /// Why nothing more can be said, if something went wrong: the language is beyond the matcher's limits.
    pub(crate) fn fault(&self) -> Option<&str> {
        self.cursors[0].fault.as_deref()
    }
}

#[cfg(test)]
mod tests;
