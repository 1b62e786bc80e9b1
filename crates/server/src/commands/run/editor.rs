//! The line where messages are typed: editing, history, completion, and messages of several lines.

use std::borrow::Cow;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::Context as _;
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, CompletionType, Config, Context, Editor, Helper};

use super::slash;
use crate::commands::terminal;

/// Messages that are kept.
const HISTORY_LENGTH: usize = 1000;
/// Begins and ends a message of several typed lines.
const BLOCK: &str = "\"\"\"";

/// The line where messages are typed, on the terminal also if the replies go to a file.
///
/// A pasted text of several lines is one message: the terminal marks its start and end.
pub(super) struct MessageEditor {
    editor: Editor<ChatHelper, FileHistory>,
    /// The file of earlier messages, if they are kept.
    history: Option<PathBuf>,
}

impl MessageEditor {
    /// An editor on the terminal of this process, with the messages of earlier conversations.
    pub(super) fn open(history: Option<PathBuf>) -> anyhow::Result<MessageEditor> {
        terminal::remember_settings();
        let config = Config::builder()
            .behavior(Behavior::PreferTerm)
            .completion_type(CompletionType::List)
            .max_history_size(HISTORY_LENGTH)
            .context("cannot keep messages")?
            .build();
        let mut editor = Editor::with_config(config).context("cannot use the terminal")?;
        editor.set_helper(Some(ChatHelper {
            files: FilenameCompleter::new(),
        }));
        let history = history.filter(|file| {
            let folder = file.parent().map(|folder| {
                let mut builder = fs::DirBuilder::new();
                builder.recursive(true).mode(0o700).create(folder)
            });
            folder.is_some_and(|made| made.is_ok())
        });
        if let Some(file) = &history {
            // There is no file before the first message.
            let _ = editor.load_history(file);
        }
        Ok(MessageEditor { editor, history })
    }

    /// The next message that is not blank; `None` at the end of the input or ctrl-C.
    pub(super) fn next_message(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            match self.editor.readline("> ") {
                Ok(text) if text.trim().is_empty() => {}
                Ok(text) => {
                    self.editor.add_history_entry(text.as_str())?;
                    if let Some(file) = &self.history
                        && let Err(error) = self.editor.append_history(file)
                    {
                        tracing::debug!(%error, "the message is not kept");
                    }
                    return Ok(Some(unwrapped(&text).into_owned()));
                }
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(None),
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
        }
    }
}

/// Whether more lines belong to a message.
fn is_open(text: &str) -> bool {
    match text.trim_start().strip_prefix(BLOCK) {
        Some(rest) => !rest.contains(BLOCK),
        None => ends_with_backslash(text),
    }
}

fn ends_with_backslash(line: &str) -> bool {
    let backslashes = line.bytes().rev().take_while(|byte| *byte == b'\\').count();
    backslashes % 2 == 1
}

/// The message without the marks that continued it.
fn unwrapped(text: &str) -> Cow<'_, str> {
    if let Some((inside, after)) = text
        .trim_start()
        .strip_prefix(BLOCK)
        .and_then(|rest| rest.split_once(BLOCK))
    {
        return Cow::Owned(format!("{inside}{after}").trim_matches('\n').to_owned());
    }
    if !text.contains("\\\n") {
        return Cow::Borrowed(text);
    }
    let lines = text.split('\n').map(|line| match line.strip_suffix('\\') {
        Some(start) if ends_with_backslash(line) => start,
        _ => line,
    });
    Cow::Owned(lines.collect::<Vec<&str>>().join("\n"))
}

/// What the editor knows of commands and messages.
struct ChatHelper {
    files: FilenameCompleter,
}

impl Helper for ChatHelper {}
impl Highlighter for ChatHelper {}

impl Hinter for ChatHelper {
    type Hint = String;
}

impl Validator for ChatHelper {
    fn validate(&self, typed: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if is_open(typed.input()) {
            ValidationResult::Incomplete
        } else {
            ValidationResult::Valid(None)
        })
    }
}

impl Completer for ChatHelper {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = &line[..at];
        if ["/save ", "/load "]
            .iter()
            .any(|start| typed.starts_with(start))
        {
            return self.files.complete_path(line, at);
        }
        Ok(words(typed))
    }
}

/// The commands and names that continue a line, and where they begin in it.
fn words(typed: &str) -> (usize, Vec<Pair>) {
    let pairs = |names: &mut dyn Iterator<Item = &'static str>, start: &str| {
        let fitting = names.filter(|name| name.starts_with(start));
        fitting
            .map(|name| Pair {
                display: name.to_owned(),
                replacement: format!("{name} "),
            })
            .collect()
    };
    if let Some(start) = typed.strip_prefix("/set ") {
        let names = pairs(&mut slash::OPTIONS.into_iter(), start);
        return (typed.len() - start.len(), names);
    }
    if !typed.starts_with('/') || typed.contains(char::is_whitespace) {
        return (typed.len(), Vec::new());
    }
    let mut names = slash::COMMANDS.into_iter().map(|(name, ..)| name);
    (0, pairs(&mut names, typed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_continue_after_backslashes_and_within_quotation_marks() {
        for (text, open, message) in [
            ("one", false, "one"),
            ("one\\", true, "one\\"),
            ("one\\\ntwo", false, "one\ntwo"),
            ("a path\\\\", false, "a path\\\\"),
            ("\"\"\"one", true, "\"\"\"one"),
            ("\"\"\"\none\n\ntwo\n\"\"\"", false, "one\n\ntwo"),
            ("\"\"\"one\"\"\"", false, "one"),
            ("say \"\"\"x", false, "say \"\"\"x"),
        ] {
            assert_eq!(is_open(text), open, "{text:?}");
            assert_eq!(unwrapped(text), message, "{text:?}");
        }
    }

    #[test]
    fn commands_and_options_are_completed() {
        let names = |typed: &str| {
            let (start, pairs) = words(typed);
            let names: Vec<String> = pairs.into_iter().map(|pair| pair.display).collect();
            (start, names.join(" "))
        };
        assert_eq!(names("/s"), (0, "/system /set /save".to_owned()));
        assert_eq!(names("/set te"), (5, "temperature".to_owned()));
        assert_eq!(names("hello /s"), (8, String::new()));
    }
}
