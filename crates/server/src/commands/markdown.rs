//! Markdown of a reply as styled text, while it streams in.
//!
//! Headings, emphasis, code, lists and quotes get a style and lose their marks. Everything else,
//! tables and links among it, stays as it is written. Styles end with their line, so a mark that
//! never closes does no harm.

const RESET: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const ITALIC: &str = "\x1b[3m";
const CODE: &str = "\x1b[36m";
/// The longest run of marks at the start of a line.
const MOST_MARKS: usize = 12;

/// The styler of one reply.
#[derive(Debug, Default)]
pub(super) struct Markdown {
    /// Text whose meaning the next characters decide: the start of a line, or a run of marks.
    pending: String,
    /// Whether the line has text already.
    in_line: bool,
    /// The last character that was written in this line.
    before: Option<char>,
    heading: bool,
    bold: bool,
    italic: bool,
    /// Length of the backquote run that opened inline code; 0 outside.
    code: usize,
    /// The mark and length of the run that opened a code block.
    fence: Option<(char, usize)>,
    /// The rest of the line belongs to the mark of a code block.
    fence_line: bool,
}

impl Markdown {
    /// The next piece of the reply, styled.
    pub(super) fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            self.next(c, &mut out);
        }
        out
    }

    /// The rest; styles are off afterwards.
    pub(super) fn end(&mut self) -> String {
        let mut out = String::new();
        self.settle(&mut out);
        let is_styled = self.is_styled();
        *self = Markdown::default();
        if is_styled {
            out.push_str(RESET);
        }
        out
    }

    /// Decides what is pending, at the end of a line or of the reply.
    fn settle(&mut self, out: &mut String) {
        if !self.in_line {
            self.start(None, out);
        }
        self.marks(None, out);
    }

    fn next(&mut self, c: char, out: &mut String) {
        if c == '\n' {
            self.settle(out);
            self.line_ends(out);
            return;
        }
        if !self.in_line {
            self.pending.push(c);
            if !is_start(&self.pending) {
                self.pending.pop();
                self.start(Some(c), out);
            }
            return;
        }
        if self.fence.is_some() || self.fence_line {
            self.write(c, out);
            return;
        }
        let is_mark = |c: char| matches!(c, '*' | '_' | '`' | '\\');
        match self.pending.chars().next() {
            Some('\\') => {
                self.pending.clear();
                if !c.is_ascii_punctuation() {
                    self.write('\\', out);
                }
                self.write(c, out);
            }
            Some(mark) if mark == c => self.pending.push(c),
            Some(_) => {
                self.marks(Some(c), out);
                self.next(c, out);
            }
            None if is_mark(c) && !(self.code > 0 && c != '`') => self.pending.push(c),
            None => self.write(c, out),
        }
    }

    /// Decides what the start of a line is; `next` is the character behind it.
    fn start(&mut self, next: Option<char>, out: &mut String) {
        let start = std::mem::take(&mut self.pending);
        let marks = start.trim_start_matches(' ');
        let indent = &start[..start.len() - marks.len()];
        self.in_line = true;
        let first = marks.chars().next();
        let run = marks.chars().take_while(|c| Some(*c) == first).count();
        if let Some((mark, length)) = self.fence {
            if first == Some(mark) && run >= length && next.is_none() {
                self.fence = None;
                out.push_str(&format!("{RESET}{DIM}{start}{RESET}"));
                self.fence_line = true;
                return;
            }
            self.replay(&start, next, out);
            return;
        }
        match first {
            Some(mark @ ('`' | '~')) if run >= 3 && run == marks.len() => {
                out.push_str(&format!("{DIM}{start}"));
                self.fence = Some((mark, run));
                self.fence_line = true;
                if let Some(c) = next {
                    self.write(c, out);
                }
            }
            Some('#') if run <= 6 && next.is_some() && marks.len() == run + 1 => {
                self.heading = true;
                out.push_str(BOLD);
                self.replay("", next, out);
            }
            Some('-' | '*' | '+') if run == 1 && marks.len() == 2 && next.is_some() => {
                out.push_str(indent);
                out.push_str("• ");
                self.before = Some(' ');
                self.replay("", next, out);
            }
            Some('>') if next.is_some() => {
                out.push_str(&format!("{indent}{DIM}│{RESET} "));
                self.before = Some(' ');
                self.replay("", next, out);
            }
            _ => self.replay(&start, next, out),
        }
    }

    /// The characters of a start that turned out to be text.
    fn replay(&mut self, text: &str, next: Option<char>, out: &mut String) {
        for c in text.chars().chain(next) {
            self.next(c, out);
        }
    }

    /// Decides what a run of marks is; `next` is the character behind it.
    fn marks(&mut self, next: Option<char>, out: &mut String) {
        let run = std::mem::take(&mut self.pending);
        let Some(mark) = run.chars().next() else {
            return;
        };
        if mark == '`' {
            if self.code == 0 && next.is_some() {
                self.code = run.len();
                out.push_str(CODE);
                return;
            }
            if self.code == run.len() {
                self.code = 0;
                self.restyle(out);
                return;
            }
        } else if mark != '\\' && self.emphasis(mark, run.len(), next) {
            self.restyle(out);
            return;
        }
        for c in run.chars() {
            self.write(c, out);
        }
    }

    /// Opens or closes emphasis; `false` if the marks are text, as in `2 * 3` and `a_name`.
    fn emphasis(&mut self, mark: char, length: usize, next: Option<char>) -> bool {
        let is_space = |c: Option<char>| c.is_none_or(char::is_whitespace);
        let is_word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let (wants_bold, wants_italic) = match length {
            1 => (false, true),
            2 => (true, false),
            3 => (true, true),
            _ => return false,
        };
        let is_inside_word = mark == '_' && is_word(self.before) && is_word(next);
        let closes = (!wants_bold || self.bold) && (!wants_italic || self.italic);
        let can_close = closes && !is_space(self.before);
        let can_open = !is_space(next) && (mark == '*' || !is_word(self.before));
        if is_inside_word || !(can_close || (!closes && can_open)) {
            return false;
        }
        self.bold ^= wants_bold;
        self.italic ^= wants_italic;
        true
    }

    fn write(&mut self, c: char, out: &mut String) {
        self.before = Some(c);
        out.push(c);
    }

    fn is_styled(&self) -> bool {
        self.heading
            || self.bold
            || self.italic
            || self.code > 0
            || self.fence.is_some()
            || self.fence_line
    }

    /// Writes the styles that are on.
    fn restyle(&self, out: &mut String) {
        out.push_str(RESET);
        for (is_on, style) in [
            (self.heading || self.bold, BOLD),
            (self.italic, ITALIC),
            (self.code > 0, CODE),
        ] {
            if is_on {
                out.push_str(style);
            }
        }
    }

    fn line_ends(&mut self, out: &mut String) {
        if self.is_styled() {
            out.push_str(RESET);
        }
        out.push('\n');
        *self = Markdown {
            fence: self.fence,
            ..Markdown::default()
        };
        if self.fence.is_some() {
            out.push_str(CODE);
        }
    }
}

