//! Splits text into pieces that merges never cross.

use std::ops::ControlFlow;

use contract::PreTokenizer;
use tokenizers::utils::SysRegex;

use crate::error::ChatError;

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const LLAMA_BPE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Digits are split off before all else, so blanks in front of one are at the end of their text.
const SMOLLM: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+";

/// The pre-tokenizer of one vocabulary.
pub(super) struct PreTokenizerSplitter {
    regex: SysRegex,
    pre: PreTokenizer,
}

impl PreTokenizerSplitter {
    pub(super) fn new(pre: PreTokenizer) -> Result<PreTokenizerSplitter, ChatError> {
        let pattern = match pre {
            PreTokenizer::Qwen2 => QWEN2,
            PreTokenizer::Qwen35 => QWEN35,
            PreTokenizer::LlamaBpe => LLAMA_BPE,
            PreTokenizer::Gpt2 => GPT2,
            PreTokenizer::Smollm => SMOLLM,
        };
        let regex = SysRegex::new(pattern).map_err(|err| {
            ChatError::setup(format!(
                "the pre-tokenizer's expression is not usable: {err}"
            ))
        })?;
        Ok(PreTokenizerSplitter { regex, pre })
    }

    /// Calls `take` with the pieces of `text`; joined, they are `text`. Stops early if `take`
    /// breaks, so that a text of any length costs no more than the pieces taken.
    ///
    /// The expressions match at every position, so the matches are adjacent. The regex engine stops
    /// early when it exceeds its step budget, as on millions of blanks; such a run is split by
    /// hand. The expressions never look behind, so splitting then resumes after it.
    pub(super) fn split<'t>(
        &self,
        text: &'t str,
        mut take: impl FnMut(&'t str) -> Result<ControlFlow<()>, ChatError>,
    ) -> Result<ControlFlow<()>, ChatError> {
        let mut done = 0;
        while done < text.len() {
            let before = done;
            let rest = &text[before..];
            for (start, end) in self.regex.find_iter(rest) {
                if before + start > done && take(&text[done..before + start])?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                if take(&rest[start..end])?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                done = before + end;
            }
            if done == before
                && let Some(length) = long_blank_len(self.pre, rest)
            {
                if take(&rest[..length])?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                done += length;
            }
            if done == before {
                return Err(ChatError::invalid(format!(
                    "the text cannot be tokenised: a run without word boundaries begins at byte {done} and is too long"
                )));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Length of the first piece of a run of at least two blanks at the start of `text`: up to the last
/// line break if there is one and the expression knows them; else the whole run at the end of the
/// text, and all but the last blank before a word.
fn long_blank_len(pre: PreTokenizer, text: &str) -> Option<usize> {
    let knows_lines = !matches!(pre, PreTokenizer::Gpt2 | PreTokenizer::Smollm);
    let splits_digits = pre == PreTokenizer::Smollm;
    let run = &text[..text.len() - text.trim_start().len()];
    let (last, _) = run.char_indices().next_back().filter(|(at, _)| *at > 0)?;
    let behind = text[run.len()..].chars().next();
    let is_whole = behind.is_none_or(|c| splits_digits && c.is_numeric());
    Some(match run.rfind(['\r', '\n']).filter(|_| knows_lines) {
        Some(at) => at + 1,
        None if is_whole => run.len(),
        None => last,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [PreTokenizer; 5] = [
        PreTokenizer::Qwen2,
        PreTokenizer::Qwen35,
        PreTokenizer::LlamaBpe,
        PreTokenizer::Gpt2,
        PreTokenizer::Smollm,
    ];

    fn pieces<'t>(splitter: &PreTokenizerSplitter, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        let take = |piece| {
            pieces.push(piece);
            Ok(ControlFlow::Continue(()))
        };
        assert!(splitter.split(text, take).unwrap().is_continue());
        pieces
    }

    #[test]
    fn pieces_equal_those_of_the_hugging_face_pre_tokenizers() {
        let all = crate::test_fixtures::fixture_json("tokenizer/pre_tokenizers.json");
        for (name, pre) in [
            ("gpt-2", PreTokenizer::Gpt2),
            ("smollm", PreTokenizer::Smollm),
            ("llama-bpe", PreTokenizer::LlamaBpe),
        ] {
            let splitter = PreTokenizerSplitter::new(pre).unwrap();
            let cases = all[name].as_array().unwrap();
            assert!(cases.len() > 25);
            for case in cases {
                let text = case["text"].as_str().unwrap();
                assert_eq!(
                    pieces(&splitter, text),
                    *case["pieces"].as_array().unwrap(),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn manual_blank_split_equals_the_regex_split() {
        let blanks = [
            " ",
            "  ",
            " \t ",
            "\n",
            " \n  ",
            "\r\n \r\n",
            "\u{3000} \u{a0}",
        ];
        for pre in ALL {
            let splitter = PreTokenizerSplitter::new(pre).unwrap();
            for blank in blanks.iter().filter(|blank| blank.chars().count() > 1) {
                for after in ["", "x", "5", "!", "\u{301}"] {
                    let text = format!("{blank}{after}");
                    let first = pieces(&splitter, &text)[0].len();
                    assert_eq!(long_blank_len(pre, &text), Some(first), "{pre:?} {text:?}");
                }
            }
        }
    }

    #[test]
    fn millions_of_blanks_are_split() {
        let splitter = PreTokenizerSplitter::new(PreTokenizer::Qwen35).unwrap();
        let n_blanks = 3_000_000;
        let text = format!("a{}x", " ".repeat(n_blanks));
        let lengths: Vec<usize> = pieces(&splitter, &text)
            .iter()
            .map(|piece| piece.len())
            .collect();
        assert_eq!(lengths, [1, n_blanks - 1, 2]);
    }
}
