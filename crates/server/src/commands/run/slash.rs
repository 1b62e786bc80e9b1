//! Commands of a conversation, which begin with a slash, and the options that `/set` changes.

use std::path::PathBuf;
use std::str::FromStr;

use strsim::levenshtein;

use crate::commands::generate::ReplyOptions;
use crate::config::tilde::expanded;

/// The commands with their help.
pub(super) const COMMANDS: [(&str, &str, &str); 7] = [
    ("/help", "", "shows this"),
    (
        "/clear",
        "",
        "begins a new conversation; the system message stays",
    ),
    (
        "/system",
        "[TEXT]",
        "shows or sets the system message; `/system -` removes it",
    ),
    (
        "/set",
        "[NAME VALUE]",
        "shows or sets an option of the replies; VALUE may be `default`",
    ),
    ("/save", "FILE", "writes the conversation"),
    ("/load", "FILE", "continues a conversation that was saved"),
    (
        "/bye",
        "",
        "ends; so do ctrl-D and, between replies, ctrl-C",
    ),
];
/// Other names of `/bye`.
const ENDS: [&str; 2] = ["/exit", "/quit"];
/// The names of `/set`.
pub(super) const OPTIONS: [&str; 7] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "thinking",
];
/// The value of `/set` that unsets an option.
const UNSET: &str = "default";

/// A command of the conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SlashCommand {
    Help,
    Clear,
    /// Show, set or, with an empty text, remove the system message.
    System(Option<String>),
    /// Show all options, or set one.
    Set(Option<(String, String)>),
    Save(PathBuf),
    Load(PathBuf),
    Bye,
}

/// A line that begins as a command and is none.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SlashError {
    #[error(
        "{0}: unknown command{1}; /help lists them, and a space before the slash makes it a message"
    )]
    Unknown(String, String),
    #[error("{0} needs a file, as in {0} chat.json")]
    NoFile(&'static str),
    #[error("/set {0}: unknown option; use one of {list}", list = OPTIONS.join(", "))]
    UnknownOption(String),
    #[error("/set {0}: give a value, or `default`")]
    NoValue(String),
    #[error("/set {name} {value}: use {range}, or `default`")]
    Value {
        name: String,
        value: String,
        range: &'static str,
    },
}

/// The command of a message; `None` if it is no command. Paths such as `/usr/bin` and texts of
/// several lines are messages.
pub(super) fn parse(message: &str) -> Option<Result<SlashCommand, SlashError>> {
    let line = message.trim_end();
    if !line.starts_with('/') || line.contains('\n') {
        return None;
    }
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    let rest = rest.trim();
    let is_name = word.len() > 1
        && word[1..]
            .chars()
            .all(|c| c.is_ascii_alphabetic() || c == '?');
    is_name.then(|| command(word, rest))
}

fn command(word: &str, rest: &str) -> Result<SlashCommand, SlashError> {
    let file = |name| match rest {
        "" => Err(SlashError::NoFile(name)),
        path => Ok(expanded(path.as_ref())),
    };
    Ok(match word {
        "/help" | "/?" => SlashCommand::Help,
        "/clear" => SlashCommand::Clear,
        "/system" => SlashCommand::System(match rest {
            "" => None,
            "-" => Some(String::new()),
            text => Some(text.to_owned()),
        }),
        "/set" if rest.is_empty() => SlashCommand::Set(None),
        "/set" => {
            let (name, value) = rest.split_once([' ', '=']).unwrap_or((rest, ""));
            let name = name.replace('-', "_");
            if !OPTIONS.contains(&name.as_str()) {
                return Err(SlashError::UnknownOption(name));
            }
            if value.trim().is_empty() {
                return Err(SlashError::NoValue(name));
            }
            SlashCommand::Set(Some((name, value.trim().to_owned())))
        }
        "/save" => SlashCommand::Save(file("/save")?),
        "/load" => SlashCommand::Load(file("/load")?),
        "/bye" => SlashCommand::Bye,
        word if ENDS.contains(&word) => SlashCommand::Bye,
        word => {
            let near = COMMANDS.iter().map(|(name, ..)| *name);
            let near = near.min_by_key(|name| levenshtein(name, word));
            let hint = near.filter(|name| levenshtein(name, word) <= 2);
            let hint = hint.map_or(String::new(), |name| format!(", did you mean {name}?"));
            return Err(SlashError::Unknown(word.to_owned(), hint));
        }
    })
}

/// The help of the conversation.
pub(super) fn help() -> String {
    let mut text = String::new();
    for (name, values, meaning) in COMMANDS {
        text += &format!("  {:22} {meaning}\n", format!("{name} {values}"));
    }
    text + "Ctrl-C ends a reply. A backslash at the end of a line continues the message, and so do\n\
            three quotation marks (\"\"\") until the next three. Pasted lines are one message. Arrow keys\n\
            and ctrl-R find earlier messages; tab completes commands and files.\n\
            Options of /set: "
        + &OPTIONS.join(", ")
        + "\n"
}

