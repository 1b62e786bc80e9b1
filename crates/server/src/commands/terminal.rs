//! The person at the terminal: lines typed, interrupts, and how an answer is shown.

use std::borrow::Cow;
use std::io::{self, BufRead, Write};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use chat::reply::ReplyDelta;

use crate::commands::INTERRUPTED;

/// What a person does while nothing is being answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Typed a line.
    Line(String),
    /// Closed the input.
    End,
    /// Pressed ctrl-C.
    Interrupt,
}

/// Ctrl-C: ends the answer that is being given, or the conversation between answers; while a model loads,
/// and when a person asks twice, the program ends at once.
#[derive(Debug, Default)]
pub(super) struct Interrupts {
    /// An answer is being given.
    answering: AtomicBool,
    /// The program waits for what a person types.
    listening: AtomicBool,
    /// The answer is to end.
    asked: AtomicBool,
}

impl Interrupts {
    /// Marks the beginning of an answer.
    pub(super) fn answer_begins(&self) {
        self.asked.store(false, Ordering::SeqCst);
        self.answering.store(true, Ordering::SeqCst);
    }

    /// Marks its end.
    pub(super) fn answer_ends(&self) {
        self.answering.store(false, Ordering::SeqCst);
    }

    /// Whether the present answer is to end.
    pub(super) fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// What a person does next; an interrupt is one of the things.
    pub(super) fn listen(&self, inputs: &Receiver<Input>) -> Input {
        self.listening.store(true, Ordering::SeqCst);
        // Nobody is left who could type.
        let input = inputs.recv().unwrap_or(Input::End);
        self.listening.store(false, Ordering::SeqCst);
        input
    }

    /// Takes one interrupt; `false` if it is not to be waited for.
    fn take(&self, inputs: &Sender<Input>) -> bool {
        if self.answering.load(Ordering::SeqCst) {
            return !self.asked.swap(true, Ordering::SeqCst);
        }
        self.listening.load(Ordering::SeqCst) && inputs.send(Input::Interrupt).is_ok()
    }
}

/// Watches for interrupts from now on. The receiver gets those that come between answers.
pub(super) fn watch_interrupts() -> io::Result<(Arc<Interrupts>, Sender<Input>, Receiver<Input>)> {
    let (sender, receiver) = mpsc::channel();
    let interrupts = Arc::new(Interrupts::default());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // Registered here, so that no interrupt is lost to the thread's start.
    let mut signals = {
        let _inside = runtime.enter();
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?
    };
    let (watched, inputs) = (Arc::clone(&interrupts), sender.clone());
    thread::Builder::new()
        .name("interrupts".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                while signals.recv().await.is_some() {
                    if !watched.take(&inputs) {
                        leave();
                    }
                }
            });
        })?;
    Ok((interrupts, sender, receiver))
}

/// Ends the process where it stands: asked twice, a person does not wait for a long step.
#[expect(
    clippy::exit,
    reason = "the main thread may be in the middle of a long step"
)]
fn leave() {
    process::exit(i32::from(INTERRUPTED));
}

/// Reads lines from standard input, without their ends, on a thread of its own.
pub(super) fn read_lines(inputs: Sender<Input>) -> io::Result<()> {
    thread::Builder::new()
        .name("lines".to_owned())
        .spawn(move || {
            for line in io::stdin().lock().lines() {
                // A line that is not UTF-8 ends the conversation like a closed input.
                let Ok(line) = line else { break };
                if inputs.send(Input::Line(line)).is_err() {
                    return;
                }
            }
            // The receiver's end of the program needs no telling.
            let _ = inputs.send(Input::End);
        })?;
    Ok(())
}

/// What an answer is shown on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Surface {
    /// A terminal: thinking is dimmed.
    Terminal,
    /// A terminal whose user wants no colours.
    PlainTerminal,
    /// A file or a pipe, which gets the text as the model wrote it.
    File,
}

/// Shows an answer piece by piece: thinking, then the text.
pub(super) struct Screen<W: Write> {
    out: W,
    surface: Surface,
    is_thinking: bool,
    /// Whether anything was written since the last line's end.
    in_line: bool,
}

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

impl<W: Write> Screen<W> {
    /// Shows on `out`, which is such a surface.
    pub(super) fn new(out: W, surface: Surface) -> Screen<W> {
        Screen {
            out,
            surface,
            is_thinking: false,
            in_line: false,
        }
    }

