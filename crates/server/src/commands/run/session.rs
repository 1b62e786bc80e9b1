//! A conversation on the terminal: messages, commands, and the replies of a model here or on a
//! server.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chat::ChatError;
use chat::conversation::{Message, Role};
use chat::reply::{FinishReason, ReplyDelta};
use decode::SubmitError;

use super::served::{ServedError, ServedModel};
use super::slash::{self, SlashCommand};
use super::transcript;
use crate::commands::all_causes;
use crate::commands::generate::{ReplyGenerator, ReplyOptions, TimedReply};
use crate::commands::terminal::{Interrupts, Screen};
use crate::error::ApiError;

/// What replies.
pub(super) enum ChatModel {
    /// A model that this process has loaded.
    Here(Box<ReplyGenerator>),
    /// A model of a running server.
    Served(ServedModel),
}

impl ChatModel {
    fn reply(
        &mut self,
        history: &[Message],
        options: &ReplyOptions,
        on_delta: &mut dyn FnMut(&ReplyDelta) -> io::Result<()>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> anyhow::Result<TimedReply> {
        match self {
            ChatModel::Here(generator) => {
                generator.generate(history, options, on_delta, is_cancelled)
            }
            ChatModel::Served(model) => model.reply(history, options, on_delta, is_cancelled),
        }
    }
}

/// A conversation on the terminal.
pub(super) struct ChatSession<W: Write> {
    pub(super) model: ChatModel,
    /// The model's name, for saved conversations.
    pub(super) name: String,
    pub(super) options: ReplyOptions,
    /// All messages so far; a system message is the first.
    pub(super) history: Vec<Message>,
    pub(super) screen: Screen<W>,
    pub(super) interrupts: Arc<Interrupts>,
}

impl<W: Write> ChatSession<W> {
    /// Replies to one prompt.
    pub(super) fn reply_once(&mut self, prompt: String) -> anyhow::Result<()> {
        self.history.push(Message::new(Role::User, prompt));
        let reply = self.reply()?;
        writeln!(io::stderr(), "{}", timing_line(&reply))?;
        Ok(())
    }

    /// Replies to each message until `next` has no more or a command ends the conversation.
    pub(super) fn converse(
        &mut self,
        next: &mut dyn FnMut() -> anyhow::Result<Option<String>>,
    ) -> anyhow::Result<()> {
        while let Some(text) = next()? {
            match slash::parse(&text) {
                None => self.exchange(text)?,
                Some(Ok(SlashCommand::Bye)) => break,
                Some(command) => {
                    let answer = command
                        .map_err(anyhow::Error::from)
                        .and_then(|command| self.obey(command));
                    match answer {
                        Ok(answer) => write!(io::stderr(), "{answer}")?,
                        Err(error) => writeln!(io::stderr(), "error: {}", all_causes(&error))?,
                    }
                }
            }
        }
        Ok(())
    }

