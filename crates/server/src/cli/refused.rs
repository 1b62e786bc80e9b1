//! Flags of the server whose start lines this one takes over that it does not have: each is known by name and
//! answered with a sentence, instead of being an unknown word.
//!
//! A flag that the command has after all is left to it, so this table needs no care when one is built.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};

/// What follows a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    Nothing,
    One,
    Many,
}

/// A flag that is refused.
struct Refused {
    flag: &'static str,
    takes: Takes,
    /// Values that ask for what is done anyway; they are taken in silence.
    neutral: &'static [&'static str],
    instead: &'static str,
}

/// What a switch may be set to without being switched on.
const OFF: [&str; 5] = ["", "0", "false", "no", "off"];
/// Families of flags, by how they begin, that only other models or several processes have.
const FAMILIES: [(&str, &str); 2] = [
    (
        "--ds4-",
        "it belongs to a kind of model that is not run here; leave it away",
    ),
    ("--target-shard-ipc-", ONE_PROCESS),
];

const ONE_DEVICE: &str =
    "one device holds the whole model; choose it with --device cuda:N and leave this away";
const ONE_PROCESS: &str =
    "model and draft run in this one process; give the draft with --draft and leave this away";
const NO_COMPRESSION: &str = "prompts are not compressed yet; leave it away, and make room with --max-ctx and --kv-type q8_0";
const NO_UPSTREAM: &str =
    "prompts are not compressed for other servers; send requests there directly";
const NO_EXPERTS: &str = "models of experts are not run yet; leave it away";
const NO_PAGING: &str = "cached keys and values stay on the device; leave it away, and use --max-ctx or --kv-type q4_0 if they do not fit";
const NO_CACHE: &str = "what is kept of prompts follows one rule; leave it away, and use --prefix-cache-slots or --kv-cache-dir";
const NO_AGENT_CACHE: &str = "nothing runs ahead of a request; leave it away";
const ROLLBACK: &str = "states are always rolled back without replay; leave it away";

const REFUSED: [Refused; 36] = [
    one("target-devices", &[], ONE_DEVICE),
    one("target-layer-split", &[], ONE_DEVICE),
    switch("peer-access", &OFF, ONE_DEVICE),
    one("draft-ipc-bin", &[], ONE_PROCESS),
    one("draft-ipc-work-dir", &[], ONE_PROCESS),
    one("draft-ipc-ring-cap", &[], ONE_PROCESS),
    one("prefill-compression", &["off"], NO_COMPRESSION),
    one("prefill-threshold", &[], NO_COMPRESSION),
    one("prefill-keep-ratio", &[], NO_COMPRESSION),
    one("prefill-drafter", &[], NO_COMPRESSION),
    switch("prefill-skip-park", &OFF, NO_COMPRESSION),
    many("prefill-curve", NO_COMPRESSION),
    one("prefill-upstream-base", &[], NO_UPSTREAM),
    one("prefill-upstream-key", &[], NO_UPSTREAM),
    one("prefill-upstream-model", &[], NO_UPSTREAM),
    switch("disk-prefix-cache-compress", &OFF, NO_COMPRESSION),
    one("prefill-cache-slots", &["0"], NO_CACHE),
    one("kv-cache-interval", &[], NO_CACHE),
    one("kv-cache-cold-max", &[], NO_CACHE),
    one("disk-prefix-cache", &["full"], NO_CACHE),
    switch("early-dispatch", &OFF, NO_AGENT_CACHE),
    switch("end-turn-snapshot", &OFF, NO_AGENT_CACHE),
    switch("prefetch-prefill", &OFF, NO_AGENT_CACHE),
    one(
        "draft-residency",
        &["auto", "persistent"],
        "the draft stays where it was loaded; use --lazy-draft to load it at its first use",
    ),
    switch("fast-rollback", &["true", "1", "yes", "on"], ROLLBACK),
    switch("no-fast-rollback", &OFF, ROLLBACK),
    one(
        "verify-width",
        &["0"],
        "the width follows what pays; bound it with --ddtree-budget",
    ),
    one("kvflash", &["off", "0"], NO_PAGING),
    one("kvflash-policy", &[], NO_PAGING),
    one("kvflash-tau", &[], NO_PAGING),
    many("adaptive-experts", NO_EXPERTS),
    switch("spark", &OFF, NO_EXPERTS),
    one("spark-slots", &[], NO_EXPERTS),
    one("spark-vram", &[], NO_EXPERTS),
    one("freq", &[], NO_EXPERTS),
    one("collect-routing", &[], NO_EXPERTS),
];

