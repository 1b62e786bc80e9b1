//! What a setting without a value means, from the help of its flag.

use super::{SERVING, commands, subcommand};

/// The meaning of no value for the setting of this name: what its help calls the default, else
/// `off` for a switch and `none` for the others.
pub fn meaning(name: &str) -> String {
    let root = commands();
    let command = subcommand(&root, SERVING[0]);
    let is_it = |arg: &&clap::Arg| {
        !arg.is_hide_set() && arg.get_long().map_or(name == "model", |long| long == name)
    };
    let Some(arg) = command.get_arguments().find(is_it) else {
        return "none".to_owned();
    };
    let long = arg.get_long_help().map(ToString::to_string);
    let help = long.or_else(|| arg.get_help().map(ToString::to_string));
    let help = help.unwrap_or_default();
    let default = help.split_once("[default: ").and_then(|(_, rest)| {
        let (default, _) = rest.rsplit_once(']')?;
        Some(default.split_whitespace().collect::<Vec<_>>().join(" "))
    });
    let bare = if arg.get_action().takes_values() {
        "none"
    } else {
        "off"
    };
    default.unwrap_or_else(|| bare.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_means_what_the_help_calls_the_default() {
        assert_eq!(meaning("device"), "none");
        assert_eq!(meaning("threads"), "one per core");
        assert_eq!(meaning("no-mtp"), "off");
        assert!(meaning("max-ctx").contains("the model's training context"));
        assert_eq!(meaning("no such setting"), "none");
    }
}
