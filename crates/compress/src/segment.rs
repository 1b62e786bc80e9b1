//! Cuts a text into segments that end at sentences, lines and functions.
//!
//! A *block* is a line and the deeper indented lines behind it, with the line of closing brackets:
//! a function, a class, a list item. A block is one segment if it is short enough; otherwise its
//! head is a segment, and what lies inside is cut in the same way. Lines outside of blocks are cut
//! at sentences.
//!
//! The rules look at characters only, so they suit every language of people and programs.

use std::ops::Range;

/// The longest segments, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentLimits {
    /// Of a sentence; a longer one is cut behind a stop inside it, else between words.
    pub sentence_bytes: usize,
    /// Of a block; a longer one is cut into its parts.
    pub block_bytes: usize,
}

impl Default for SegmentLimits {
    fn default() -> SegmentLimits {
        SegmentLimits {
            sentence_bytes: 240,
            block_bytes: 2048,
        }
    }
}

/// A sentence shorter than this stays with the next one: `Mr.` ends no sentence.
const MIN_SENTENCE_BYTES: usize = 24;

/// The segments of `text`: byte ranges in order that cover all of it.
pub fn split(text: &str, limits: SegmentLimits) -> Vec<Range<usize>> {
    let mut segments = Vec::new();
    split_lines(text, &lines(text), limits, &mut segments);
    segments
}

/// One line of a text.
#[derive(Debug, Clone)]
struct Line {
    /// Its bytes, line end included.
    bytes: Range<usize>,
    /// Width of its indentation; `None` for a blank line.
    indent: Option<usize>,
    /// Whether it begins with a closing bracket or the word `end`.
    closes: bool,
    /// Whether it is a comment or an attribute, which belongs to the block behind it.
    leads: bool,
}

fn lines(text: &str) -> Vec<Line> {
    let mut start = 0;
    let line = |line: &str| {
        let bytes = start..start + line.len();
        start = bytes.end;
        let inner = line.trim_start();
        let starts = |with: &[&str]| with.iter().any(|with| inner.starts_with(with));
        Line {
            bytes,
            indent: (!inner.is_empty()).then(|| line.len() - inner.len()),
            closes: starts(&["}", ")", "]", "</"]) || inner.trim_end() == "end",
            leads: starts(&["//", "#", "@", "/*", "*", "--"]),
        }
    };
    text.split_inclusive('\n').map(line).collect()
}

fn split_lines(text: &str, all: &[Line], limits: SegmentLimits, out: &mut Vec<Range<usize>>) {
    let mut rest = all;
    while !rest.is_empty() {
        let n = block_lines(rest);
        let (block, behind) = rest.split_at(n);
        let bytes = block[0].bytes.start..block[n - 1].bytes.end;
        if n == 1 {
            split_sentences(text, bytes, limits, out);
        } else if bytes.len() <= limits.block_bytes {
            out.push(bytes);
        } else {
            // The head is followed by something deeper, so what remains is shorter.
            let head = head_lines(block).min(n - 1);
            for line in &block[..head] {
                split_sentences(text, line.bytes.clone(), limits, out);
            }
            split_lines(text, &block[head..], limits, out);
        }
        rest = behind;
    }
}

/// Lines of the block at the start of `lines`; 1 if no block begins there.
fn block_lines(lines: &[Line]) -> usize {
    let head = head_lines(lines);
    let Some(Some(indent)) = lines.get(head - 1).map(|line| line.indent) else {
        return 1;
    };
    let mut n = head;
    let mut is_block = false;
    for (i, line) in lines.iter().enumerate().skip(head) {
        match line.indent {
            None => {}
            Some(deeper) if deeper > indent => (n, is_block) = (i + 1, true),
            Some(same) if same == indent && line.closes && is_block => n = i + 1,
            Some(_) => break,
        }
    }
    // Blank lines between two blocks belong to the first.
    while is_block && lines.get(n).is_some_and(|line| line.indent.is_none()) {
        n += 1;
    }
    if is_block { n } else { 1 }
}

/// Lines of a block up to its head: comments and attributes of the same indentation, and the line
/// behind them.
fn head_lines(lines: &[Line]) -> usize {
    let indent = lines[0].indent;
    let same = |line: &&Line| line.leads && line.indent == indent;
    let leading = lines.iter().take_while(same).count();
    match lines.get(leading) {
        Some(line) if line.indent == indent => leading + 1,
        _ => leading.max(1),
    }
}

/// Appends the sentences of one line.
fn split_sentences(
    text: &str,
    line: Range<usize>,
    limits: SegmentLimits,
    out: &mut Vec<Range<usize>>,
) {
    let mut start = line.start;
    // A blank line belongs to what stands before it.
    if text[line.clone()].trim().is_empty()
        && let Some(last) = out.last_mut()
    {
        last.end = line.end;
        return;
    }
    let mut push = |from: usize, to: usize| split_words(text, from..to, limits, out);
    let mut chars = text[line.clone()].char_indices().peekable();
    let mut ended = false;
    while let Some((at, c)) = chars.next() {
        match c {
            '.' | '!' | '?' | '…' => ended = true,
            '。' | '！' | '？' => {
                let end = line.start + at + c.len_utf8();
                push(start, end);
                (start, ended) = (end, false);
            }
            '"' | '\'' | ')' | ']' | '”' | '’' | '»' => {}
            c if c.is_whitespace() && ended => {
                let next = chars.peek().map(|(_, next)| *next);
                let end = line.start + at + c.len_utf8();
                let goes_on = next.is_none_or(|next| next.is_lowercase() || next.is_whitespace());
                if !goes_on && end - start >= MIN_SENTENCE_BYTES {
                    push(start, end);
                    start = end;
                }
                ended = ended && next.is_some_and(char::is_whitespace);
            }
            _ => ended = false,
        }
    }
    if start < line.end {
        push(start, line.end);
    }
}