const fn one(
    flag: &'static str,
    neutral: &'static [&'static str],
    instead: &'static str,
) -> Refused {
    Refused {
        flag,
        takes: Takes::One,
        neutral,
        instead,
    }
}

const fn many(flag: &'static str, instead: &'static str) -> Refused {
    Refused {
        flag,
        takes: Takes::Many,
        neutral: &[],
        instead,
    }
}

const fn switch(
    flag: &'static str,
    neutral: &'static [&'static str],
    instead: &'static str,
) -> Refused {
    Refused {
        flag,
        takes: Takes::Nothing,
        neutral,
        instead,
    }
}

/// The environment variable of a flag.
pub fn variable(flag: &str) -> String {
    format!("HEARTH_{}", flag.to_uppercase().replace('-', "_"))
}

/// Whether `name` is an argument's long name or another of its names.
pub(crate) fn goes_by(arg: &Arg, name: &str) -> bool {
    let others = arg.get_all_aliases().unwrap_or_default();
    arg.get_long() == Some(name) || others.contains(&name)
}

/// A command that knows the refused flags too, each with its variable, and shows none of them in its help.
pub(crate) fn known(command: Command) -> Command {
    REFUSED.iter().fold(command, |command, refused| {
        if command
            .get_arguments()
            .any(|arg| goes_by(arg, refused.flag))
        {
            return command;
        }
        let arg = Arg::new(refused.flag)
            .long(refused.flag)
            .env(variable(refused.flag))
            .hide(true)
            .action(ArgAction::Append);
        command.arg(match refused.takes {
            Takes::Nothing => arg
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true"),
            Takes::One => arg.num_args(1),
            Takes::Many => arg.num_args(0..),
        })
    })
}

/// Refuses what [`known`] made known, if it was given; `command` is the one that was parsed.
pub(crate) fn check(command: &mut Command, matches: &ArgMatches) -> Result<(), clap::Error> {
    for refused in &REFUSED {
        // An argument that the command defines has another id, its field's name.
        let Ok(Some(values)) = matches.try_get_raw(refused.flag) else {
            continue;
        };
        let requests = |value: &std::ffi::OsStr| {
            let value = value.to_string_lossy();
            !refused.neutral.contains(&&*value)
        };
        let asked: Vec<_> = values.filter(|value| requests(value)).collect();
        let bare = refused.takes == Takes::Many && asked.is_empty();
        if asked.is_empty() && !bare {
            continue;
        }
        return Err(refuse(
            command,
            &format!("--{}", refused.flag),
            refused.instead,
        ));
    }
    Ok(())
}

/// Refuses flags that are known only by how they begin.
pub(crate) fn check_families(
    command: &mut Command,
    words: &[std::ffi::OsString],
) -> Result<(), clap::Error> {
    for word in words {
        let word = word.to_string_lossy();
        for (begin, instead) in FAMILIES {
            if word.starts_with(begin) {
                let flag = word.split('=').next().unwrap_or(&word);
                return Err(refuse(command, flag, instead));
            }
        }
    }
    Ok(())
}

/// The error for a name that is known and refused.
pub(crate) fn refuse(command: &mut Command, name: &str, instead: &str) -> clap::Error {
    command.error(
        ErrorKind::ArgumentConflict,
        format!("{name} is not supported: {instead}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_says_what_to_do_and_no_flag_stands_twice() {
        let mut flags: Vec<&str> = REFUSED.iter().map(|refused| refused.flag).collect();
        flags.sort_unstable();
        let all = flags.len();
        flags.dedup();
        assert_eq!(flags.len(), all);
        for refused in &REFUSED {
            assert!(
                ["leave", "use", "bound", "send"]
                    .iter()
                    .any(|word| refused.instead.contains(word)),
                "{}",
                refused.flag
            );
        }
    }

    #[test]
    fn a_flag_that_the_command_has_is_left_to_it() {
        let own = Command::new("x").arg(Arg::new("mine").long("kvflash-tau").num_args(1));
        let mut command = known(own);
        let words = ["x", "--kvflash-tau", "9"];
        let matches = command.try_get_matches_from_mut(words).unwrap();
        assert!(check(&mut command, &matches).is_ok());
        let words = ["x", "--kvflash", "9"];
        let matches = command.try_get_matches_from_mut(words).unwrap();
        let error = check(&mut command, &matches).unwrap_err().to_string();
        assert!(error.contains("--kvflash is not supported"), "{error}");
    }
}
