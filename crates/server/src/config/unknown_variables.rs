//! Environment variables that look like settings but are none, such as a misspelled name.
//!
//! Those of this program are refused; those of its predecessor are warned about. The variables that
//! container platforms set for a service of this name, such as `HEARTH_SERVICE_HOST`, are neither.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use clap::Command;
use strsim::levenshtein;

use super::aliases;

/// The common start of all variables of this program.
const PREFIX: &str = "HEARTH_";
/// The common start of the predecessor's variables.
const OLD_PREFIX: &str = "DFLASH";
/// Beginnings of the variables that container platforms set for a service of this name.
const OF_PLATFORMS: [&str; 3] = ["HEARTH_SERVICE_HOST", "HEARTH_SERVICE_PORT", "HEARTH_PORT_"];
/// The largest edit distance of a suggestion.
const NEAR: usize = 3;

/// The set variables that no argument reads, each in a sentence.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct UnknownVariables {
    /// Those that begin like this program's variables.
    pub(super) refused: Vec<String>,
    /// Those that begin like the predecessor's.
    pub(super) warned: Vec<String>,
}

/// The set variables that no argument of `command`, subcommands included, reads.
pub(super) fn read(command: &Command) -> UnknownVariables {
    let set = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    unknown(command, set)
}

fn unknown(command: &Command, set: impl Iterator<Item = String>) -> UnknownVariables {
    let mut known: Vec<String> = aliases::names().map(str::to_owned).collect();
    add_variables(command, &mut known);
    let is_of_platform = |name: &str| OF_PLATFORMS.iter().any(|start| name.starts_with(start));
    let mut names: Vec<String> = set
        .filter(|name| !known.contains(name) && !is_of_platform(name))
        .collect();
    names.sort();
    let sentence = |name: &String, prefix: &str| {
        let near = known
            .iter()
            .filter(|other| other.starts_with(prefix))
            .min_by_key(|other| levenshtein(name, other))
            .filter(|other| levenshtein(name, other) <= NEAR);
        let hint = near.map_or_else(
            || "`hearth serve --help` lists the settings".to_owned(),
            |near| format!("did you mean {near}?"),
        );
        format!("the environment variable {name} is not a setting; {hint}")
    };
    let of = |prefix: &str| {
        let names = names.iter().filter(|name| name.starts_with(prefix));
        names.map(|name| sentence(name, prefix)).collect()
    };
    UnknownVariables {
        refused: of(PREFIX),
        warned: of(OLD_PREFIX),
    }
}

/// Adds the variables of a command and its subcommands.
fn add_variables(command: &Command, known: &mut Vec<String>) {
    let variables = command.get_arguments().filter_map(clap::Arg::get_env);
    known.extend(variables.map(|name| name.to_string_lossy().into_owned()));
    for inner in command.get_subcommands() {
        add_variables(inner, known);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(names: &[&str]) -> UnknownVariables {
        let set = names.iter().map(|name| (*name).to_owned());
        unknown(&crate::config::commands(), set)
    }

    #[test]
    fn unknown_variables_are_named_with_the_nearest_setting() {
        for (name, part) in [
            (
                "HEARTH_PROT",
                "HEARTH_PROT is not a setting; did you mean HEARTH_PORT?",
            ),
            ("HEARTH_API_KYE", "did you mean HEARTH_API_KEY?"),
            ("HEARTH_SOMETHING_ELSE", "hearth serve --help"),
        ] {
            let UnknownVariables { refused, warned } = found(&[name]);
            assert_eq!((refused.len(), warned.len()), (1, 0), "{refused:?}");
            assert!(refused[0].contains(part), "{part} in {refused:?}");
        }
        let old = found(&["DFLASH_DARFT", "DFLASH27B_SOMETHING"]);
        assert_eq!((old.refused.len(), old.warned.len()), (0, 2), "{old:?}");
        assert!(
            old.warned[1].contains("DFLASH_DARFT is not a setting; did you mean DFLASH_DRAFT?")
        );
    }

    #[test]
    fn variables_of_any_command_of_platforms_and_of_other_programs_are_not_named() {
        let known = [
            "HEARTH_PORT",
            "HEARTH_URL",
            "HEARTH_LOG",
            "HEARTH_SUMS",
            "HEARTH_KVFLASH",
            "HEARTH_SERVICE_HOST",
            "HEARTH_SERVICE_PORT_HTTP",
            "HEARTH_PORT_8000_TCP_ADDR",
            "DFLASH_DRAFT",
            "PATH",
            "NOT_HEARTH_PORT",
        ];
        assert_eq!(found(&known), UnknownVariables::default());
    }
}
