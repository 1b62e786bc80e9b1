//! How much of a prompt to keep: a flat ratio, a curve over its length, or one per session.

use std::collections::HashMap;
use std::str::FromStr;

/// The share of tokens to keep, by the prompt's length.
#[derive(Debug, Clone, PartialEq)]
pub enum KeepRatio {
    /// The same for every prompt, above 0 and up to 1.
    Flat(f64),
    /// By the prompt's length.
    Curve(KeepCurve),
}

impl KeepRatio {
    /// The ratio of a prompt of `tokens` tokens.
    pub fn of(&self, tokens: usize) -> f64 {
        match self {
            KeepRatio::Flat(ratio) => *ratio,
            KeepRatio::Curve(curve) => curve.at(tokens),
        }
    }
}

/// A ratio that is linear between points and level outside them.
#[derive(Debug, Clone, PartialEq)]
pub struct KeepCurve(Vec<(usize, f64)>);

/// Why a curve or a ratio is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeepRatioError {
    /// A point is not of the form `TOKENS:RATIO`.
    #[error("{0:?} is no point such as 40000:0.2")]
    Form(String),
    /// A ratio is not above 0 and at most 1.
    #[error("the ratio {0} is not above 0 and at most 1")]
    Ratio(String),
    /// Points are not in rising order of tokens.
    #[error("the points must rise: {0} tokens follow {1}")]
    Order(usize, usize),
    /// There is no point.
    #[error("a curve needs at least one point such as 40000:0.2")]
    Empty,
}

/// A ratio above 0 and at most 1.
///
/// # Errors
/// [`KeepRatioError::Ratio`] for every other text.
pub fn ratio(text: &str) -> Result<f64, KeepRatioError> {
    let ratio = text.trim().parse().ok();
    ratio
        .filter(|ratio| *ratio > 0.0 && *ratio <= 1.0)
        .ok_or_else(|| KeepRatioError::Ratio(text.to_owned()))
}

impl FromStr for KeepCurve {
    type Err = KeepRatioError;

    /// Points `TOKENS:RATIO` in rising order, separated by spaces or commas.
    fn from_str(text: &str) -> Result<KeepCurve, KeepRatioError> {
        let mut points: Vec<(usize, f64)> = Vec::new();
        let words = text.split([' ', ',']).filter(|word| !word.is_empty());
        for word in words {
            let form = || KeepRatioError::Form(word.to_owned());
            let (tokens, of) = word.split_once(':').ok_or_else(form)?;
            let tokens: usize = tokens.parse().map_err(|_| form())?;
            if let Some((before, _)) = points.last()
                && *before >= tokens
            {
                return Err(KeepRatioError::Order(tokens, *before));
            }
            points.push((tokens, ratio(of)?));
        }
        if points.is_empty() {
            return Err(KeepRatioError::Empty);
        }
        Ok(KeepCurve(points))
    }
}

impl KeepCurve {
    fn at(&self, tokens: usize) -> f64 {
        let after = self.0.partition_point(|(at, _)| *at <= tokens);
        match (after.checked_sub(1).map(|i| self.0[i]), self.0.get(after)) {
            (Some((from, low)), Some((to, high))) => {
                low + (high - low) * (tokens - from) as f64 / (to - from) as f64
            }
            (Some((_, level)), None) | (None, Some(&(_, level))) => level,
            (None, None) => 1.0,
        }
    }
}

/// The ratio of a new session.
const FIRST: f64 = 0.10;
/// Bounds of every session's ratio.
const BOUNDS: (f64, f64) = (0.025, 0.20);
/// Weight of a session's earlier acceptance in its mean.
const INERTIA: f64 = 0.7;
/// Acceptance at which a ratio rests, and beyond which it moves twice as fast.
const REST: (f64, f64) = (0.75, 0.85);
const FAR: (f64, f64) = (0.70, 0.90);
/// A slow step; a fast one is twice as wide.
const STEP: f64 = 0.005;
/// Sessions that are remembered.
const SESSIONS: usize = 1024;

/// Ratios that follow how well each session's drafts are accepted: a model that lost its context
/// is hard to predict.
#[derive(Debug, Default)]
pub struct SessionRatios {
    sessions: HashMap<String, Session>,
    /// Number of uses, to find the session that was not used for longest.
    uses: u64,
}

