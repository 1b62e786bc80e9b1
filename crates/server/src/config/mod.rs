//! Settings from flags, environment, configuration file and model card, each value with its origin.
//!
//! Start with [`parse`] for the command line, [`server::server_config`] for the settings of
//! `serve`, and [`card`] for the values of a model's card.

mod aliases;
pub mod card;
pub mod directories;
mod file;
pub mod hub;
pub mod kernels;
pub mod server;
mod suggestions;
pub mod surroundings;
pub(crate) mod tilde;
mod unknown_variables;
pub mod unset;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};

use crate::cli::{Cli, Command as Cmd, RunArgs, headings, refused, spellings};

/// An error in the command line, or in a file that it names.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A wrong command line; also the text of --help and --version.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// A file named on the command line cannot be read.
    #[error("{flag} {path}: {source}", path = path.display())]
    Unreadable {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The configuration file has an invalid key or value.
    #[error("{path}: {detail}", path = path.display())]
    File {
        /// The configuration file.
        path: PathBuf,
        /// The key and the mistake.
        detail: String,
    },
    /// A variable that begins with `HEARTH_` is no setting.
    #[error("{0}")]
    UnknownVariable(String),
    /// A value of the configuration file or of an old variable is invalid.
    #[error("{source_name}: {value} is not valid: {reason}")]
    Value {
        /// The file and key, or the variable.
        source_name: String,
        /// The value.
        value: String,
        /// Why it is invalid, or the values that are valid.
        reason: String,
    },
}

/// Where a value comes from, in order of precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// An environment variable.
    Environment,
    /// The configuration file.
    File,
    /// The model's card.
    Card,
    /// The model file.
    ModelFile,
    /// The program's default.
    Default,
}

impl Origin {
    /// All origins, in order of precedence.
    pub const ALL: [Origin; 6] = [
        Origin::Flag,
        Origin::Environment,
        Origin::File,
        Origin::Card,
        Origin::ModelFile,
        Origin::Default,
    ];
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Flag => "flag",
            Origin::Environment => "environment",
            Origin::File => "configuration file",
            Origin::Card => "model card",
            Origin::ModelFile => "model file",
            Origin::Default => "default",
        })
    }
}

/// A setting with its value, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedSetting {
    /// The flag without its dashes.
    pub name: String,
    /// Its value, without secrets; empty if none is set.
    pub value: String,
    /// Where the value comes from.
    pub origin: Origin,
}

/// The command line, and every setting of `serve` with its origin.
#[derive(Debug)]
pub struct ParsedCommandLine {
    /// The parsed command line, with the values of the configuration file.
    pub cli: Cli,
    /// The settings of `serve`; empty for other commands.
    pub settings: Vec<ResolvedSetting>,
    /// Variables that begin as the predecessor's but are no setting, each with a hint.
    pub unknown_variables: Vec<String>,
}

/// The subcommands with the settings of `serve`, as words of the command line.
const SERVING: [&[&str]; 3] = [&["serve"], &["config", "show"], &["doctor"]];
/// The subcommand that also knows the flags of other servers.
const RUN: [&str; 1] = ["run"];

/// Reads the command line, the environment, and the configuration file if one is named.
///
/// # Errors
/// If a flag, a variable or a key is unknown, refused or invalid, or the file cannot be read.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<ParsedCommandLine, ConfigError> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(means_serve) {
        args.insert(1, "serve".into());
    }
    let args = spellings::rewritten(args);
    let mut command = commands();
    let variables = unknown_variables::read(&command);
    let unknown_variables = variables.warned;
    let serves = |word: &OsString| SERVING.iter().any(|path| word == path[0]);
    if args.get(1).is_some_and(serves) {
        refused::check_families(&mut command, &args)?;
    }
    let parsed = command.try_get_matches_from_mut(&args);
    let mut matches =
        parsed.map_err(|error| suggestions::only_shown(error, typed(&command, &args)))?;
    if let Some(refused) = variables.refused.into_iter().next() {
        return Err(ConfigError::UnknownVariable(refused));
    }
    if let Some(matches) = under(&matches, &RUN) {
        refused::check(&mut command, matches)?;
    }
    let Some(path) = SERVING.iter().find(|path| under(&matches, path).is_some()) else {
        let mut cli = Cli::from_arg_matches(&matches)?;
        if let (Cmd::Run(args), Some(matches)) = (&mut cli.command, under(&matches, &RUN)) {
            args.is_local = RunArgs::is_for_own_model(|id| {
                use ValueSource::{CommandLine, EnvVariable};
                matches!(matches.value_source(id), Some(CommandLine | EnvVariable))
            });
        }
        return Ok(ParsedCommandLine {
            cli,
            settings: Vec::new(),
            unknown_variables,
        });
    };
    let named = under(&matches, path).and_then(|matches| matches.get_one::<PathBuf>("config"));
    let mut entries = match named {
        Some(file) => file::read(file, subcommand(&command, path))?,
        None => Vec::new(),
    };
    let variables = aliases::read()
        .map_err(|variable| refused::refuse(&mut command, variable.name, variable.instead))?;
    entries.extend(variables);
    if !entries.is_empty() {
        // Their values become defaults, so that the same parser checks them and flags override
        // them.
        let filled = |command| file::with_defaults(command, &entries);
        // Some arguments belong to the whole program, the others to the subcommand.
        let whole = file::with_defaults(commands(), &entries);
        command = at(whole, path, &filled);
        let parsed = command.try_get_matches_from_mut(&args);
        let located = |error| file::located(error, subcommand(&command, path), &entries);
        matches = parsed.map_err(located)?;
    }
    let mut cli = Cli::from_arg_matches(&matches)?;
    hub::name_file(&mut cli.command, &mut command)?;
    let found = under(&matches, path).expect("the first parse found the subcommand");
    let settings = settings(subcommand(&command, path), found, &entries);
    refused::check(&mut command, found)?;
    Ok(ParsedCommandLine {
        cli,
        settings,
        unknown_variables,
    })
}

