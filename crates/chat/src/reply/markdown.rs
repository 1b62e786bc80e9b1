//! Tracks whether text is inside Markdown code.

/// Tracks Markdown code fences and inline code in streamed text.
#[derive(Debug, Clone)]
pub(super) struct MarkdownTracker {
    /// Character and length of the open fence.
    fence: Option<(char, usize)>,
    /// Whether the line is blank so far.
    line_is_blank: bool,
    /// The run of fence characters the line starts with.
    run: Option<(char, usize)>,
    /// Whether another character follows the run.
    run_ended: bool,
    /// Whether only blanks follow the run.
    rest_is_blank: bool,
    /// Backticks on this line.
    n_ticks: usize,
}

impl Default for MarkdownTracker {
    fn default() -> MarkdownTracker {
        MarkdownTracker {
            fence: None,
            line_is_blank: true,
            run: None,
            run_ended: false,
            rest_is_blank: true,
            n_ticks: 0,
        }
    }
}

impl MarkdownTracker {
    pub(super) fn advance(&mut self, text: &str) {
        for letter in text.chars() {
            if letter == '\n' {
                self.end_line();
                continue;
            }
            if letter == '`' {
                self.n_ticks += 1;
            }
            match &mut self.run {
                Some((mark, length)) if *mark == letter && !self.run_ended => *length += 1,
                Some(_) => {
                    self.run_ended = true;
                    self.rest_is_blank &= letter.is_whitespace();
                }
                None if self.line_is_blank && matches!(letter, '`' | '~') => {
                    self.run = Some((letter, 1));
                }
                None => {}
            }
            self.line_is_blank &= letter.is_whitespace();
        }
    }

    fn end_line(&mut self) {
        if let Some((mark, length)) = self.run.filter(|(_, length)| *length >= 3) {
            self.fence = match self.fence {
                // Backticks after an opening run make it inline code.
                None if mark == '~' || self.n_ticks == length => Some((mark, length)),
                Some((open, least)) if open == mark && length >= least && self.rest_is_blank => {
                    None
                }
                unchanged => unchanged,
            };
        }
        *self = MarkdownTracker {
            fence: self.fence,
            ..MarkdownTracker::default()
        };
    }

    /// Starts a new block.
    pub(super) fn begin_block(&mut self) {
        *self = MarkdownTracker {
            fence: self.fence,
            ..MarkdownTracker::default()
        };
    }

    /// Whether the position is inside a fence or inline code.
    pub(super) fn is_code(&self) -> bool {
        self.fence.is_some() || self.n_ticks % 2 == 1
    }

    /// Whether only blanks precede the position on its line.
    pub(super) fn begins_line(&self) -> bool {
        self.line_is_blank
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, is_code: bool, begins_line: bool) {
        let mut markdown = MarkdownTracker::default();
        markdown.advance(text);
        assert_eq!(
            (markdown.is_code(), markdown.begins_line()),
            (is_code, begins_line),
            "{text:?}"
        );
    }

    #[test]
    fn fences_and_inline_code_are_code() {
        check("", false, true);
        check("text ", false, false);
        check("text\n  ", false, true);
        check("```rust\n", true, true);
        check("```rust\ncode\n```\n", false, true);
        check("~~~\n```\n", true, true);
        check("~~~~\n~~~\n", true, true);
        check("````\n```\n", true, true);
        check("```\n``` not closed\n", true, true);
        check("say `", true, false);
        check("say `x` ", false, false);
        check("```inline```\n", false, true);
    }

    #[test]
    fn markdown_state_ignores_chunking() {
        let mut markdown = MarkdownTracker::default();
        for delta in ["`", "`", "`\nco", "de\n``", "`", "\n"] {
            markdown.advance(delta);
        }
        assert!(!markdown.is_code());
    }
}
