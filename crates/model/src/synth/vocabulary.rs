//! A small working vocabulary for synthetic files: all bytes, a few hundred merges, the family's
//! control strings, and fillers up to the real size, so that text goes in and comes out.

/// Numbers of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Control strings in the order of the published vocabulary; thinking and tool tags are shown text.
const SPECIALS: [(&str, i32); 19] = [
    ("<|endoftext|>", CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<|vision_start|>", CONTROL),
    ("<|vision_end|>", CONTROL),
    ("<|vision_pad|>", CONTROL),
    ("<|image_pad|>", CONTROL),
    ("<|video_pad|>", CONTROL),
    ("<tool_call>", USER_DEFINED),
    ("</tool_call>", USER_DEFINED),
    ("<|fim_prefix|>", CONTROL),
    ("<|fim_middle|>", CONTROL),
    ("<|fim_suffix|>", CONTROL),
    ("<|fim_pad|>", CONTROL),
    ("<tool_response>", USER_DEFINED),
    ("</tool_response>", USER_DEFINED),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
    ("<|mask|>", CONTROL),
];

/// Words whose letters are merged left to right, so that common English needs fewer tokens than
/// letters.
const WORDS: &str = " the of and to in is you that it he was for on are as with his they at be this have from \
    or one had by word but not what all were we when your can said there use an each which she \
    do how their if will up other about out many then them these so some her would make like \
    him into time has look two more write go see number no way could people my than first \
    water been call who oil its now find long down day did get come made may part Hello hello \
    world user assistant system name weather city sky blue why Why answer function return \
    value string number file error model token code";

/// What a GGUF file stores of a vocabulary.
pub(super) struct Vocabulary {
    pub tokens: Vec<String>,
    pub kinds: Vec<i32>,
    pub merges: Vec<String>,
}

impl Vocabulary {
    /// A vocabulary of exactly `size` tokens; at least 600 for the words to fit.
    pub(super) fn new(size: u64) -> Vocabulary {
        let mut tokens: Vec<String> = byte_alphabet().iter().map(char::to_string).collect();
        let mut merges = Vec::new();
        let room = usize::try_from(size)
            .unwrap_or(usize::MAX)
            .saturating_sub(SPECIALS.len());
        for word in WORDS.split_whitespace() {
            for start in [String::new(), "\u{120}".to_owned()] {
                let mut whole = start;
                for letter in word.chars() {
                    let part = letter.to_string();
                    if whole.is_empty() {
                        whole = part;
                        continue;
                    }
                    let merge = format!("{whole} {part}");
                    whole.push(letter);
                    if !tokens.contains(&whole) && tokens.len() < room {
                        tokens.push(whole.clone());
                        merges.push(merge);
                    }
                }
            }
        }
        for filler in tokens.len()..room {
            // Out of reach of the merges, but readable when random weights choose it.
            tokens.push(format!("\u{120}w{filler}"));
        }
        let mut kinds = vec![NORMAL; tokens.len()];
        for (text, kind) in SPECIALS {
            tokens.push(text.to_owned());
            kinds.push(kind);
        }
        Vocabulary {
            tokens,
            kinds,
            merges,
        }
    }

    /// The id of a token.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        let at = self.tokens.iter().rposition(|token| token == text)?;
        u32::try_from(at).ok()
    }
}

/// The printable stand-in of every byte, in the published order: bytes that print stand for
/// themselves, the others are numbered from U+0100 on.
fn byte_alphabet() -> Vec<char> {
    let prints = |b: &u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut letters: Vec<char> = (0..=255_u8).filter(prints).map(char::from).collect();
    let others = (0..=255_u8).filter(|b| !prints(b)).count() as u32;
    letters.extend((0x100..0x100 + others).filter_map(char::from_u32));
    letters
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn tokens_are_unique_and_merges_make_tokens() {
        for size in [1024, 20_000] {
            let vocabulary = Vocabulary::new(size);
            assert_eq!(vocabulary.tokens.len() as u64, size);
            let all: HashSet<&String> = vocabulary.tokens.iter().collect();
            assert_eq!(all.len() as u64, size);
            assert!(vocabulary.merges.len() > 200);
            for merge in &vocabulary.merges {
                let (left, right) = merge.split_once(' ').unwrap();
                assert!(all.contains(&format!("{left}{right}")), "{merge}");
                assert!(all.contains(&left.to_owned()), "{merge}");
            }
        }
    }

    #[test]
    fn space_and_newline_have_their_published_letters() {
        let letters = byte_alphabet();
        assert_eq!(letters.len(), 256);
        // The 68 bytes that do not print begin with 0x00 at U+0100; the space is the 33rd of them.
        assert!(letters.contains(&'\u{120}') && letters.contains(&'\u{10a}'));
    }
}