/// The command line as its long help shows it, for manuals and completions.
pub fn documented() -> Command {
    let arranged = SERVING.iter().fold(Cli::command(), |command, path| {
        at(command, path, &headings::arranged)
    });
    with_all_help(headings::arranged_globals(arranged))
}

/// A command whose short help hides nothing: manuals leave out what it hides.
fn with_all_help(command: Command) -> Command {
    command
        .mut_args(|arg| arg.hide_short_help(false))
        .mut_subcommands(with_all_help)
}

/// The command line, with the refused flags in the subcommands that know them.
fn commands() -> Command {
    let serving = SERVING.iter().fold(Cli::command(), |command, path| {
        at(command, path, &|command| {
            refused::known(headings::arranged(command))
        })
    });
    let all = at(serving, &RUN, &refused::known_servers);
    tilde::expanding(headings::arranged_globals(all))
}

/// Whether a word in place of a command is a model file or a flag of `serve`, which means `serve`.
fn means_serve(word: &OsString) -> bool {
    let ending = Path::new(word).extension();
    ending.is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) || spellings::means_serve(word)
}

/// The subcommand that a command line names, as far as its words do.
fn typed<'a>(command: &'a Command, args: &[OsString]) -> &'a Command {
    let words = args.iter().skip(1);
    let mut found = command;
    for word in words {
        match found.find_subcommand(word) {
            Some(inner) => found = inner,
            None => break,
        }
    }
    found
}

/// A command with `change` applied to the subcommand that `path` names.
fn at(command: Command, path: &[&str], change: &dyn Fn(Command) -> Command) -> Command {
    match path.split_first() {
        None => change(command),
        Some((name, rest)) => command.mut_subcommand(name, |inner| at(inner, rest, change)),
    }
}

/// The subcommand that `path` names.
fn subcommand<'a>(command: &'a Command, path: &[&str]) -> &'a Command {
    path.iter().fold(command, |command, name| {
        command
            .find_subcommand(name)
            .expect("the command line defines it")
    })
}

/// The matches of the subcommand that `path` names, if it was given.
fn under<'a>(matches: &'a ArgMatches, path: &[&str]) -> Option<&'a ArgMatches> {
    path.iter()
        .try_fold(matches, |matches, name| matches.subcommand_matches(name))
}

/// Every setting of a command, without hidden flags and flags of one run.
fn settings(
    command: &Command,
    matches: &ArgMatches,
    entries: &[file::Entry],
) -> Vec<ResolvedSetting> {
    let not_settings = ["help", "version", "dry_run", "json"];
    let shown =
        |arg: &&clap::Arg| !arg.is_hide_set() && !not_settings.contains(&arg.get_id().as_str());
    let mut settings = Vec::new();
    for arg in command.get_arguments().filter(shown) {
        let id = arg.get_id().as_str();
        let entry = entries.iter().rfind(|entry| entry.id == id);
        let origin = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => Origin::Flag,
            Some(ValueSource::EnvVariable) => Origin::Environment,
            Some(_) => entry.map_or(Origin::Default, |entry| entry.origin),
            None => Origin::Default,
        };
        let raw = matches.get_raw(id).into_iter().flatten();
        let values: Vec<_> = raw.map(|value| value.to_string_lossy()).collect();
        let value = match id {
            // Keys are never shown.
            "api_key" if !values.is_empty() => format!("{} keys", values.len()),
            _ => values.join(","),
        };
        let name = arg.get_long().unwrap_or("model").to_owned();
        settings.push(ResolvedSetting {
            name,
            value,
            origin,
        });
    }
    // The model has two arguments; an unset one is removed if both are listed.
    if let Some(at) = settings
        .iter()
        .rposition(|setting| setting.name == "model" && setting.value.is_empty())
        && settings
            .iter()
            .filter(|setting| setting.name == "model")
            .count()
            > 1
    {
        settings.remove(at);
    }
    settings
}

