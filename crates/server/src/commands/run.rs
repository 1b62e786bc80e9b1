//! `hearth run`: a prompt answered on the terminal, or a conversation.

use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use anyhow::{Context, bail};
use chat::ChatError;
use chat::conversation::{Message, Role};
use chat::reply::FinishReason;
use decode::SubmitError;

use crate::cli::RunArgs;
use crate::commands::all_causes;
use crate::commands::answer::{Answer, Answerer, Wanted};
use crate::commands::terminal::{self, Input, Interrupts, Screen, Surface};
use crate::config::card::{self, GenerationFlags};
use crate::config::server::is_on;
use crate::error::ApiError;
use crate::open::bundled::{BUNDLED_NOTE, Bundled};
use crate::open::drafting::Drafting;
use crate::open::{self, MemoryRequest};

pub(super) fn run(args: &RunArgs, bundled: Bundled, no_color: bool) -> anyhow::Result<()> {
    let (path, prompt) = words(&args.words);
    let prompt = match prompt {
        Some(prompt) => Some(prompt),
        None if io::stdin().is_terminal() => None,
        None => Some(prompt_from_stdin()?),
    };
    let mut speaker = speaker(args, path.as_deref(), bundled, no_color)?;
    match prompt {
        Some(prompt) => speaker.one(prompt),
        None => {
            terminal::read_lines(speaker.sender.clone())?;
            speaker.converse()
        }
    }
}