    /// One message and its reply.
    fn exchange(&mut self, text: String) -> anyhow::Result<()> {
        let before = self.history.len();
        self.history.push(Message::new(Role::User, text));
        match self.reply() {
            Ok(timed) => {
                writeln!(io::stderr(), "{}", timing_line(&timed))?;
                let mut message = Message::new(Role::Assistant, timed.reply.content);
                message.reasoning =
                    Some(timed.reply.reasoning).filter(|reasoning| !reasoning.is_empty());
                self.history.push(message);
            }
            // The message was refused, or its server broke off, so the conversation continues
            // without it.
            Err(error) if is_refusal(&error) => {
                self.history.truncate(before);
                writeln!(io::stderr(), "error: {}", all_causes(&error))?;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Executes a command; returns what to show, in whole lines.
    fn obey(&mut self, command: SlashCommand) -> anyhow::Result<String> {
        Ok(match command {
            SlashCommand::Help => slash::help(),
            SlashCommand::Clear => {
                self.history.retain(|message| message.role == Role::System);
                "a new conversation\n".to_owned()
            }
            SlashCommand::System(None) => match self.system() {
                Some(text) => format!("{text}\n"),
                None => "no system message\n".to_owned(),
            },
            SlashCommand::System(Some(text)) => {
                self.history.retain(|message| message.role != Role::System);
                if text.is_empty() {
                    "no system message from now on\n".to_owned()
                } else {
                    self.history.insert(0, Message::new(Role::System, text));
                    "the system message is set\n".to_owned()
                }
            }
            SlashCommand::Set(None) => slash::shown(&self.options),
            SlashCommand::Set(Some((name, value))) => {
                slash::set(&mut self.options, &name, &value)?;
                String::new()
            }
            SlashCommand::Save(path) => {
                transcript::save(&path, &self.name, &self.history)?;
                counted("saved", &path, self.history.len())
            }
            SlashCommand::Load(path) => {
                self.history = transcript::load(&path)?;
                counted("loaded", &path, self.history.len())
            }
            SlashCommand::Bye => String::new(),
        })
    }

    fn system(&self) -> Option<&str> {
        let first = self.history.first()?;
        (first.role == Role::System).then_some(first.content.as_str())
    }

    /// Generates a reply to the history, shows it, and ends early at an interrupt.
    fn reply(&mut self) -> anyhow::Result<TimedReply> {
        let ChatSession {
            model,
            options,
            history,
            screen,
            interrupts,
            ..
        } = self;
        interrupts.reply_begins();
        let reply = model.reply(history, options, &mut |piece| screen.show(piece), &|| {
            interrupts.is_cancelled()
        });
        interrupts.reply_ends();
        screen.end()?;
        reply
    }
}

fn counted(done: &str, path: &Path, messages: usize) -> String {
    let plural = if messages == 1 { "" } else { "s" };
    format!("{done} {messages} message{plural}: {}\n", path.display())
}

/// Whether the conversation can go on: the message was refused, or a server broke off.
fn is_refusal(error: &anyhow::Error) -> bool {
    error.is::<ApiError>()
        || error.is::<ChatError>()
        || error.is::<SubmitError>()
        || error.is::<ServedError>()
}

/// Token counts and rates of a reply.
fn timing_line(reply: &TimedReply) -> String {
    let (prompt, until_first) = reply.prompt;
    let (generated, took) = reply.generated;
    let end = match reply.finish {
        None => ", cut off",
        Some(FinishReason::Length) => ", ended by the limit",
        Some(_) => "",
    };
    format!(
        "[{prompt} prompt tokens{}; {} tokens{}{end}]",
        rate(prompt, until_first),
        // Prefill produced the first token.
        generated + usize::from(!until_first.is_zero()),
        rate(generated, took)
    )
}

/// Tokens per second, or nothing if there is no time or no token.
fn rate(count: usize, took: Duration) -> String {
    if count == 0 || took.is_zero() {
        return String::new();
    }
    format!(", {:.1} tokens/s", count as f64 / took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::terminal::Surface;

    fn conversation(lines: &[&str]) -> (Vec<Message>, String) {
        let mut lines = lines.iter().map(|line| (*line).to_owned());
        let mut shown = Vec::new();
        let mut session = ChatSession {
            model: ChatModel::Here(Box::new(crate::commands::generate::tests::generator())),
            name: "tiny".to_owned(),
            options: ReplyOptions {
                max_tokens: Some(4),
                ..ReplyOptions::default()
            },
            history: vec![Message::new(Role::System, "Be brief.")],
            screen: Screen::new(&mut shown, Surface::File),
            interrupts: Arc::new(Interrupts::default()),
        };
        session.converse(&mut || Ok(lines.next())).unwrap();
        let history = session.history;
        (history, String::from_utf8(shown).unwrap())
    }

    fn roles(history: &[Message]) -> Vec<Role> {
        history.iter().map(|message| message.role).collect()
    }

    #[test]
    fn conversation_keeps_its_history() {
        let (history, shown) = conversation(&["Hello", "And you?"]);
        use Role::{Assistant, System, User};
        assert_eq!(roles(&history), [System, User, Assistant, User, Assistant]);
        assert_eq!(history[3].content, "And you?");
        for reply in [&history[2], &history[4]] {
            assert!(shown.contains(&reply.content), "{reply:?} in {shown}");
        }
    }

    #[test]
    fn line_beyond_the_context_is_refused_and_the_conversation_continues() {
        let (history, _) = conversation(&["Hello", &"word ".repeat(400), "again"]);
        let user: Vec<&str> = history
            .iter()
            .filter(|message| message.role == Role::User)
            .map(|message| message.content.as_str())
            .collect();
        assert_eq!(user, ["Hello", "again"]);
    }

    #[test]
    fn commands_change_the_conversation_and_are_no_messages() {
        use Role::{Assistant, System, User};
        let (history, _) = conversation(&["Hello", "/clear", "/help", "/set", "Hi", "/bye", "no"]);
        assert_eq!(roles(&history), [System, User, Assistant]);
        assert_eq!(history[1].content, "Hi");
        let (history, _) =
            conversation(&["/system Be kind.", "/system", "/nonsense", "/set seed x"]);
        assert_eq!(roles(&history), [System]);
        assert_eq!(history[0].content, "Be kind.");
        let (history, _) = conversation(&["/system -", "Hello"]);
        assert_eq!(roles(&history), [User, Assistant]);
    }

    #[test]
    fn saved_conversation_continues_after_it_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("chat.json");
        let file = file.to_str().unwrap();
        let (saved, _) = conversation(&["Hello", &format!("/save {file}")]);
        let (loaded, _) = conversation(&["/set max_tokens 2", &format!("/load {file}"), "More"]);
        assert_eq!(format!("{:?}", &loaded[..3]), format!("{saved:?}"));
        assert_eq!(loaded.len(), 5);
    }

    #[test]
    fn timing_line_has_both_rates_and_the_finish_reason() {
        let reply = |finish, generated, millis| TimedReply {
            reply: chat::reply::Reply::default(),
            finish,
            prompt: (20, Duration::from_millis(100)),
            generated: (generated, Duration::from_millis(millis)),
        };
        assert_eq!(
            timing_line(&reply(Some(FinishReason::Length), 9, 3000)),
            "[20 prompt tokens, 200.0 tokens/s; 10 tokens, 3.0 tokens/s, ended by the limit]"
        );
        assert_eq!(
            timing_line(&reply(None, 0, 0)),
            "[20 prompt tokens, 200.0 tokens/s; 1 tokens, cut off]"
        );
    }
}