#[derive(Debug, Clone, Copy)]
struct Session {
    ratio: f64,
    acceptance: Option<f64>,
    last_use: u64,
}

impl SessionRatios {
    /// The ratio of a session's next prompt.
    pub fn ratio(&self, session: &str) -> f64 {
        self.sessions
            .get(session)
            .map_or(FIRST, |known| known.ratio)
    }

    /// Moves a session's ratio after a reply in which `acceptance` of the drafted tokens, between 0
    /// and 1, were accepted.
    pub fn observe(&mut self, session: &str, acceptance: f64) {
        if !acceptance.is_finite() {
            return;
        }
        self.uses += 1;
        if !self.sessions.contains_key(session) && self.sessions.len() >= SESSIONS {
            let oldest = self.sessions.iter().min_by_key(|(_, known)| known.last_use);
            if let Some(oldest) = oldest.map(|(name, _)| name.clone()) {
                self.sessions.remove(&oldest);
            }
        }
        let known = self.sessions.entry(session.to_owned()).or_insert(Session {
            ratio: FIRST,
            acceptance: None,
            last_use: 0,
        });
        known.last_use = self.uses;
        let mean = known.acceptance.map_or(acceptance, |mean| {
            INERTIA * mean + (1.0 - INERTIA) * acceptance
        });
        known.acceptance = Some(mean);
        let step = if mean < FAR.0 || mean > FAR.1 {
            2.0 * STEP
        } else {
            STEP
        };
        let change = if mean < REST.0 {
            step
        } else if mean > REST.1 {
            -step
        } else {
            0.0
        };
        known.ratio = (known.ratio + change).clamp(BOUNDS.0, BOUNDS.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} {b}");
    }

    #[test]
    fn curves_are_linear_between_points_and_level_outside() {
        let curve: KeepCurve = "10000:0.5 40000:0.2,100000:0.1".parse().unwrap();
        let keep = KeepRatio::Curve(curve);
        for (tokens, expected) in [
            (0, 0.5),
            (10_000, 0.5),
            (25_000, 0.35),
            (40_000, 0.2),
            (70_000, 0.15),
            (100_000, 0.1),
            (1 << 20, 0.1),
        ] {
            close(keep.of(tokens), expected);
        }
    }

    #[test]
    fn wrong_curves_name_the_mistake() {
        let error = |text: &str| text.parse::<KeepCurve>().unwrap_err();
        assert_eq!(error("10"), KeepRatioError::Form("10".to_owned()));
        assert_eq!(error("x:0.1"), KeepRatioError::Form("x:0.1".to_owned()));
        assert_eq!(error("10:1.5"), KeepRatioError::Ratio("1.5".to_owned()));
        assert_eq!(error("20:0.5 10:0.2"), KeepRatioError::Order(10, 20));
        assert_eq!(error(" "), KeepRatioError::Empty);
        assert_eq!(ratio("0"), Err(KeepRatioError::Ratio("0".to_owned())));
        assert_eq!(ratio("NaN"), Err(KeepRatioError::Ratio("NaN".to_owned())));
    }

    #[test]
    fn low_acceptance_raises_the_ratio_and_high_acceptance_lowers_it() {
        let mut ratios = SessionRatios::default();
        close(ratios.ratio("a"), 0.10);
        ratios.observe("a", 0.5);
        close(ratios.ratio("a"), 0.11);
        ratios.observe("b", 0.87);
        close(ratios.ratio("b"), 0.095);
        ratios.observe("c", 0.8);
        close(ratios.ratio("c"), 0.10);
        for _ in 0..100 {
            ratios.observe("a", 0.0);
            ratios.observe("b", 1.0);
        }
        close(ratios.ratio("a"), 0.20);
        close(ratios.ratio("b"), 0.025);
        ratios.observe("c", f64::NAN);
        close(ratios.ratio("c"), 0.10);
    }

    #[test]
    fn the_session_not_used_for_longest_is_forgotten() {
        let mut ratios = SessionRatios::default();
        ratios.observe("first", 0.0);
        ratios.observe("second", 0.0);
        for i in 0..SESSIONS - 2 {
            ratios.observe(&i.to_string(), 0.8);
        }
        ratios.observe("first", 0.0);
        ratios.observe("new", 0.0);
        assert!(ratios.ratio("first") > FIRST);
        close(ratios.ratio("second"), FIRST);
    }
}