/// Sets an option.
///
/// # Errors
/// If the value is none of the option's.
pub(super) fn set(options: &mut ReplyOptions, name: &str, value: &str) -> Result<(), SlashError> {
    let wrong = |range| SlashError::Value {
        name: name.to_owned(),
        value: value.to_owned(),
        range,
    };
    match name {
        "temperature" => {
            let is_valid = |n: &f32| (0.0..=2.0).contains(n);
            options.temperature =
                number(value, is_valid).ok_or_else(|| wrong("a number from 0 to 2"))?;
        }
        "top_p" | "min_p" => {
            let is_valid = |n: &f32| (0.0..=1.0).contains(n);
            let share = number(value, is_valid).ok_or_else(|| wrong("a number from 0 to 1"))?;
            if name == "top_p" {
                options.top_p = share;
            } else {
                options.min_p = share;
            }
        }
        "top_k" => {
            options.top_k =
                number(value, |_| true).ok_or_else(|| wrong("a whole number, 0 for all"))?;
        }
        "max_tokens" => {
            let tokens = number(value, |n: &usize| *n > 0);
            options.max_tokens = tokens.ok_or_else(|| wrong("a whole number above 0"))?;
        }
        "seed" => options.seed = number(value, |_| true).ok_or_else(|| wrong("a whole number"))?,
        "thinking" => {
            options.thinking = match value {
                UNSET => None,
                "on" | "true" => Some(true),
                "off" | "false" => Some(false),
                _ => return Err(wrong("on or off")),
            };
        }
        _ => return Err(SlashError::UnknownOption(name.to_owned())),
    }
    Ok(())
}

/// The number of a text, `None` within for `default`; `None` if it is not valid.
fn number<T: FromStr>(text: &str, is_valid: impl Fn(&T) -> bool) -> Option<Option<T>> {
    if text == UNSET {
        return Some(None);
    }
    text.parse().ok().filter(is_valid).map(Some)
}

/// All options and their values.
pub(super) fn shown(options: &ReplyOptions) -> String {
    let text = |value: Option<String>| value.unwrap_or_else(|| UNSET.to_owned());
    let real = |value: Option<f32>| text(value.map(|value| value.to_string()));
    let whole = |value: Option<usize>| text(value.map(|value| value.to_string()));
    let thinking = options
        .thinking
        .map(|on| if on { "on" } else { "off" }.to_owned());
    let values = [
        real(options.temperature),
        real(options.top_p),
        whole(options.top_k),
        real(options.min_p),
        whole(options.max_tokens),
        text(options.seed.map(|seed| seed.to_string())),
        text(thinking),
    ];
    let lines = OPTIONS.iter().zip(values);
    lines
        .map(|(name, value)| format!("  {name:12} {value}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_distinguished_from_messages() {
        use SlashCommand::{Bye, Clear, Load, Save, Set, System};
        for (text, expected) in [
            ("/clear", Clear),
            ("/bye ", Bye),
            ("/quit", Bye),
            ("/system", System(None)),
            (
                "/system Be brief. Be kind.",
                System(Some("Be brief. Be kind.".to_owned())),
            ),
            ("/system -", System(Some(String::new()))),
            ("/set", Set(None)),
            (
                "/set top-p 0.5",
                Set(Some(("top_p".to_owned(), "0.5".to_owned()))),
            ),
            (
                "/set seed=7",
                Set(Some(("seed".to_owned(), "7".to_owned()))),
            ),
            ("/save a b.json", Save("a b.json".into())),
            ("/load c.json", Load("c.json".into())),
        ] {
            assert_eq!(parse(text), Some(Ok(expected)), "{text}");
        }
        for message in [
            "hello",
            " /clear",
            "/usr/bin/x is what?",
            "/",
            "/clear\nnow",
            "5/2",
        ] {
            assert_eq!(parse(message), None, "{message}");
        }
        for (wrong, part) in [
            ("/cler", "did you mean /clear?"),
            ("/frobnicate", "/help"),
            ("/save", "/save chat.json"),
            ("/set heat 3", "temperature, top_p"),
            ("/set seed", "default"),
        ] {
            let error = parse(wrong).unwrap().unwrap_err().to_string();
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }

    #[test]
    fn options_are_set_unset_and_checked() {
        let mut options = ReplyOptions::default();
        for (name, value) in [
            ("temperature", "0.5"),
            ("top_p", "0.9"),
            ("top_k", "40"),
            ("min_p", "0.05"),
            ("max_tokens", "100"),
            ("seed", "7"),
            ("thinking", "off"),
        ] {
            set(&mut options, name, value).unwrap();
            let line = format!("  {name:12} {value}\n");
            assert!(shown(&options).contains(&line), "{line}");
        }
        for name in OPTIONS {
            set(&mut options, name, "default").unwrap();
            assert!(set(&mut options, name, "?").is_err(), "{name}");
        }
        for (name, value) in [("temperature", "3"), ("top_p", "-1"), ("max_tokens", "0")] {
            assert!(set(&mut options, name, value).is_err(), "{name} {value}");
        }
        assert_eq!(shown(&options).matches("default").count(), OPTIONS.len());
    }

    #[test]
    fn help_has_every_command() {
        for (name, ..) in COMMANDS {
            assert!(help().contains(name), "{name}");
            let known = command(name, "x 1");
            assert!(!matches!(known, Err(SlashError::Unknown(..))), "{name}");
        }
    }
}
