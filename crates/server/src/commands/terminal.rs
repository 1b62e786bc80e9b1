//! The terminal of a conversation: interrupts, and the display of replies.
//!
//! On a colour terminal reasoning is dimmed, and Markdown is styled.

use std::borrow::Cow;
use std::io::{self, Write};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use chat::reply::ReplyDelta;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::commands::INTERRUPTED;
use crate::commands::markdown::Markdown;

/// The terminal's settings before the first message was typed.
static BEFORE: OnceLock<Termios> = OnceLock::new();

/// Remembers the terminal's settings, which the editor changes.
pub(super) fn remember_settings() {
    if let Ok(now) = tcgetattr(io::stdin()) {
        BEFORE.get_or_init(|| now);
    }
}

/// The state that decides what an interrupt does: it ends the current reply. At any other time, and
/// at a second interrupt, it ends the program.
#[derive(Debug, Default)]
pub(super) struct Interrupts {
    /// A reply is being generated.
    generating: AtomicBool,
    /// The reply must end.
    cancelled: AtomicBool,
}

impl Interrupts {
    /// Marks the start of a reply.
    pub(super) fn reply_begins(&self) {
        self.cancelled.store(false, Ordering::SeqCst);
        self.generating.store(true, Ordering::SeqCst);
    }

    /// Marks the end of a reply.
    pub(super) fn reply_ends(&self) {
        self.generating.store(false, Ordering::SeqCst);
    }

    /// Whether the current reply must end.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Handles an interrupt; `false` if the program must exit at once.
    fn handle(&self) -> bool {
        self.generating.load(Ordering::SeqCst) && !self.cancelled.swap(true, Ordering::SeqCst)
    }
}

/// Watches for interrupts from now on.
pub(super) fn watch_interrupts() -> io::Result<Arc<Interrupts>> {
    let interrupts = Arc::new(Interrupts::default());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // Registered before the thread starts, so that no interrupt is lost.
    let mut signals = {
        let _guard = runtime.enter();
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?
    };
    let watched = Arc::clone(&interrupts);
    thread::Builder::new()
        .name("interrupts".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                while signals.recv().await.is_some() {
                    if !watched.handle() {
                        exit_now();
                    }
                }
            });
        })?;
    Ok(interrupts)
}

/// Ends the process at once, even within a long step or while a message is typed.
#[expect(
    clippy::exit,
    reason = "the main thread may be in the middle of a long step"
)]
fn exit_now() {
    if let Some(before) = BEFORE.get() {
        // A terminal that is gone needs no settings.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
    }
    process::exit(i32::from(INTERRUPTED));
}

/// What a reply is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Surface {
    /// A terminal; reasoning is dimmed and Markdown is styled.
    Terminal,
    /// A terminal without colours.
    PlainTerminal,
    /// A file or a pipe, which gets the model's text unchanged.
    File,
}

/// Writes a reply delta by delta: reasoning, then the text.
pub(super) struct Screen<W: Write> {
    out: W,
    surface: Surface,
    is_reasoning: bool,
    /// Whether the current line has text.
    in_line: bool,
    markdown: Markdown,
}

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

impl<W: Write> Screen<W> {
    /// A screen that writes to `out`.
    pub(super) fn new(out: W, surface: Surface) -> Screen<W> {
        Screen {
            out,
            surface,
            is_reasoning: false,
            in_line: false,
            markdown: Markdown::default(),
        }
    }

    /// Writes and flushes the next delta.
    pub(super) fn show(&mut self, piece: &ReplyDelta) -> io::Result<()> {
        let (text, reasoning) = match piece {
            ReplyDelta::Reasoning(text) => (text, true),
            ReplyDelta::Content(text) => (text, false),
            // Without tools in the prompt, no call is parsed.
            ReplyDelta::ToolCall { .. } | ReplyDelta::ToolArguments { .. } => return Ok(()),
        };
        if reasoning != self.is_reasoning {
            self.is_reasoning = reasoning;
            if self.surface == Surface::Terminal {
                self.out
                    .write_all(if reasoning { DIM } else { PLAIN }.as_bytes())?;
            }
            if !reasoning {
                // One empty line between reasoning and text, however the reasoning ended.
                let gap: &[u8] = if self.in_line { b"\n\n" } else { b"\n" };
                self.out.write_all(gap)?;
            }
        }
        match self.surface {
            Surface::File => self.out.write_all(text.as_bytes())?,
            Surface::Terminal if !reasoning => {
                let styled = self.markdown.push(&escape_controls(text));
                self.out.write_all(styled.as_bytes())?;
            }
            _ => self.out.write_all(escape_controls(text).as_bytes())?,
        }
        self.in_line = !text.ends_with('\n');
        self.out.flush()
    }

