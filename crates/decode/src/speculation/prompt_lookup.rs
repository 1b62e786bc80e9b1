//! Prompt lookup: draft tokens from an earlier place of the same text.

use contract::TokenId;

/// The tokens that followed the last earlier occurrence of the text's final `same` tokens; at most
/// `most`, none if there is no occurrence.
pub(crate) fn prompt_lookup(history: &[TokenId], same: usize, most: usize) -> &[TokenId] {
    /// How many tokens back the search goes.
    const REACH: usize = 4096;
    let Some(end) = history.len().checked_sub(same).filter(|_| same > 0) else {
        return &[];
    };
    let tail = &history[end..];
    let from = end.saturating_sub(REACH);
    let place = (from..end)
        .rev()
        .find(|at| history[*at..*at + same] == *tail);
    match place {
        Some(at) => {
            let follows = at + same;
            &history[follows..history.len().min(follows + most)]
        }
        None => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_lookup_finds_what_followed_the_same_tokens() {
        let history: Vec<TokenId> = [1, 2, 3, 4, 9, 2, 3, 5, 6, 2, 3].map(TokenId).to_vec();
        let ids = |tokens: &[TokenId]| tokens.iter().map(|t| t.0).collect::<Vec<_>>();
        assert_eq!(ids(prompt_lookup(&history, 2, 3)), [5, 6, 2]);
        assert_eq!(ids(prompt_lookup(&history, 3, 3)), [0; 0]);
        assert_eq!(ids(prompt_lookup(&history, 0, 3)), [0; 0]);
        assert_eq!(ids(prompt_lookup(&history[..1], 2, 3)), [0; 0]);
    }
}
