//! Flags of the predecessor and of other servers that this server lacks: each is refused by name,
//! with a sentence on what to do.
//!
//! A flag that the command defines itself is skipped, so a new flag needs no change here.

use std::collections::HashSet;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::refusal::{ANY, OFF, Refused, Takes, many, one, switch};
use super::refused_servers::OF_OTHER_SERVERS;

/// Prefixes of flags that are refused, and what to do instead.
const FAMILIES: [(&str, &str); 2] = [
    (
        "--ds4-",
        "it belongs to a model family that is not supported; remove it",
    ),
    ("--target-shard-ipc-", ONE_PROCESS),
];

const ONE_PROCESS: &str = "model and draft run in one process, on one device or on several; remove \
     this flag, name the draft with --draft and its device, such as cpu, with --draft-device";
const NO_UPSTREAM: &str =
    "prompts are compressed for this server only; send requests to those servers directly";
const EXPERTS: &str = "experts that do not fit the GPU stay in host memory by themselves; remove it, and set the limit with \
     --vram-limit";
const ALL_EXPERTS: &str = "the model chooses among all its experts; remove it";
const NO_PAGING: &str = "the KV cache stays on the device; remove it, and use --max-ctx or --kv-type q4_0 if the cache does not fit";
const NO_CACHE: &str = "the prefix cache has one eviction rule; remove it, and use --prefix-cache-entries or --kv-cache-dir";
const NO_AGENT_CACHE: &str =
    "requests are not dispatched early; remove it, and use --prefix-warmup to prefill while idle";
const ROLLBACK: &str = "states are always rolled back without replay; remove it";

const REFUSED: [Refused; 27] = [
    one("draft-ipc-bin", &[], ONE_PROCESS),
    one("draft-ipc-gpu", &[], ONE_PROCESS),
    one("draft-ipc-work-dir", &[], ONE_PROCESS),
    one("draft-ipc-ring-cap", &[], ONE_PROCESS),
    one("prefill-upstream-base", &[], NO_UPSTREAM),
    one("prefill-upstream-key", &[], NO_UPSTREAM),
    one("prefill-upstream-model", &[], NO_UPSTREAM),
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
        "the draft stays on its device; use --lazy-draft to load it at its first use",
    ),
    switch("fast-rollback", &["true", "1", "yes", "on"], ROLLBACK),
    switch("no-fast-rollback", &OFF, ROLLBACK),
    one(
        "verify-width",
        &["0"],
        "the cost model chooses the width; set its maximum with --ddtree-budget",
    ),
    one("kvflash", &["off", "0"], NO_PAGING),
    one("kvflash-policy", &[], NO_PAGING),
    one("kvflash-tau", &[], NO_PAGING),
    many("adaptive-experts", ALL_EXPERTS),
    switch("spark", &OFF, EXPERTS),
    one("spark-slots", &[], EXPERTS),
    one("spark-vram", &[], EXPERTS),
    one("freq", &[], EXPERTS),
    one("collect-routing", &[], EXPERTS),
];

/// The environment variable of a flag.
pub fn variable(flag: &str) -> String {
    format!("HEARTH_{}", flag.to_uppercase().replace('-', "_"))
}

/// Whether `name` is the argument's long name or one of its aliases.
pub(crate) fn goes_by(arg: &Arg, name: &str) -> bool {
    let others = arg.get_all_aliases().unwrap_or_default();
    arg.get_long() == Some(name) || others.contains(&name)
}

/// Adds the refused flags to a command, hidden in its help; the predecessor's have variables.
pub(crate) fn known(command: Command) -> Command {
    known_servers(with_flags(command, &REFUSED, |refused| {
        Arg::new(id(refused)).env(variable(refused.flag))
    }))
}

/// Adds only the flags of other servers.
pub(crate) fn known_servers(command: Command) -> Command {
    with_flags(command, OF_OTHER_SERVERS, |refused| Arg::new(id(refused)))
}

/// The id of a refused flag, which no argument of the command itself has.
fn id(refused: &Refused) -> String {
    format!("refused {}", refused.flag)
}

/// Adds those flags that the command lacks; `begun` makes their arguments.
fn with_flags(command: Command, flags: &[Refused], begun: impl Fn(&Refused) -> Arg) -> Command {
    // Collected once: each flag against each of the command's arguments is most of the time that a
    // debug build takes to read a command line.
    let own: HashSet<String> = command.get_arguments().flat_map(names).collect();
    let absent = flags.iter().filter(|refused| !own.contains(refused.flag));
    command.args(absent.map(|refused| {
        let arg = begun(refused)
            .long(refused.flag)
            .hide(true)
            .action(ArgAction::Append)
            .allow_negative_numbers(true);
        match refused.takes {
            Takes::Nothing => arg
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true"),
            Takes::One => arg.num_args(1),
            Takes::Many => arg.num_args(0..),
        }
    }))
}

/// The argument's long name and its aliases.
fn names(arg: &Arg) -> Vec<String> {
    let others = arg.get_all_aliases().unwrap_or_default();
    let all = arg.get_long().into_iter().chain(others);
    all.map(str::to_owned).collect()
}

/// Fails if a flag that [`known`] added was given; `command` is the one that was parsed.
pub(crate) fn check(command: &mut Command, matches: &ArgMatches) -> Result<(), clap::Error> {
    for refused in REFUSED.iter().chain(OF_OTHER_SERVERS) {
        // A flag that the command has itself was not added.
        let Ok(Some(values)) = matches.try_get_raw(&id(refused)) else {
            continue;
        };
        let is_refused = |value: &std::ffi::OsStr| {
            let value = value.to_string_lossy();
            refused.neutral != ANY && !refused.neutral.contains(&&*value)
        };
        let given: Vec<_> = values.filter(|value| is_refused(value)).collect();
        let bare = refused.takes == Takes::Many && given.is_empty();
        if given.is_empty() && !bare {
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

/// Fails if a word begins with one of [`FAMILIES`].
pub(crate) fn check_families(
    command: &mut Command,
    words: &[std::ffi::OsString],
) -> Result<(), clap::Error> {
    for word in words {
        let word = word.to_string_lossy();
        for (prefix, instead) in FAMILIES {
            if word.starts_with(prefix) {
                let flag = word.split('=').next().unwrap_or(&word);
                return Err(refuse(command, flag, instead));
            }
        }
    }
    Ok(())
}

/// The error for a refused flag or variable.
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
    fn refusals_say_what_to_do_and_name_each_flag_once() {
        let all = || REFUSED.iter().chain(OF_OTHER_SERVERS);
        let mut flags: Vec<&str> = all().map(|refused| refused.flag).collect();
        flags.sort_unstable();
        let n_flags = flags.len();
        flags.dedup();
        assert_eq!(flags.len(), n_flags);
        for refused in all() {
            assert!(
                ["remove", "use", "set", "send"]
                    .iter()
                    .any(|word| refused.instead.contains(word)),
                "{}",
                refused.flag
            );
        }
    }

    #[test]
    fn flags_of_the_command_itself_are_not_refused() {
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
