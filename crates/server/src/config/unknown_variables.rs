//! Environment variables that look like settings but are none, such as a misspelled name.
//!
//! They are warned about and not refused: container platforms set variables of their own, such as
//! `HEARTH_SERVICE_HOST` for a service of this name.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use clap::Command;
use strsim::levenshtein;

use super::aliases;

/// The common start of all variables of this program.
const PREFIX: &str = "HEARTH_";
/// The largest edit distance of a suggestion.
const NEAR: usize = 3;

/// A sentence for each set variable that begins with `HEARTH_` and that no argument of `command`,
/// subcommands included, reads.
pub(super) fn read(command: &Command) -> Vec<String> {
    let set = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    unknown(command, set)
}

fn unknown(command: &Command, set: impl Iterator<Item = String>) -> Vec<String> {
    let mut known: Vec<String> = aliases::names().map(str::to_owned).collect();
    add_variables(command, &mut known);
    let mut unknown: Vec<String> = set
        .filter(|name| name.starts_with(PREFIX) && !known.contains(name))
        .collect();
    unknown.sort();
    unknown
        .iter()
        .map(|name| {
            let near = known
                .iter()
                .filter(|other| other.starts_with(PREFIX))
                .min_by_key(|other| levenshtein(name, other))
                .filter(|other| levenshtein(name, other) <= NEAR);
            let hint = near.map_or_else(
                || "`hearth serve --help` lists the settings".to_owned(),
                |near| format!("did you mean {near}?"),
            );
            format!("the environment variable {name} is not a setting and has no effect; {hint}")
        })
        .collect()
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

    fn check(names: &[&str], expected: &[&str]) {
        let set = names.iter().map(|name| (*name).to_owned());
        let found = unknown(&crate::config::commands(), set);
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (sentence, part) in found.iter().zip(expected) {
            assert!(sentence.contains(part), "{part} in {sentence}");
        }
    }

    #[test]
    fn unknown_variables_are_named_with_the_nearest_setting() {
        check(
            &["HEARTH_PROT"],
            &["HEARTH_PROT is not a setting and has no effect; did you mean HEARTH_PORT?"],
        );
        check(&["HEARTH_API_KYE"], &["did you mean HEARTH_API_KEY?"]);
        check(&["HEARTH_SOMETHING_ELSE"], &["hearth serve --help"]);
    }

    #[test]
    fn variables_of_any_command_and_other_programs_are_not_named() {
        let known = [
            "HEARTH_PORT",
            "HEARTH_URL",
            "HEARTH_LOG",
            "HEARTH_SUMS",
            "HEARTH_KVFLASH",
        ];
        check(&known, &[]);
        check(&["PATH", "HOME", "NOT_HEARTH_PORT"], &[]);
    }
}
