//! Merges of a SentencePiece vocabulary (arXiv 1808.06226): the adjacent pair whose joint token has
//! the best score goes first, of equal ones the leftmost.
//!
//! The library's merges have a rank per pair. Here the score belongs to the joint token, however it
//! is split, so two pairs can be equal; and a vocabulary has no list of merges.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap, HashSet};

use contract::{SentencePieces, TokenId, TokenKind, Vocab};

use super::parse_byte;
use crate::error::ChatError;

/// A space in the vocabulary.
pub(super) const SPACE: char = '\u{2581}';

/// The tokens of a SentencePiece vocabulary with their scores.
pub(super) struct PieceMerger {
    ids: HashMap<Box<str>, u32>,
    scores: Vec<f32>,
    /// Tokens of single bytes, for characters that are not tokens.
    bytes: Box<[Option<TokenId>; 256]>,
    unknown: Option<TokenId>,
    space_prefix: bool,
    /// Characters in front of a space within a token. Behind any other character, a space begins a
    /// piece that no merge crosses.
    joined_to_space: HashSet<char>,
}

/// A run of characters between two others.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    /// Bytes of the piece; empty once it is part of its left neighbour.
    start: usize,
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// A possible merge of a symbol with the one behind it.
struct Merge {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both; another number says that the merge is outdated.
    len: usize,
}

impl Ord for Merge {
    fn cmp(&self, other: &Merge) -> Ordering {
        let left = Reverse(self.left).cmp(&Reverse(other.left));
        self.score.total_cmp(&other.score).then(left)
    }
}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Merge) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Merge {
    fn eq(&self, other: &Merge) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Merge {}

impl PieceMerger {
    /// Fails with [`ErrorKind::Setup`](crate::ErrorKind::Setup) if scores are missing, a token
    /// occurs twice, or some text could not be encoded.
    pub(super) fn new(vocab: &Vocab, pieces: &SentencePieces) -> Result<PieceMerger, ChatError> {
        if pieces.scores.len() != vocab.tokens.len() {
            return Err(ChatError::setup(format!(
                "the vocabulary has {} tokens but {} scores",
                vocab.tokens.len(),
                pieces.scores.len()
            )));
        }
        let mut ids = HashMap::with_capacity(vocab.tokens.len());
        let mut bytes = Box::new([None; 256]);
        let mut unknown = None;
        let mut joined_to_space = HashSet::new();
        for (index, (token, kind)) in vocab.tokens.iter().zip(&vocab.kinds).enumerate() {
            let id = u32::try_from(index)
                .map_err(|_| ChatError::setup("the vocabulary has more than 2^32 tokens"))?;
            match kind {
                TokenKind::Normal | TokenKind::UserDefined => {
                    if let Some(other) = ids.insert(token.as_str().into(), id) {
                        return Err(ChatError::setup(format!(
                            "tokens {other} and {id} of the vocabulary are both {token:?}"
                        )));
                    }
                    let behind = token.chars().skip(1);
                    let pairs = token.chars().zip(behind);
                    joined_to_space.extend(
                        pairs
                            .filter(|&(before, c)| c == SPACE && before != SPACE)
                            .map(|(before, _)| before),
                    );
                }
                TokenKind::Byte => {
                    if let Some(byte) = parse_byte(token) {
                        bytes[usize::from(byte)] = Some(TokenId(id));
                    }
                }
                TokenKind::Unknown => unknown = unknown.or(Some(TokenId(id))),
                TokenKind::Control | TokenKind::Unused => {}
            }
        }
        let unknown = unknown.or(pieces.unknown);
        if unknown.is_none() && bytes.iter().any(Option::is_none) {
            return Err(ChatError::setup(
                "the vocabulary has neither a token for every byte nor one for unknown text, so \
                 not every text could be encoded",
            ));
        }
        Ok(PieceMerger {
            ids,
            scores: pieces.scores.clone(),
            bytes,
            unknown,
            space_prefix: pieces.space_prefix,
            joined_to_space,
        })
    }

    /// The text as the vocabulary writes it.
    pub(super) fn escape(&self, text: &str) -> String {
        let mut escaped = String::with_capacity(text.len() + 3);
        if self.space_prefix {
            escaped.push(SPACE);
        }
        escaped.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        escaped
    }

    /// The pieces of an escaped text that no merge crosses; joined, they are the text.
    pub(super) fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let mut before = SPACE;
            let mut end = rest.len();
            for (at, c) in rest.char_indices() {
                if c == SPACE && before != SPACE && !self.joined_to_space.contains(&before) {
                    end = at;
                    break;
                }
                before = c;
            }
            let (piece, behind) = rest.split_at(end);
            rest = behind;
            Some(piece)
        })
    }

    /// Appends the tokens of a piece.
    pub(super) fn encode(&self, piece: &str, ids: &mut Vec<TokenId>) {
        let mut symbols = Vec::new();
        for (start, c) in piece.char_indices() {
            let index = symbols.len();
            symbols.push(Symbol {
                start,
                len: c.len_utf8(),
                previous: index.checked_sub(1),
                next: Some(index + 1),
            });
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut merges = BinaryHeap::new();
        for left in 0..symbols.len() {
            self.push_merge(piece, &symbols, Some(left), &mut merges);
        }
        while let Some(merge) = merges.pop() {
            let (left, right) = (symbols[merge.left], symbols[merge.right]);
            if left.len == 0 || right.len == 0 || left.len + right.len != merge.len {
                continue;
            }
            symbols[merge.left].len = merge.len;
            symbols[merge.left].next = right.next;
            symbols[merge.right].len = 0;
            if let Some(next) = right.next {
                symbols[next].previous = Some(merge.left);
            }
            self.push_merge(piece, &symbols, left.previous, &mut merges);
            self.push_merge(piece, &symbols, Some(merge.left), &mut merges);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            self.push_symbol(&piece[symbol.start..][..symbol.len], ids);
        }
    }

    /// Adds the merge of a symbol with the one behind it, if both are a token together.
    fn push_merge(
        &self,
        piece: &str,
        symbols: &[Symbol],
        left: Option<usize>,
        merges: &mut BinaryHeap<Merge>,
    ) {
        let Some(left) = left else { return };
        let Some(right) = symbols[left].next else {
            return;
        };
        let len = symbols[left].len + symbols[right].len;
        if let Some(&id) = self.ids.get(&piece[symbols[left].start..][..len]) {
            merges.push(Merge {
                score: self.scores[id as usize],
                left,
                right,
                len,
            });
        }
    }

    /// Appends a token, or the bytes of a character that is none.
    fn push_symbol(&self, text: &str, ids: &mut Vec<TokenId>) {
        if let Some(&id) = self.ids.get(text) {
            ids.push(TokenId(id));
            return;
        }
        let bytes = text.bytes().map(|byte| self.bytes[usize::from(byte)]);
        match bytes.collect::<Option<Vec<TokenId>>>() {
            Some(bytes) => ids.extend(bytes),
            None => ids.extend(self.unknown),
        }
    }
}
