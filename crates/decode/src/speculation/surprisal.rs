//! How unexpected a text is to the model that writes it.
//!
//! Where the target hardly hesitates, a draft is mostly right, and where it hesitates, mostly wrong. This is known
//! of every token without drafting anything.

use contract::{LogitsRow, TokenId};

/// The mean surprise of the last tokens, newest first in weight.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SurprisalEma(Option<f64>);

impl SurprisalEma {
    /// What the newest token counts.
    const SHARE: f64 = 0.5;
    /// Of a text of which nothing is known.
    const UNKNOWN: f64 = 0.02;

    /// Takes in a token that was drawn from `row`. A row that does not hold it says nothing.
    pub(crate) fn observe(&mut self, row: &LogitsRow, token: TokenId) {
        let at = match row.ids.get(token.index()) {
            // In a whole row a token stands at its own id.
            Some(id) if *id == token => Some(token.index()),
            _ => row.ids.iter().position(|id| *id == token),
        };
        let Some(logit) = at.and_then(|at| row.logits.get(at)) else {
            return;
        };
        // Minus the logarithm of its probability; rounding may bring it below zero.
        let surprise = f64::from(row.lse - logit).max(0.0);
        if surprise.is_finite() {
            let before = self.0.unwrap_or(surprise);
            self.0 = Some(before + SurprisalEma::SHARE * (surprise - before));
        }
    }

    /// In nats a token.
    pub(crate) fn nats(self) -> f64 {
        self.0.unwrap_or(SurprisalEma::UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ids: &[u32], logits: &[f32]) -> LogitsRow {
        LogitsRow {
            ids: ids.iter().map(|id| TokenId(*id)).collect(),
            logits: logits.to_vec(),
            raw: logits.to_vec(),
            lse: 0.0,
            raw_lse: 0.0,
        }
    }

    #[test]
    fn surprisal_ema_halves_older_tokens() {
        let mut surprisal = SurprisalEma::default();
        surprisal.observe(&row(&[7, 3], &[-0.5, -2.0]), TokenId(3));
        assert_eq!(surprisal.nats(), 2.0);
        surprisal.observe(&row(&[0, 1], &[-1.0, -9.0]), TokenId(0));
        assert_eq!(surprisal.nats(), 1.5);
        // A token that the row lacks, and one that could not come, say nothing.
        surprisal.observe(&row(&[7], &[-0.5]), TokenId(3));
        surprisal.observe(&row(&[7], &[f32::NEG_INFINITY]), TokenId(7));
        assert_eq!(surprisal.nats(), 1.5);
    }

    #[test]
    fn empty_row_leaves_surprisal_unknown() {
        let mut surprisal = SurprisalEma::default();
        surprisal.observe(&LogitsRow::default(), TokenId(3));
        assert_eq!(surprisal.nats(), SurprisalEma::UNKNOWN);
    }
}
