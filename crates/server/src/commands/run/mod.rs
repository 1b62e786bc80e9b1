//! `hearth run`: a reply to one prompt, or a conversation on the terminal.

mod editor;
mod served;
mod session;
mod slash;
mod transcript;

use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use chat::conversation::{Message, Role};

use crate::cli::RunArgs;
use crate::commands::generate::{ReplyGenerator, ReplyOptions};
use crate::commands::terminal::{self, Screen, Surface};
use crate::config;
use crate::config::card::{self, GenerationFlags};
use crate::config::server::is_on;
use crate::open::bundled::{BUNDLED_NOTE, Bundled};
use crate::open::by_name;
use crate::open::drafting::Drafting;
use crate::open::measured::MeasuredOnce;
use crate::open::model_path::is_remote;
use crate::open::{self, MemoryRequest};
use editor::MessageEditor;
use session::{ChatModel, ChatSession};

pub(super) fn run(mut args: RunArgs, bundled: Bundled, no_color: bool) -> anyhow::Result<()> {
    let (path, prompt) = model_and_prompt(&args);
    let prompt = match prompt {
        Some(prompt) => Some(prompt),
        None if io::stdin().is_terminal() => None,
        None => Some(prompt_from_stdin()?),
    };
    let interrupts = terminal::watch_interrupts()?;
    let served = if args.local || args.is_local {
        None
    } else {
        served::find(&args, path.as_deref())?
    };
    let (model, name) = match served {
        Some(model) => {
            let (base, id) = (model.base(), model.id.clone());
            tracing::info!("using {id} of the server at {base}; --local loads a model here");
            (ChatModel::Served(model), id)
        }
        None => {
            let file = |path: &PathBuf| by_name::pulled(path, &|_| {});
            let path = path.as_ref().map(file).transpose()?;
            args.draft.draft = args.draft.draft.as_ref().map(file).transpose()?;
            let (generator, name) = open_here(&args, path.as_deref(), bundled)?;
            (ChatModel::Here(Box::new(generator)), name)
        }
    };
    let system = args.system.iter();
    let mut session = ChatSession {
        model,
        name,
        options: options(&args),
        history: system
            .map(|text| Message::new(Role::System, text.as_str()))
            .collect(),
        screen: Screen::new(io::stdout(), surface(no_color)),
        interrupts,
    };
    match prompt {
        Some(prompt) => session.reply_once(prompt),
        None => {
            let state = config::directories::state().filter(|_| !args.no_history);
            let history = state.map(|folder| folder.join("messages"));
            let mut editor = MessageEditor::open(history)?;
            writeln!(io::stderr(), "{}: /help lists the commands", session.name)?;
            session.converse(&mut || editor.next_message())
        }
    }
}

fn options(args: &RunArgs) -> ReplyOptions {
    ReplyOptions {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        min_p: args.min_p,
        seed: args.seed,
        thinking: args.thinking.map(is_on),
    }
}

fn surface(no_color: bool) -> Surface {
    match (io::stdout().is_terminal(), no_color) {
        (false, _) => Surface::File,
        (true, true) => Surface::PlainTerminal,
        (true, false) => Surface::Terminal,
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

/// Loads the model in this process; returns it with its name.
fn open_here(
    args: &RunArgs,
    path: Option<&Path>,
    bundled: Bundled,
) -> anyhow::Result<(ReplyGenerator, String)> {
    let loaded = open::load_or(path, bundled)?;
    if path.is_none() {
        tracing::warn!("{BUNDLED_NOTE}");
    }
    let info = &loaded.info;
    let found = card::find(info, args.model_cards_dir.as_deref());
    let flags = GenerationFlags::default();
    let (defaults, _) = card::generation_defaults(flags, &found, &loaded.card.sampling);
    let model = open::text_side(&loaded, path, args.chat_template_file.as_deref(), defaults)?;
    let backend = open::device_with_draft(&args.device, args.draft.draft_device.as_deref())?;
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
    let first = MeasuredOnce::default();
    let opened = drafting.open(backend.as_ref(), fitted.config, &mut |_| {}, &first)?;
    let generator = ReplyGenerator::new(opened.runner, model, opened.speculation);
    Ok((generator, info.name.clone()))
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
}