/// Appends a sentence, cut between words where it is too long.
fn split_words(
    text: &str,
    sentence: Range<usize>,
    limits: SegmentLimits,
    out: &mut Vec<Range<usize>>,
) {
    let longest = limits.sentence_bytes.max(4);
    let mut start = sentence.start;
    while sentence.end - start > longest {
        let mut end = start + longest;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let piece = &text[start..end];
        let stop = [". ", "! ", "? "]
            .iter()
            .filter_map(|stop| piece.rfind(stop));
        let stop = stop
            .max()
            .map(|at| at + 1)
            .filter(|at| *at >= MIN_SENTENCE_BYTES);
        let word = stop.or_else(|| piece.rfind([' ', '\t', ',', ';', '}', ']', '>']));
        // All of these are one byte long.
        end = word.map_or(end, |at| start + at + 1);
        out.push(start..end);
        start = end;
    }
    out.push(start..sentence.end);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str, limits: SegmentLimits) -> Vec<&str> {
        let ranges = split(text, limits);
        assert_eq!(ranges.first().map_or(0, |first| first.start), 0);
        assert_eq!(ranges.last().map_or(0, |last| last.end), text.len());
        assert!(ranges.windows(2).all(|two| two[0].end == two[1].start));
        ranges.into_iter().map(|range| &text[range]).collect()
    }

    fn check(text: &str, expected: &[&str]) {
        assert_eq!(cut(text, SegmentLimits::default()), expected);
    }

    #[test]
    fn prose_is_cut_at_sentences_and_lines() {
        check("", &[]);
        check(
            "The quick fox jumps over it. Then it slept until noon! A line\nThe next line.\n",
            &[
                "The quick fox jumps over it. ",
                "Then it slept until noon! ",
                "A line\n",
                "The next line.\n",
            ],
        );
    }

    #[test]
    fn abbreviations_and_numbers_end_no_sentence() {
        check(
            "Mr. Smith paid 3.50 to the shop, e.g. for tea. He left \"at once.\" Nobody saw him.",
            &[
                "Mr. Smith paid 3.50 to the shop, e.g. for tea. ",
                "He left \"at once.\" Nobody saw him.",
            ],
        );
    }

    #[test]
    fn wide_stops_end_sentences_without_spaces() {
        check("今日は晴れ。明日は雨！", &["今日は晴れ。", "明日は雨！"]);
    }

    #[test]
    fn functions_stay_whole_with_their_comments_and_closing_lines() {
        let first =
            "/// Adds.\n#[inline]\nfn add(a: u8, b: u8) -> u8 {\n    // sum\n\n    a + b\n}\n\n";
        let second = "def twice(x):\n    return 2 * x\n\n";
        check(
            &format!("use std::fmt;\n{first}{second}print(1)\n"),
            &["use std::fmt;\n", first, second, "print(1)\n"],
        );
    }

    #[test]
    fn a_long_block_is_cut_into_the_blocks_inside_it() {
        let limits = SegmentLimits {
            sentence_bytes: 400,
            block_bytes: 40,
        };
        let text =
            "class A:\n    def f(self):\n        return 1\n    def g(self):\n        return 2\n";
        assert_eq!(
            cut(text, limits),
            [
                "class A:\n",
                "    def f(self):\n        return 1\n",
                "    def g(self):\n        return 2\n",
            ]
        );
    }

    #[test]
    fn long_sentences_are_cut_between_words_and_never_inside_a_character() {
        let limits = SegmentLimits {
            sentence_bytes: 10,
            block_bytes: 40,
        };
        assert_eq!(
            cut("one two three four", limits),
            ["one two ", "three four"]
        );
        assert_eq!(cut("ääääääää", limits), ["äääää", "äää"]);
        let limits_of_40 = SegmentLimits {
            sentence_bytes: 40,
            ..limits
        };
        assert_eq!(
            cut(
                "a stop in lower case, here. and then it goes on",
                limits_of_40
            ),
            ["a stop in lower case, here. ", "and then it goes on"]
        );
        assert_eq!(
            cut("{\"a\":1,\"b\":22}", limits),
            ["{\"a\":1,", "\"b\":22}"]
        );
    }

    #[test]
    fn blank_lines_belong_to_what_stands_before_them() {
        check(
            "First line.\n\n\nSecond.\n",
            &["First line.\n\n\n", "Second.\n"],
        );
        check("\n\nOnly.", &["\n\n", "Only."]);
    }
}
