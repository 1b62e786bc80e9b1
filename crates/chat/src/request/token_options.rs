//! What a request does with tokens as such: it cuts the prompt, and lists ids and logprobs.

use contract::TokenId;

/// How the prompt is cut, and which tokens the reply lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenOptions {
    /// How a prompt that is too long is cut; `None` refuses it.
    pub truncation: Option<PromptTruncation>,
    /// Alternatives per prompt token (0..=20) if logprobs of the prompt are requested.
    pub prompt_logprobs: Option<usize>,
    /// Whether the reply lists the token ids of prompt and output.
    pub return_token_ids: bool,
}

/// How a prompt is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptTruncation {
    /// Most tokens that are kept; `None` keeps as many as leave room for the reply.
    pub keep: Option<usize>,
    /// The side that is cut off.
    pub side: TruncationSide,
}

/// The side of a prompt that is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TruncationSide {
    /// The last tokens are kept.
    #[default]
    Left,
    /// The first tokens are kept.
    Right,
}

impl PromptTruncation {
    /// Cuts a prompt, in a context of `context` tokens, before a reply of at most `max_tokens`.
    pub fn apply(
        &self,
        mut ids: Vec<TokenId>,
        context: usize,
        max_tokens: Option<usize>,
    ) -> Vec<TokenId> {
        // A reply without a limit gets one token at least, as one with a limit beyond the context.
        let reply = max_tokens.filter(|tokens| *tokens < context).unwrap_or(1);
        let room = context.saturating_sub(reply.max(1));
        let keep = self.keep.unwrap_or(room);
        match self.side {
            TruncationSide::Left => ids.split_off(ids.len().saturating_sub(keep)),
            TruncationSide::Right => {
                ids.truncate(keep);
                ids
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_keeps_one_side_or_what_leaves_room_for_the_reply() {
        let ids: Vec<TokenId> = (0..10).map(TokenId).collect();
        let check = |keep, side, max_tokens, expected: std::ops::Range<u32>| {
            let cut = PromptTruncation { keep, side }.apply(ids.clone(), 8, max_tokens);
            assert_eq!(cut, expected.map(TokenId).collect::<Vec<_>>());
        };
        check(Some(3), TruncationSide::Left, None, 7..10);
        check(Some(3), TruncationSide::Right, None, 0..3);
        check(Some(0), TruncationSide::Left, None, 0..0);
        check(Some(99), TruncationSide::Left, None, 0..10);
        check(None, TruncationSide::Left, Some(5), 7..10);
        check(None, TruncationSide::Left, None, 3..10);
        check(None, TruncationSide::Left, Some(0), 3..10);
        check(None, TruncationSide::Right, Some(usize::MAX), 0..7);
    }
}
