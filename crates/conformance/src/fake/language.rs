//! The fake language: the next token is a hash of all previous tokens.

use contract::mass;
use contract::{LogitsRequest, LogitsRow, LogitsSelection, MassPart, MassQuery, TokenId};

/// A hash-based language over `vocab` tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Language {
    /// Number of tokens.
    pub vocab: usize,
    /// Raw logits lie in `[-spread / 2, spread / 2)`.
    pub spread: f32,
    /// End-of-text token and its frequency, if texts end.
    pub ending: Option<Ending>,
    /// Selects one of many languages.
    pub salt: u64,
}

/// The end-of-text token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ending {
    /// The token.
    pub token: TokenId,
    /// Share of histories after which it is nearly certain; after others it is nearly impossible.
    pub chance: f64,
}

/// Hash of a token history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryHash(u64);

impl HistoryHash {
    /// This history plus one token.
    pub fn then(self, token: TokenId) -> HistoryHash {
        HistoryHash(mix(self.0 ^ (u64::from(token.0) + 1)))
    }

    /// This history plus several tokens.
    pub fn then_all(self, tokens: &[TokenId]) -> HistoryHash {
        tokens.iter().fold(self, |hash, token| hash.then(*token))
    }

    /// A different history selected by `salt`, for flaws.
    pub(super) fn disturbed(self, salt: u64) -> HistoryHash {
        HistoryHash(mix(self.0 ^ salt.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
    }

    /// A number in `[0, 1)` derived from this history and `purpose`.
    pub(super) fn unit(self, purpose: u64) -> f64 {
        unit(mix(self.0 ^ mix(purpose)))
    }
}

const ENDING: u64 = 1;

impl Language {
    /// The empty history.
    pub fn begin(&self) -> HistoryHash {
        HistoryHash(mix(self.salt))
    }

    /// Raw logits after a history, `[vocab]`.
    pub fn logits(&self, hash: HistoryHash) -> Vec<f32> {
        let mut logits: Vec<f32> = (0..self.vocab as u64)
            .map(|token| {
                let u = unit(mix(hash.0.rotate_left(17) ^ mix(token)));
                (u as f32 - 0.5) * self.spread
            })
            .collect();
        if let Some(ending) = self.ending
            && let Some(x) = logits.get_mut(ending.token.index())
        {
            let ends = hash.unit(ENDING) < ending.chance;
            *x = self.spread * if ends { 4.0 } else { -4.0 };
        }
        logits
    }

    /// The best token after a history, ties to the lower id.
    pub fn best(&self, hash: HistoryHash) -> TokenId {
        ranked(&self.logits(hash), 1)
            .first()
            .copied()
            .unwrap_or_default()
    }

    /// The requested logits row after a history.
    pub fn row(&self, hash: HistoryHash, request: &LogitsRequest) -> LogitsRow {
        if request.selection == LogitsSelection::None {
            return LogitsRow::default();
        }
        answer(self.logits(hash), request)
    }
}

/// The row that `request` selects from raw logits `[vocab]`: a reference for [`LogitsRequest`].
pub fn answer(raw: Vec<f32>, request: &LogitsRequest) -> LogitsRow {
    let mut logits = raw.clone();
    if let Some(processors) = &request.processors {
        processors.apply(&mut logits);
    }
    let (lse, raw_lse) = (log_sum_exp(&logits), log_sum_exp(&raw));
    let ids = match request.selection {
        LogitsSelection::None => return LogitsRow::default(),
        LogitsSelection::Full => (0..raw.len() as u32).map(TokenId).collect(),
        LogitsSelection::TopK(k) => ranked(&logits, k),
    };
    let row = LogitsRow {
        logits: ids.iter().map(|id| logits[id.index()]).collect(),
        raw: ids.iter().map(|id| raw[id.index()]).collect(),
        ids,
        lse,
        raw_lse,
        mass: 0.0,
    };
    match request.mass {
        Some(query) if row.ids.len() == logits.len() => part(&row, query).unwrap_or(row),
        _ => row,
    }
}

/// Tokens that the fake device ranks for a [`MassQuery`]. Few, so that tests meet rows that need
/// more.
const RANKED: usize = 6;

/// The part of a full row that answers a query; `None` if the row itself has to.
fn part(row: &LogitsRow, query: MassQuery) -> Option<LogitsRow> {
    let max = row.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !max.is_finite() {
        return None;
    }
    let MassQuery { divisor, part } = query;
    let total: f64 = mass::block_masses(&row.logits, max, divisor).iter().sum();
    let ids = match part {
        MassPart::AtShare(share) => vec![row.ids[mass::pick(&row.logits, max, divisor, share)?]],
        MassPart::Best(cut) => {
            let mut best = ranked(&row.logits, RANKED);
            let logits: Vec<f32> = best.iter().map(|id| row.logits[id.index()]).collect();
            best.truncate(cut.covered_by(&logits, divisor, total, row.ids.len())?);
            best
        }
    };
    Some(LogitsRow {
        logits: ids.iter().map(|id| row.logits[id.index()]).collect(),
        raw: ids.iter().map(|id| row.raw[id.index()]).collect(),
        ids,
        mass: total,
        ..*row
    })
}

/// The `k` best tokens, best first, ties to the lower id.
pub fn ranked(logits: &[f32], k: usize) -> Vec<TokenId> {
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

/// `ln(sum(exp(x)))`, accumulated in f64.
pub fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return max;
    }
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    (f64::from(max) + sum.ln()) as f32
}

/// SplitMix64's finaliser (Steele, Lea, Flood 2014) behind its increment.
pub(super) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn unit(x: u64) -> f64 {
    (x >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANGUAGE: Language = Language {
        vocab: 50,
        spread: 8.0,
        ending: Some(Ending {
            token: TokenId(3),
            chance: 0.1,
        }),
        salt: 1,
    };

    #[test]
    fn texts_end_with_the_requested_frequency() {
        let mut hash = LANGUAGE.begin();
        let mut ends = 0;
        for i in 0..5000 {
            ends += usize::from(LANGUAGE.best(hash) == TokenId(3));
            hash = hash.then(TokenId(i % 50));
        }
        assert!((400..600).contains(&ends), "{ends} of 5000");
    }

    #[test]
    fn next_token_depends_on_all_earlier_tokens_in_order() {
        let after = |ids: &[u32]| {
            let tokens: Vec<TokenId> = ids.iter().copied().map(TokenId).collect();
            LANGUAGE.logits(LANGUAGE.begin().then_all(&tokens))
        };
        assert_eq!(after(&[1, 2, 3]), after(&[1, 2, 3]));
        assert_ne!(after(&[1, 2, 3]), after(&[2, 1, 3]));
        assert_ne!(after(&[1, 2, 3]), after(&[0, 2, 3]));
        assert_ne!(after(&[1, 2]), after(&[1, 2, 0]));
    }

    #[test]
    fn top_k_row_equals_best_of_full_row() {
        let hash = LANGUAGE.begin();
        let full = LANGUAGE.row(hash, &LogitsRequest::full());
        let top = LANGUAGE.row(hash, &LogitsRequest::top_k(7));
        assert_eq!(top.ids, ranked(&full.logits, 7));
        assert_eq!(top.lse, full.lse);
        assert!(top.logits.windows(2).all(|pair| pair[0] >= pair[1]));
        let mass: f32 = full.raw.iter().map(|x| (x - full.raw_lse).exp()).sum();
        assert!((mass - 1.0).abs() < 1e-5);
    }
}
