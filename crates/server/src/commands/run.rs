//! `hearth run`: a reply to one prompt, or a conversation on the terminal.

use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use chat::ChatError;
use chat::conversation::{Message, Role};
use chat::reply::FinishReason;
use decode::SubmitError;
use model::CardSampling;

use crate::cli::RunArgs;
use crate::commands::all_causes;
use crate::commands::generate::{ReplyGenerator, ReplyOptions, TimedReply};
use crate::commands::terminal::{self, Interrupts, MessageEditor, Screen, Surface};
use crate::config;
use crate::config::card::{self, GenerationFlags};
use crate::config::server::is_on;
use crate::error::ApiError;
use crate::open::bundled::{BUNDLED_NOTE, Bundled};
use crate::open::by_name;
use crate::open::drafting::Drafting;
use crate::open::model_path::is_remote;
use crate::open::{self, MemoryRequest};

pub(super) fn run(mut args: RunArgs, bundled: Bundled, no_color: bool) -> anyhow::Result<()> {
    let (path, prompt) = model_and_prompt(&args);
    let file = |path: &PathBuf| by_name::pulled(path, &|_| {});
    let path = path.as_ref().map(file).transpose()?;
    args.draft.draft = args.draft.draft.as_ref().map(file).transpose()?;
    let args = &args;
    let prompt = match prompt {
        Some(prompt) => Some(prompt),
        None if io::stdin().is_terminal() => None,
        None => Some(prompt_from_stdin()?),
    };
    let mut session = open_session(args, path.as_deref(), bundled, no_color)?;
    match prompt {
        Some(prompt) => session.reply_once(prompt),
        None => {
            let mut editor = MessageEditor::open()?;
            session.converse(&mut || editor.next_message())
        }
    }
}

/// The model's file or name, and the prompt, from flags and words.
fn model_and_prompt(args: &RunArgs) -> (Option<PathBuf>, Option<String>) {
    let (path, prompt) = match (&args.model, &args.prompt) {
        (None, None) => return split_words(&args.words),
        (Some(model), None) => (Some(model.clone()), None),
        (None, Some(prompt)) => (args.words.first().map(PathBuf::from), Some(prompt.clone())),
        (Some(model), Some(prompt)) => (Some(model.clone()), Some(prompt.clone())),
    };
    let path = path.map(|path| match &args.hf_file {
        Some(file) => config::hub::named_file(&path, file),
        None => path,
    });
    let words = || (!args.words.is_empty()).then(|| args.words.join(" "));
    (path, prompt.or_else(words))
}

/// The model's file and the prompt among the words of the command line.
fn split_words(words: &[String]) -> (Option<PathBuf>, Option<String>) {
    match words {
        [] => (None, None),
        [one] => {
            let path = Path::new(one);
            let is_model = path
                .extension()
                .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
            if is_model || path.is_file() || is_remote(one) {
                (Some(path.to_owned()), None)
            } else {
                (None, Some(one.clone()))
            }
        }
        [model, rest @ ..] => (Some(PathBuf::from(model)), Some(rest.join(" "))),
    }
}

fn prompt_from_stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    io::stdin()
        .lock()
        .read_to_string(&mut text)
        .context("cannot read the prompt from standard input")?;
    let text = text.trim();
    if text.is_empty() {
        bail!("standard input holds no prompt; give one as the last argument");
    }
    Ok(text.to_owned())
}

fn open_session(
    args: &RunArgs,
    path: Option<&Path>,
    bundled: Bundled,
    no_color: bool,
) -> anyhow::Result<ChatSession<io::Stdout>> {
    let interrupts = terminal::watch_interrupts()?;
    let loaded = open::load_or(path, bundled)?;
    if path.is_none() {
        tracing::warn!("{BUNDLED_NOTE}");
    }
    let info = &loaded.info;
    let found = card::find(
        &info.name,
        &info.architecture,
        args.model_cards_dir.as_deref(),
    );
    let flags = GenerationFlags {
        sampling: CardSampling {
            top_p: args.top_p,
            top_k: args.top_k,
            min_p: args.min_p,
            ..CardSampling::default()
        },
        ..GenerationFlags::default()
    };
    let (defaults, _) = card::generation_defaults(flags, &found, &loaded.card.sampling);
    let model = open::text_side(&loaded, path, args.chat_template_file.as_deref(), defaults)?;
    let backend = open::device(&args.device)?;
    let beside = path.is_none().then_some(bundled);
    let mut drafting = Drafting::of(&args.draft, &args.device, &loaded, beside)?;
    let request = MemoryRequest {
        sequences: 1,
        context: None,
        tree_nodes: drafting.tree_nodes(),
    };
    let fitted = open::fit_drafting(
        backend.as_ref(),
        &loaded,
        &args.device,
        (request, &mut drafting),
    )?;
    let (runner, speculation) = drafting.open(backend.as_ref(), fitted.config, &mut |_| {})?;
    let options = ReplyOptions {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        seed: args.seed,
        thinking: args.thinking.map(is_on),
    };
    let system = args
        .system
        .iter()
        .map(|text| Message::new(Role::System, text.as_str()));
    let surface = match (io::stdout().is_terminal(), no_color) {
        (false, _) => Surface::File,
        (true, true) => Surface::PlainTerminal,
        (true, false) => Surface::Terminal,
    };
    Ok(ChatSession {
        generator: ReplyGenerator::new(runner, model, options, speculation),
        history: system.collect(),
        screen: Screen::new(io::stdout(), surface),
        interrupts,
    })
}