/// Which of the words is the model's file and which the prompt.
fn words(words: &[String]) -> (Option<PathBuf>, Option<String>) {
    match words {
        [] => (None, None),
        [one] => {
            let path = Path::new(one);
            let is_model = path
                .extension()
                .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
            if is_model || path.is_file() {
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
        bail!("standard input holds no prompt; give one as the last word");
    }
    Ok(text.to_owned())
}

fn speaker(
    args: &RunArgs,
    path: Option<&Path>,
    bundled: Bundled,
    no_color: bool,
) -> anyhow::Result<Speaker<io::Stdout>> {
    let (interrupts, sender, inputs) = terminal::watch_interrupts()?;
    let loaded = open::load_or(path, bundled)?;
    if path.is_none() {
        tracing::warn!("{BUNDLED_NOTE}");
    }
    let facts = &loaded.facts;
    let found = card::find(
        &facts.name,
        &facts.architecture,
        args.model_cards_dir.as_deref(),
    );
    let (defaults, _) = card::generation_defaults(GenerationFlags::default(), &found);
    let model = open::text_side(&loaded, path, args.chat_template_file.as_deref(), defaults)?;
    let backend = open::device(&args.device)?;
    let beside = path.is_none().then_some(bundled);
    let drafting = Drafting::of(&args.draft, &args.device, &loaded, beside)?;
    let request = MemoryRequest {
        sequences: 1,
        context: None,
        tree_nodes: drafting.tree_nodes(),
    };
    let fitted = open::fit_with_draft(
        backend.as_ref(),
        &loaded,
        &args.device,
        (request, &drafting),
    )?;
    let (runner, speculation) = drafting.open(backend.as_ref(), fitted.plan, &mut |_| {})?;
    let wanted = Wanted {
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
    Ok(Speaker {
        answerer: Answerer::new(runner, model, wanted, speculation),
        history: system.collect(),
        screen: Screen::new(io::stdout(), surface),
        interrupts,
        sender,
        inputs,
    })
}

/// A conversation on the terminal.
struct Speaker<W: Write> {
    answerer: Answerer,
    /// All messages so far.
    history: Vec<Message>,
    screen: Screen<W>,
    interrupts: Arc<Interrupts>,
    sender: Sender<Input>,
    inputs: Receiver<Input>,
}

impl<W: Write> Speaker<W> {
    /// Answers one prompt.
    fn one(&mut self, prompt: String) -> anyhow::Result<()> {
        self.history.push(Message::new(Role::User, prompt));
        let answer = self.answer()?;
        writeln!(io::stderr(), "{}", figures(&answer))?;
        Ok(())
    }

    /// Answers line by line until an empty one, the end of input, or an interrupt between answers.
    fn converse(&mut self) -> anyhow::Result<()> {
        loop {
            write!(io::stderr(), "> ")?;
            let Input::Line(line) = self.interrupts.listen(&self.inputs) else {
                break;
            };
            if line.trim().is_empty() {
                break;
            }
            let before = self.history.len();
            self.history.push(Message::new(Role::User, line));
            match self.answer() {
                Ok(answer) => {
                    writeln!(io::stderr(), "{}", figures(&answer))?;
                    let mut message = Message::new(Role::Assistant, answer.reply.content);
                    message.reasoning =
                        Some(answer.reply.reasoning).filter(|thinking| !thinking.is_empty());
                    self.history.push(message);
                }
                // Refused before anything ran, so the conversation can go on from where it was.
                Err(error) if is_refusal(&error) => {
                    self.history.truncate(before);
                    writeln!(io::stderr(), "error: {}", all_causes(&error))?;
                }
                Err(error) => return Err(error),
            }
        }
        writeln!(io::stderr())?;
        Ok(())
    }

    fn answer(&mut self) -> anyhow::Result<Answer> {
        let Speaker {
            answerer,
            history,
            screen,
            interrupts,
            ..
        } = self;
        interrupts.answer_begins();
        let answer = answerer.answer(history, &mut |piece| screen.show(piece), &|| {
            interrupts.asked()
        });
        interrupts.answer_ends();
        screen.end()?;
        answer
    }
}

/// Whether the conversation itself was at fault.
fn is_refusal(error: &anyhow::Error) -> bool {
    error.is::<ApiError>() || error.is::<ChatError>() || error.is::<SubmitError>()
}

/// How fast it went.
fn figures(answer: &Answer) -> String {
    let (prompt, until_first) = answer.prompt;
    let (generated, took) = answer.generated;
    let end = match answer.ended {
        None => ", cut off",
        Some(FinishReason::Length) => ", ended by the limit",
        Some(_) => "",
    };
    format!(
        "[{prompt} prompt tokens{}; {} tokens{}{end}]",
        rate(prompt, until_first),
        // The first token came with the prompt.
        generated + usize::from(!until_first.is_zero()),
        rate(generated, took)
    )
}

/// `count` per second, or nothing where that says nothing.
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
        assert_eq!(words(&given), expected);
    }

    #[test]
    fn a_single_word_is_a_model_only_if_it_looks_like_one() {
        check(&[], None, None);
        check(&["not there.gguf"], Some("not there.gguf"), None);
        check(&["X.GGUF"], Some("X.GGUF"), None);
        check(
            &["Why is the sky blue?"],
            None,
            Some("Why is the sky blue?"),
        );
        check(&["model", "a prompt"], Some("model"), Some("a prompt"));
    }

    fn conversation(lines: &[&str]) -> (Vec<Message>, String) {
        let (sender, inputs) = std::sync::mpsc::channel();
        for line in lines {
            sender.send(Input::Line((*line).to_owned())).unwrap();
        }
        sender.send(Input::End).unwrap();
        let wanted = Wanted {
            max_tokens: Some(4),
            ..Wanted::default()
        };
        let mut shown = Vec::new();
        let mut speaker = Speaker {
            answerer: crate::commands::answer::tests::answerer(wanted),
            history: vec![Message::new(Role::System, "Be brief.")],
            screen: Screen::new(&mut shown, Surface::File),
            interrupts: Arc::new(Interrupts::default()),
            sender,
            inputs,
        };
        speaker.converse().unwrap();
        let history = speaker.history;
        (history, String::from_utf8(shown).unwrap())
    }

    #[test]
    fn a_conversation_keeps_its_history_until_an_empty_line() {
        let (history, shown) = conversation(&["Hello", "And you?", "", "not read"]);
        let roles: Vec<Role> = history.iter().map(|message| message.role).collect();
        use Role::{Assistant, System, User};
        assert_eq!(roles, [System, User, Assistant, User, Assistant]);
        assert_eq!(history[3].content, "And you?");
        for answer in [&history[2], &history[4]] {
            assert!(shown.contains(&answer.content), "{answer:?} in {shown}");
        }
    }

    #[test]
    fn a_line_that_does_not_fit_is_refused_and_the_conversation_goes_on() {
        let (history, _) = conversation(&["Hello", &"word ".repeat(400), "again"]);
        let asked: Vec<&str> = history
            .iter()
            .filter(|message| message.role == Role::User)
            .map(|message| message.content.as_str())
            .collect();
        assert_eq!(asked, ["Hello", "again"]);
    }

    #[test]
    fn figures_tell_both_rates_and_how_it_ended() {
        let answer = |ended, generated, millis| Answer {
            reply: chat::reply::Reply::default(),
            ended,
            prompt: (20, Duration::from_millis(100)),
            generated: (generated, Duration::from_millis(millis)),
        };
        assert_eq!(
            figures(&answer(Some(FinishReason::Length), 9, 3000)),
            "[20 prompt tokens, 200.0 tokens/s; 10 tokens, 3.0 tokens/s, ended by the limit]"
        );
        assert_eq!(
            figures(&answer(None, 0, 0)),
            "[20 prompt tokens, 200.0 tokens/s; 1 tokens, cut off]"
        );
    }
}