/// Logs settings, one line for each origin.
pub fn log(settings: &[ResolvedSetting]) {
    for origin in Origin::ALL {
        let values: Vec<String> = settings
            .iter()
            .filter(|setting| setting.origin == origin && !setting.value.is_empty())
            .map(|setting| format!("{}={}", setting.name, setting.value))
            .collect();
        if !values.is_empty() {
            tracing::info!("settings by {origin}: {}", values.join(" "));
        }
    }
}

/// The text of a file that a flag names.
pub fn read_text(flag: &'static str, path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
        flag,
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<ParsedCommandLine, ConfigError> {
        let words = ["hearth"].iter().chain(words);
        parse(words.map(OsString::from))
    }

    fn serve(parsed: ParsedCommandLine) -> crate::cli::ServeArgs {
        match parsed.cli.command {
            crate::cli::Command::Serve(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    fn config_file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flag_overrides_file_and_file_overrides_default() {
        let file =
            config_file("port = 9001\nmax_ctx = 512\nno-cors = true\napi-key = [\"a\", \"b\"]\n");
        let path = file.path().to_str().unwrap();
        let parsed = parsed(&["serve", "--config", path, "--port", "9002"]).unwrap();
        let origin = |name: &str| {
            parsed
                .settings
                .iter()
                .find(|setting| setting.name == name)
                .unwrap()
                .clone()
        };
        assert_eq!(origin("port").origin, Origin::Flag);
        assert_eq!(origin("max-ctx").origin, Origin::File);
        assert_eq!(origin("host").origin, Origin::Default);
        assert_eq!(origin("api-key").value, "2 keys");
        let args = serve(parsed);
        assert_eq!(
            (args.port, args.device.max_ctx, args.listen.no_cors),
            (9002, Some(512), true)
        );
        assert_eq!(args.api_key, ["a", "b"]);
    }

    #[test]
    fn configuration_file_can_name_the_model() {
        let file = config_file("model = \"a.gguf\"\n");
        let path = file.path().to_str().unwrap();
        let by_file = serve(parsed(&["serve", "--config", path]).unwrap());
        assert_eq!(by_file.model_flag.unwrap().to_str(), Some("a.gguf"));
        let by_word = serve(parsed(&["serve", "b.gguf", "--config", path]).unwrap());
        assert_eq!(by_word.model.unwrap().to_str(), Some("b.gguf"));
    }

    #[test]
    fn an_invalid_value_is_named_with_its_file_and_key() {
        for (text, key, part) in [
            ("port = 'abc'", "port", "abc is not valid: invalid digit"),
            ("max_ctx = -1", "max_ctx", "-1 is not valid"),
            (
                "metrics = 'yes'",
                "metrics",
                "yes is not valid: use one of on, off",
            ),
            (
                "log-format = 'xml'",
                "log-format",
                "xml is not valid: use one of",
            ),
        ] {
            let file = config_file(text);
            let path = file.path().to_str().unwrap();
            let error = parsed(&["serve", "--config", path]).unwrap_err();
            assert!(matches!(error, ConfigError::Value { .. }), "{error:?}");
            let error = error.to_string();
            let place = format!("{path}: {key}: ");
            assert!(error.starts_with(&place) && error.contains(part), "{error}");
            // On the command line the flag itself says where it is.
            let flag = parsed(&["serve", "--config", path, "--port", "x"]).unwrap_err();
            assert!(matches!(flag, ConfigError::Usage(_)), "{flag:?}");
        }
    }

    fn check_refused(text: &str, part: &str) {
        let file = config_file(text);
        let path = file.path().to_str().unwrap();
        let error = parsed(&["serve", "--config", path])
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{part} in {error}");
    }

    #[test]
    fn invalid_keys_and_values_of_the_file_are_named() {
        check_refused("prot = 1", "prot is not a setting; did you mean port?");
        check_refused("port = [", "TOML");
        check_refused("[port]\na = 1", "port");
        check_refused("port = \"many\"", "many");
        check_refused("config = \"x\"", "config is not a setting");
    }
}