    /// Shows the next piece at once.
    pub(super) fn show(&mut self, piece: &ReplyDelta) -> io::Result<()> {
        let (text, thinks) = match piece {
            ReplyDelta::Reasoning(text) => (text, true),
            ReplyDelta::Content(text) => (text, false),
            // No tools are declared, so no call is ever recognised.
            ReplyDelta::ToolCall { .. } | ReplyDelta::ToolArguments { .. } => return Ok(()),
        };
        if thinks != self.is_thinking {
            self.is_thinking = thinks;
            if self.surface == Surface::Terminal {
                self.out
                    .write_all(if thinks { DIM } else { PLAIN }.as_bytes())?;
            }
            if !thinks {
                // One empty line between thinking and text, however the thinking ended.
                let gap: &[u8] = if self.in_line { b"\n\n" } else { b"\n" };
                self.out.write_all(gap)?;
            }
        }
        if self.surface == Surface::File {
            self.out.write_all(text.as_bytes())?;
        } else {
            self.out.write_all(harmless(text).as_bytes())?;
        }
        self.in_line = !text.ends_with('\n');
        self.out.flush()
    }

    /// Ends the answer with the end of a line.
    pub(super) fn end(&mut self) -> io::Result<()> {
        if self.is_thinking && self.surface == Surface::Terminal {
            self.out.write_all(PLAIN.as_bytes())?;
        }
        self.is_thinking = false;
        if std::mem::take(&mut self.in_line) {
            self.out.write_all(b"\n")?;
        }
        self.out.flush()
    }
}

/// Text whose control characters, through which a model could command the terminal, are only pictures.
fn harmless(text: &str) -> Cow<'_, str> {
    let commands = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(commands) {
        return Cow::Borrowed(text);
    }
    let picture = |c: char| match u32::from(c) {
        _ if !commands(c) => c,
        code @ 0..0x20 => char::from_u32(0x2400 + code).unwrap_or('\u{fffd}'),
        _ => '\u{fffd}',
    };
    Cow::Owned(text.chars().map(picture).collect())
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

    fn thought(text: &str) -> ReplyDelta {
        ReplyDelta::Reasoning(text.to_owned())
    }

    fn said(text: &str) -> ReplyDelta {
        ReplyDelta::Content(text.to_owned())
    }

    #[test]
    fn thinking_is_dimmed_only_where_it_can_be_seen() {
        let pieces = [thought("a"), thought("b"), said("c"), said("d")];
        let dimmed = shown(Surface::Terminal, &pieces);
        assert_eq!(dimmed, "\x1b[2mab\x1b[0m\n\ncd\n");
        assert_eq!(shown(Surface::PlainTerminal, &pieces), "ab\n\ncd\n");
        assert_eq!(shown(Surface::File, &pieces), "ab\n\ncd\n");
        let ended = [thought("a\n"), said("b")];
        assert_eq!(shown(Surface::File, &ended), "a\n\nb\n");
        let cut = shown(Surface::Terminal, &[thought("cut")]);
        assert_eq!(cut, "\x1b[2mcut\x1b[0m\n");
    }

    #[test]
    fn a_model_cannot_command_the_terminal() {
        let piece = [said("a\x1b[2J\tb\u{9b}31m\n")];
        let harmless = "a\u{241b}[2J\tb\u{fffd}31m\n";
        assert_eq!(shown(Surface::Terminal, &piece), harmless);
        assert_eq!(shown(Surface::PlainTerminal, &piece), harmless);
        assert_eq!(shown(Surface::File, &piece), "a\x1b[2J\tb\u{9b}31m\n");
    }

    #[test]
    fn an_answer_ends_with_one_line_end() {
        assert_eq!(shown(Surface::File, &[said("x\n")]), "x\n");
        assert_eq!(shown(Surface::File, &[]), "");
    }

    #[test]
    fn an_interrupt_ends_the_answer_or_the_conversation_or_else_the_program() {
        let (sender, receiver) = mpsc::channel();
        let interrupts = Interrupts::default();
        assert!(
            !interrupts.take(&sender),
            "nothing goes on yet that could be ended alone"
        );
        interrupts.answer_begins();
        assert!(interrupts.take(&sender) && interrupts.asked());
        assert!(!interrupts.take(&sender), "the second is not waited for");
        interrupts.answer_ends();
        assert_eq!(receiver.try_recv().ok(), None);
        interrupts.listening.store(true, Ordering::SeqCst);
        assert!(interrupts.take(&sender));
        assert_eq!(interrupts.listen(&receiver), Input::Interrupt);
        assert!(!interrupts.take(&sender), "nobody listens any more");
        interrupts.answer_begins();
        assert!(
            !interrupts.asked(),
            "what ended one answer leaves the next alone"
        );
    }
}