    /// Ends the reply with a line end.
    pub(super) fn end(&mut self) -> io::Result<()> {
        if self.is_reasoning && self.surface == Surface::Terminal {
            self.out.write_all(PLAIN.as_bytes())?;
        }
        self.is_reasoning = false;
        let rest = self.markdown.end();
        self.out.write_all(rest.as_bytes())?;
        if std::mem::take(&mut self.in_line) {
            self.out.write_all(b"\n")?;
        }
        self.out.flush()
    }
}

/// Replaces control characters with visible symbols, so that a model's text cannot control the
/// terminal.
fn escape_controls(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let symbol = |c: char| match u32::from(c) {
        _ if !is_control(c) => c,
        code @ 0..0x20 => char::from_u32(0x2400 + code).unwrap_or('\u{fffd}'),
        _ => '\u{fffd}',
    };
    Cow::Owned(text.chars().map(symbol).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(surface: Surface, pieces: &[ReplyDelta]) -> String {
        let mut bytes = Vec::new();
        let mut screen = Screen::new(&mut bytes, surface);
        for piece in pieces {
            screen.show(piece).unwrap();
        }
        screen.end().unwrap();
        String::from_utf8(bytes).unwrap()
    }

    fn reasoning(text: &str) -> ReplyDelta {
        ReplyDelta::Reasoning(text.to_owned())
    }

    fn content(text: &str) -> ReplyDelta {
        ReplyDelta::Content(text.to_owned())
    }

    #[test]
    fn reasoning_is_dimmed_only_on_a_colour_terminal() {
        let pieces = [reasoning("a"), reasoning("b"), content("c"), content("d")];
        let dimmed = shown(Surface::Terminal, &pieces);
        assert_eq!(dimmed, "\x1b[2mab\x1b[0m\n\ncd\n");
        assert_eq!(shown(Surface::PlainTerminal, &pieces), "ab\n\ncd\n");
        assert_eq!(shown(Surface::File, &pieces), "ab\n\ncd\n");
        let ended = [reasoning("a\n"), content("b")];
        assert_eq!(shown(Surface::File, &ended), "a\n\nb\n");
        let cut = shown(Surface::Terminal, &[reasoning("cut")]);
        assert_eq!(cut, "\x1b[2mcut\x1b[0m\n");
    }

    #[test]
    fn control_characters_are_escaped_on_terminals_only() {
        let piece = [content("a\x1b[2J\tb\u{9b}31m\n")];
        let escaped = "a\u{241b}[2J\tb\u{fffd}31m\n";
        assert_eq!(shown(Surface::Terminal, &piece), escaped);
        assert_eq!(shown(Surface::PlainTerminal, &piece), escaped);
        assert_eq!(shown(Surface::File, &piece), "a\x1b[2J\tb\u{9b}31m\n");
    }

    #[test]
    fn markdown_is_styled_only_on_a_colour_terminal() {
        let pieces = [
            reasoning("**a**"),
            content("*"),
            content("*b*"),
            content("* c"),
        ];
        let styled = "\x1b[2m**a**\x1b[0m\n\n\x1b[0m\x1b[1mb\x1b[0m c\n";
        assert_eq!(shown(Surface::Terminal, &pieces), styled);
        assert_eq!(shown(Surface::PlainTerminal, &pieces), "**a**\n\n**b** c\n");
        assert_eq!(shown(Surface::File, &pieces), "**a**\n\n**b** c\n");
    }

    #[test]
    fn reply_ends_with_one_line_end() {
        assert_eq!(shown(Surface::File, &[content("x\n")]), "x\n");
        assert_eq!(shown(Surface::File, &[]), "");
    }

    #[test]
    fn interrupt_ends_the_reply_or_the_program() {
        let interrupts = Interrupts::default();
        assert!(
            !interrupts.handle(),
            "while the model loads, the program exits"
        );
        interrupts.reply_begins();
        assert!(interrupts.handle() && interrupts.is_cancelled());
        assert!(!interrupts.handle(), "a second interrupt exits");
        interrupts.reply_ends();
        assert!(!interrupts.handle(), "between replies, the program exits");
        interrupts.reply_begins();
        assert!(!interrupts.is_cancelled(), "a new reply is not cancelled");
    }
}