/// A conversation on the terminal.
struct ChatSession<W: Write> {
    generator: ReplyGenerator,
    /// All messages so far.
    history: Vec<Message>,
    screen: Screen<W>,
    interrupts: Arc<Interrupts>,
}

impl<W: Write> ChatSession<W> {
    /// Replies to one prompt.
    fn reply_once(&mut self, prompt: String) -> anyhow::Result<()> {
        self.history.push(Message::new(Role::User, prompt));
        let reply = self.reply()?;
        writeln!(io::stderr(), "{}", timing_line(&reply))?;
        Ok(())
    }

    /// Replies to each message until `next` has no more.
    fn converse(
        &mut self,
        next: &mut dyn FnMut() -> anyhow::Result<Option<String>>,
    ) -> anyhow::Result<()> {
        while let Some(text) = next()? {
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
                // The message was refused before it ran, so the conversation continues without it.
                Err(error) if is_refusal(&error) => {
                    self.history.truncate(before);
                    writeln!(io::stderr(), "error: {}", all_causes(&error))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Generates a reply to the history, shows it, and ends early at an interrupt.
    fn reply(&mut self) -> anyhow::Result<TimedReply> {
        let ChatSession {
            generator,
            history,
            screen,
            interrupts,
            ..
        } = self;
        interrupts.reply_begins();
        let reply = generator.generate(history, &mut |piece| screen.show(piece), &|| {
            interrupts.is_cancelled()
        });
        interrupts.reply_ends();
        screen.end()?;
        reply
    }
}

/// Whether the conversation was refused, rather than the device failing.
fn is_refusal(error: &anyhow::Error) -> bool {
    error.is::<ApiError>() || error.is::<ChatError>() || error.is::<SubmitError>()
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

    fn check(given: &[&str], model: Option<&str>, prompt: Option<&str>) {
        let given: Vec<String> = given.iter().map(|word| (*word).to_owned()).collect();
        let expected = (model.map(PathBuf::from), prompt.map(str::to_owned));
        assert_eq!(split_words(&given), expected);
    }

    #[test]
    fn single_word_is_a_model_if_it_names_a_file_or_a_repository() {
        check(&[], None, None);
        check(&["not there.gguf"], Some("not there.gguf"), None);
        check(&["X.GGUF"], Some("X.GGUF"), None);
        check(
            &["Why is the sky blue?"],
            None,
            Some("Why is the sky blue?"),
        );
        check(&["model", "a prompt"], Some("model"), Some("a prompt"));
        check(&["Qwen/Qwen3-8B-GGUF"], Some("Qwen/Qwen3-8B-GGUF"), None);
        check(&["and/or"], None, Some("and/or"));
    }

    fn conversation(lines: &[&str]) -> (Vec<Message>, String) {
        let mut lines = lines.iter().map(|line| (*line).to_owned());
        let options = ReplyOptions {
            max_tokens: Some(4),
            ..ReplyOptions::default()
        };
        let mut shown = Vec::new();
        let mut session = ChatSession {
            generator: crate::commands::generate::tests::generator(options),
            history: vec![Message::new(Role::System, "Be brief.")],
            screen: Screen::new(&mut shown, Surface::File),
            interrupts: Arc::new(Interrupts::default()),
        };
        session.converse(&mut || Ok(lines.next())).unwrap();
        let history = session.history;
        (history, String::from_utf8(shown).unwrap())
    }

    #[test]
    fn conversation_keeps_its_history() {
        let (history, shown) = conversation(&["Hello", "And you?"]);
        let roles: Vec<Role> = history.iter().map(|message| message.role).collect();
        use Role::{Assistant, System, User};
        assert_eq!(roles, [System, User, Assistant, User, Assistant]);
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
