//! Surprisal of a text under the target model.
//!
//! Where the target is certain, a draft is mostly right; where it hesitates, mostly wrong.
//! Surprisal is known for every token without drafting.

use contract::{LogitsRow, TokenId};

/// Exponential moving average of the surprisal of the last tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SurprisalEma(Option<f64>);

impl SurprisalEma {
    /// Weight of the newest token.
    const SHARE: f64 = 0.5;
    /// Value before any token is observed.
    const UNKNOWN: f64 = 0.02;

    /// Observes a token sampled from `row`. Ignored if the row lacks the token.
    pub(crate) fn observe(&mut self, row: &LogitsRow, token: TokenId) {
        let at = match row.ids.get(token.index()) {
            // In a full row a token is at its own id.
            Some(id) if *id == token => Some(token.index()),
            _ => row.ids.iter().position(|id| *id == token),
        };
        let Some(logit) = at.and_then(|at| row.logits.get(at)) else {
            return;
        };
        // Minus the log-probability; rounding may bring it below zero.
        let surprise = f64::from(row.lse - logit).max(0.0);
        if surprise.is_finite() {
            let before = self.0.unwrap_or(surprise);
            self.0 = Some(before + SurprisalEma::SHARE * (surprise - before));
        }
    }

    /// In nats per token.
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
            ..LogitsRow::default()
        }
    }

    #[test]
    fn surprisal_ema_halves_older_tokens() {
        let mut surprisal = SurprisalEma::default();
        surprisal.observe(&row(&[7, 3], &[-0.5, -2.0]), TokenId(3));
        assert_eq!(surprisal.nats(), 2.0);
        surprisal.observe(&row(&[0, 1], &[-1.0, -9.0]), TokenId(0));
        assert_eq!(surprisal.nats(), 1.5);
        // A token missing from the row, or impossible, is ignored.
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