/// Whether a text may be or become the mark at the start of a line.
fn is_start(text: &str) -> bool {
    let marks = text.trim_start_matches(' ');
    if text.len() > MOST_MARKS {
        return false;
    }
    let Some(first) = marks.chars().next() else {
        return true;
    };
    let rest = marks.trim_start_matches(first);
    match first {
        '#' | '>' => rest.is_empty() || rest == " ",
        '-' | '*' | '+' => marks.len() == 1 || marks.len() == 2 && rest == " ",
        '`' | '~' => rest.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn styled(text: &str) -> String {
        let mut markdown = Markdown::default();
        let out = markdown.push(text);
        out + &markdown.end()
    }

    /// The style names in place of the escape sequences.
    fn named(text: &str) -> String {
        let names = [
            (RESET, "{}"),
            (BOLD, "{b}"),
            (DIM, "{d}"),
            (ITALIC, "{i}"),
            (CODE, "{c}"),
        ];
        let start = styled(text);
        names
            .iter()
            .fold(start, |text, (style, name)| text.replace(style, name))
    }

    #[test]
    fn marks_become_styles() {
        for (text, expected) in [
            ("plain text\n", "plain text\n"),
            ("# Title\ntext", "{b}Title{}\ntext"),
            ("a **bold** word", "a {}{b}bold{} word"),
            (
                "*one* _two_ ***both***",
                "{}{i}one{} {}{i}two{} {}{b}{i}both{}",
            ),
            ("use `let x = *p;` here", "use {c}let x = *p;{} here"),
            ("- first\n  * second\n", "• first\n  • second\n"),
            ("> quoted\n", "{d}│{} quoted\n"),
            ("1. one\n", "1. one\n"),
            (
                "```rust\nlet a = **b;\n# no title\n```\nend",
                "{d}```rust{}\n{c}let a = **b;{}\n{c}# no title{}\n{c}{}{d}```{}{}\nend",
            ),
        ] {
            assert_eq!(named(text), expected, "{text:?}");
        }
    }

    #[test]
    fn marks_that_are_text_stay() {
        for text in [
            "2 * 3 * 4",
            "snake_case_name",
            "a \\ b",
            "#hashtag",
            "-5 degrees",
            "| a | b |\n|---|---|",
            "**",
            "5 ** 2",
            "[text](https://a.b/c_d_e)",
            "----\n",
            "## \n",
            "*\n",
            ">\n",
            "x `\n",
        ] {
            let out = styled(text);
            assert_eq!(out, text, "{text:?}");
        }
        assert_eq!(styled("\\*not\\*"), "*not*");
    }

    #[test]
    fn unclosed_marks_end_with_their_line() {
        assert_eq!(named("**bold\nplain"), "{}{b}bold{}\nplain");
        assert_eq!(named("`code"), "{c}code{}");
        assert_eq!(named("```\ncode"), "{d}```{}\n{c}code{}");
    }

    #[test]
    fn output_does_not_depend_on_the_pieces() {
        let text =
            "# T\n\n**b** *i* `c` ***x***\n- a\n> q\n```py\nx = '*'\n```\n\nend \\* _u_ a_b_c **";
        let whole = styled(text);
        for size in [1, 2, 3, 5] {
            let mut markdown = Markdown::default();
            let chars: Vec<char> = text.chars().collect();
            let pieces = chars
                .chunks(size)
                .map(|piece| piece.iter().collect::<String>());
            let mut out: String = pieces.map(|piece| markdown.push(&piece)).collect();
            out += &markdown.end();
            assert_eq!(out, whole, "{size}");
        }
    }
}
