//! Random-weight DFlash2 and DSpark drafts for the tiny dense model, and their results by an
//! independent implementation in f64.
//!
//! `fixtures/drafts2/NAME.txt` describes a draft in lines of words: its keys, its tensors and what
//! it drafts at three positions. `NAME.npy` holds the logits. `harness/golden/draft2_goldens.py`
//! writes both. A tensor's values follow from its name, so none is stored.

mod file_format;
mod run;

use std::path::{Path, PathBuf};

use contract::{CandidateList, DraftCandidates, DraftLogits, ModelSpec, TokenId};
use model::{DraftOptions, LoadedDraft};

pub use file_format::{Draft2Format, Draft2Mistake};
pub use run::worst_at;

use crate::golden::{GoldenError, npy};

/// The names of all cases.
pub const NAMES: [&str; 4] = ["pairs", "pairs_full", "markov", "markov_part"];

/// The target of all cases.
pub const TARGET: &str = "dense_f16";

/// A draft and its results.
#[derive(Debug, Clone)]
pub struct Draft2Case {
    /// The name, which seeds the values.
    pub name: &'static str,
    /// Rows of a pass.
    pub rows: usize,
    /// Results at three positions, ascending.
    pub results: Vec<Draft2Result>,
    keys: Vec<Vec<String>>,
    tensors: Vec<Tensor>,
    /// The target's id of each row of the head.
    ids: Option<Vec<i64>>,
}

/// A tensor by its GGUF name.
#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    /// Divisor of a matrix's eight-bit values; `None` for a norm.
    divisor: Option<f32>,
    /// Slowest first.
    shape: Vec<usize>,
}

/// What a draft says behind a number of committed tokens.
#[derive(Debug, Clone, Default)]
pub struct Draft2Result {
    /// Committed tokens, which precede the root.
    pub at: usize,
    /// `[depth, vocab]`.
    pub logits: Vec<f32>,
    /// `[depth]`.
    pub chain: Vec<TokenId>,
    /// The best candidates behind the chain, per row.
    pub lists: Vec<Draft2List>,
}

/// The best candidates of one row, given the chain before it.
#[derive(Debug, Clone, Default)]
pub struct Draft2List {
    /// Best first.
    pub ids: Vec<TokenId>,
    /// Of the same candidates.
    pub log_probs: Vec<f32>,
    /// If the draft has a confidence head.
    pub confidence: Option<f32>,
}

impl Draft2Case {
    /// Reads a case of [`NAMES`].
    ///
    /// # Errors
    /// An unreadable fixture.
    pub fn open(name: &'static str) -> Result<Draft2Case, GoldenError> {
        let file = format!("drafts2/{name}.txt");
        let text = String::from_utf8_lossy(&read(&file)?).into_owned();
        let mut case = Draft2Case {
            name,
            rows: 0,
            results: Vec::new(),
            keys: Vec::new(),
            tensors: Vec::new(),
            ids: None,
        };
        for line in text.lines() {
            let taken = case.take(line);
            taken.ok_or_else(|| GoldenError::Malformed {
                file: file.clone(),
                detail: format!("line {line:?}"),
            })?;
        }
        let file = format!("drafts2/{name}.npy");
        let array = npy(&read(&file)?).map_err(|detail| GoldenError::Malformed { file, detail })?;
        let size = array.values.len() / case.results.len().max(1);
        for (result, logits) in case
            .results
            .iter_mut()
            .zip(array.values.chunks(size.max(1)))
        {
            result.logits = logits.to_vec();
        }
        Ok(case)
    }

    /// Takes one line of the description.
    fn take(&mut self, line: &str) -> Option<()> {
        let (word, rest) = line.split_once(' ')?;
        let words: Vec<&str> = rest.split(' ').collect();
        let last = self.results.last_mut();
        match word {
            "rows" => self.rows = rest.parse().ok()?,
            "key" => self
                .keys
                .push(words.iter().map(|w| (*w).to_owned()).collect()),
            "tensor" => self.tensors.push(Tensor {
                name: (*words.first()?).to_owned(),
                divisor: words.get(1)?.parse().ok(),
                shape: numbers(words.get(2..)?)?,
            }),
            "d2t" => self.ids = Some(numbers(&words)?),
            "at" => self.results.push(Draft2Result {
                at: rest.parse().ok()?,
                ..Draft2Result::default()
            }),
            "chain" => last?.chain = tokens(&words)?,
            "confidence" => last?.lists.push(Draft2List {
                confidence: Some(rest.parse().ok()?),
                ..Draft2List::default()
            }),
            "ids" => {
                let lists = &mut last?.lists;
                // A confidence has begun the list.
                if lists.last().is_none_or(|list| !list.ids.is_empty()) {
                    lists.push(Draft2List::default());
                }
                lists.last_mut()?.ids = tokens(&words)?;
            }
            "log_probs" => last?.lists.last_mut()?.log_probs = numbers(&words)?,
            _ => return None,
        }
        Some(())
    }

