//! Top-k selection without sorting all values.

use std::cmp::Ordering;

use contract::TokenId;

/// Compares two `(value, id)`: the higher value first, ties to the lower id.
pub(super) fn by_rank(a: &(f32, TokenId), b: &(f32, TokenId)) -> Ordering {
    // Adding zero makes the two zeros equal, which `total_cmp` distinguishes.
    (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// Indices of the `k` best of `values` with their `ids`, best first, ties to the lower id.
pub(super) fn best(values: &[f32], ids: &[TokenId], k: usize) -> Vec<usize> {
    let rank = |a: &usize, b: &usize| by_rank(&(values[*a], ids[*a]), &(values[*b], ids[*b]));
    let len = values.len().min(ids.len());
    if k == 0 {
        return Vec::new();
    }
    if k >= len {
        let mut all: Vec<usize> = (0..len).collect();
        all.sort_unstable_by(rank);
        return all;
    }
    // Candidates so far; cut to `k` whenever they have doubled, which raises the threshold.
    let mut found: Vec<usize> = Vec::with_capacity(2 * k);
    let mut threshold = f32::NEG_INFINITY;
    for (at, value) in values[..len].iter().enumerate() {
        if *value < threshold {
            continue;
        }
        found.push(at);
        if found.len() == 2 * k {
            found.select_nth_unstable_by(k - 1, rank);
            found.truncate(k);
            threshold = values[found[k - 1]];
        }
    }
    found.sort_unstable_by(rank);
    found.truncate(k);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn top_k_matches_full_sort(
            // Few different values, so that ties are common; ids in any order.
            entries in prop::collection::btree_map(0..500_u32, 0..9_i32, 1..200),
            reversed in any::<bool>(), k in 0..40_usize,
        ) {
            let mut entries: Vec<(u32, i32)> = entries.into_iter().collect();
            if reversed {
                entries.reverse();
            }
            let values: Vec<f32> = entries.iter().map(|(_, v)| *v as f32 - 4.0).collect();
            let ids: Vec<TokenId> = entries.iter().map(|(id, _)| TokenId(*id)).collect();
            let found: Vec<TokenId> = best(&values, &ids, k).into_iter().map(|i| ids[i]).collect();
            entries.sort_by_key(|(id, value)| (-value, *id));
            let expected: Vec<TokenId> =
                entries.iter().take(k).map(|(id, _)| TokenId(*id)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
