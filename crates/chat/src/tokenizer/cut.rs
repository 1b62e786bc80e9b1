//! Cutting text into the pieces that merges never cross.

use contract::PreTokenizer;
use tokenizers::utils::SysRegex;

use crate::error::ChatError;

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// One vocabulary's cutting rule.
pub(super) struct Cutter {
    regex: SysRegex,
}

impl Cutter {
    pub(super) fn new(pre: PreTokenizer) -> Result<Cutter, ChatError> {
        let pattern = match pre {
            PreTokenizer::Qwen2 => QWEN2,
            PreTokenizer::Qwen35 => QWEN35,
        };
        let regex = SysRegex::new(pattern).map_err(|fault| {
            ChatError::setup(format!(
                "the pre-tokenizer's expression is not usable: {fault}"
            ))
        })?;
        Ok(Cutter { regex })
    }

    /// The pieces of `text`, which joined give `text` again.
    ///
    /// The expressions match at every position, so the matches lie end to end. The regex engine ends
    /// its iteration early when it exceeds its step budget; since the expressions never look behind,
    /// cutting then resumes at that point, and only a point without progress is an error.
    pub(super) fn cut<'t>(&self, text: &'t str) -> Result<Vec<&'t str>, ChatError> {
        let mut pieces = Vec::with_capacity(text.len() / 4 + 1);
        let mut done = 0;
        while done < text.len() {
            let before = done;
            let rest = &text[before..];
            for (start, end) in self.regex.find_iter(rest) {
                if before + start > done {
                    pieces.push(&text[done..before + start]);
                }
                pieces.push(&rest[start..end]);
                done = before + end;
            }
            if done == before {
                return Err(ChatError::invalid(format!(
                    "the text cannot be tokenised: a run without word boundaries begins at byte {done} and is too long"
                )));
            }
        }
        Ok(pieces)
    }
}