    /// The draft as a GGUF file with f32 matrices.
    ///
    /// # Errors
    /// A draft that the format cannot hold.
    pub fn gguf(&self) -> Result<Vec<u8>, GoldenError> {
        file_format::gguf(self)
    }

    /// Writes the draft in a file format, with a mistake if one is wanted, and loads the file.
    ///
    /// # Errors
    /// Errors of the loader.
    pub fn load(
        &self,
        (format, mistake): (Draft2Format, Option<Draft2Mistake>),
        target: &ModelSpec,
    ) -> Result<LoadedDraft, GoldenError> {
        let options = DraftOptions {
            width: Some(self.rows),
            ..DraftOptions::default()
        };
        file_format::load(self, (format, mistake), target, options)
    }

    /// The largest difference of logits from a result.
    pub fn worst(expected: &Draft2Result, found: &DraftLogits) -> f32 {
        let pairs = expected.logits.iter().zip(&found.logits);
        let off = pairs.map(
            |(expected, found)| match (expected.is_finite(), found.is_finite()) {
                (true, true) => (expected - found).abs(),
                (false, false) => 0.0,
                _ => f32::INFINITY,
            },
        );
        let lengths_differ = expected.logits.len() != found.logits.len();
        off.fold(if lengths_differ { f32::INFINITY } else { 0.0 }, f32::max)
    }

    /// The largest difference of the candidates behind the chain from a result, log-probabilities
    /// and confidence; infinite if other tokens are found.
    pub fn worst_candidates(expected: &Draft2Result, found: &DraftCandidates) -> f32 {
        let mut worst = 0.0_f32;
        let mut next = found.first();
        for (list, token) in expected.lists.iter().zip(&expected.chain) {
            let Some(at) = next else { return f32::INFINITY };
            let behind = found.list(at);
            worst = worst.max(off(list, behind));
            let rank = behind.ids.iter().position(|id| id == token);
            next = rank.and_then(|rank| found.next(at, rank));
        }
        if next.is_some() { f32::INFINITY } else { worst }
    }
}

/// The largest difference of a list from the expected candidates that it holds.
fn off(expected: &Draft2List, found: CandidateList<'_>) -> f32 {
    let mut worst = match (expected.confidence, found.confidence) {
        (Some(expected), Some(found)) => (expected - found).abs(),
        (None, None) => 0.0,
        _ => f32::INFINITY,
    };
    // Candidates of nearly equal scores may change places, and the last may be another.
    let certain = expected
        .ids
        .len()
        .min(found.ids.len())
        .saturating_sub(1)
        .max(1);
    for (id, log_prob) in expected.ids.iter().zip(&expected.log_probs).take(certain) {
        let other = found.ids.iter().position(|other| other == id);
        let off = other.map_or(f32::INFINITY, |at| (found.log_probs[at] - log_prob).abs());
        worst = worst.max(off);
    }
    worst
}

fn numbers<T: std::str::FromStr>(words: &[&str]) -> Option<Vec<T>> {
    words.iter().map(|word| word.parse().ok()).collect()
}

fn tokens(words: &[&str]) -> Option<Vec<TokenId>> {
    Some(numbers(words)?.into_iter().map(TokenId).collect())
}

fn read(file: &str) -> Result<Vec<u8>, GoldenError> {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(file);
    std::fs::read(path).map_err(|source| GoldenError::Io {
        file: file.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_results_at_three_positions() {
        for name in NAMES {
            let case = Draft2Case::open(name).unwrap();
            assert_eq!(case.results.len(), 3, "{name}");
            for result in &case.results {
                assert_eq!(result.logits.len(), 512 * result.chain.len(), "{name}");
                assert_eq!(result.lists.len(), result.chain.len(), "{name}");
                for (list, token) in result.lists.iter().zip(&result.chain) {
                    assert_eq!(list.ids[0], *token);
                    assert_eq!(list.ids.len(), list.log_probs.len());
                }
            }
        }
    }
}
