//! Anchors: places of the contents that repeat rare words of the query.
//!
//! Attention finds what resembles a query; an anchor finds what is spelt alike, however weak the
//! scorer. Runs of [`RUN`] query tokens are searched in the contents, and a run that occurs often
//! is no anchor. Single words are the matter of [`crate::words`].

use std::collections::{HashMap, HashSet};

/// Tokens of a run.
pub const RUN: usize = 4;

/// Which anchors count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnchorSettings {
    /// How many of the query's last tokens are searched; 0 finds no anchors.
    pub query_tokens: usize,
    /// A run that occurs more often is no anchor. `None` chooses by length: 8 below 32,768
    /// tokens, 16 below 65,536, 32 above.
    pub most_hits: Option<usize>,
}

impl AnchorSettings {
    /// The most hits in contents of `tokens` tokens.
    pub fn most_hits(&self, tokens: usize) -> usize {
        self.most_hits.unwrap_or(match tokens {
            0..32_768 => 8,
            32_768..65_536 => 16,
            _ => 32,
        })
    }
}

impl Default for AnchorSettings {
    fn default() -> AnchorSettings {
        AnchorSettings {
            query_tokens: 96,
            most_hits: None,
        }
    }
}

/// Whether each segment is an anchor, `[n_segments]`. `segments` are the token ids of each segment,
/// in order; a run may cross their borders.
pub fn find(segments: &[Vec<u32>], query: &[u32], settings: AnchorSettings) -> Vec<bool> {
    let mut found = vec![false; segments.len()];
    let query = &query[query.len().saturating_sub(settings.query_tokens)..];
    let runs: HashSet<&[u32]> = query.windows(RUN).collect();
    let ids: Vec<u32> = segments.iter().flatten().copied().collect();
    let owners: Vec<usize> = (0..segments.len())
        .flat_map(|segment| std::iter::repeat_n(segment, segments[segment].len()))
        .collect();
    let most_hits = settings.most_hits(ids.len());
    let mut hits: HashMap<&[u32], Vec<usize>> = HashMap::new();
    for (at, run) in ids.windows(RUN).enumerate() {
        if runs.contains(run) {
            hits.entry(run).or_default().push(at);
        }
    }
    for places in hits.values().filter(|places| places.len() <= most_hits) {
        for at in places {
            for token in *at..at + RUN {
                found[owners[token]] = true;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Segments of filler `0..` with the given runs at the given segments.
    fn filler(n: usize, planted: &[(usize, [u32; RUN])]) -> Vec<Vec<u32>> {
        let mut segments: Vec<Vec<u32>> = (0..n)
            .map(|i| (0..6).map(|j| (i as u32 * 7 + j * 3) % 11).collect())
            .collect();
        for (at, run) in planted {
            segments[*at][1..1 + RUN].copy_from_slice(run);
        }
        segments
    }

    fn indices(found: &[bool]) -> Vec<usize> {
        (0..found.len()).filter(|i| found[*i]).collect()
    }

    #[test]
    fn rare_runs_of_the_query_are_anchors_and_frequent_ones_are_not() {
        let rare = [100, 101, 102, 103];
        let often = [200, 201, 202, 203];
        let mut planted = vec![(3, rare), (17, rare)];
        planted.extend((20..30).map(|at| (at, often)));
        let query = [vec![999], rare.to_vec(), vec![998], often.to_vec()].concat();
        let settings = AnchorSettings::default();
        let found = find(&filler(40, &planted), &query, settings);
        assert_eq!(indices(&found), [3, 17]);
        let settings = AnchorSettings {
            most_hits: Some(1),
            ..settings
        };
        assert_eq!(indices(&find(&filler(40, &planted), &query, settings)), []);
    }

    #[test]
    fn a_run_across_a_border_marks_both_segments() {
        let mut segments = filler(4, &[]);
        segments[1][5] = 100;
        segments[2][..3].copy_from_slice(&[101, 102, 103]);
        let found = find(&segments, &[100, 101, 102, 103], AnchorSettings::default());
        assert_eq!(indices(&found), [1, 2]);
    }

    #[test]
    fn only_the_end_of_the_query_is_searched() {
        let rare = [100, 101, 102, 103];
        let query = [rare.to_vec(), vec![0; 96]].concat();
        let found = find(&filler(8, &[(3, rare)]), &query, AnchorSettings::default());
        assert_eq!(indices(&found), []);
    }
}
