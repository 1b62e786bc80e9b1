//! `~` at the start of a path: the home directory, as in a shell. Shells leave it in
//! `--flag=~/path`, and nothing else replaces it in variables and in the configuration file.

use std::any::TypeId;
use std::path::{Path, PathBuf};

use clap::Command;
use clap::builder::{PathBufValueParser, TypedValueParser};

use super::directories;

/// A command whose paths may begin with `~/`, subcommands included.
pub(super) fn expanding(command: Command) -> Command {
    let command = command.mut_subcommands(expanding);
    command.mut_args(|arg| {
        if arg.get_value_parser().type_id() == TypeId::of::<PathBuf>() {
            arg.value_parser(PathBufValueParser::new().map(|path| expanded(&path)))
        } else {
            arg
        }
    })
}

/// The path with the home directory in place of `~`; unchanged if there is none.
pub(crate) fn expanded(path: &Path) -> PathBuf {
    let home = || directories::of_user().map(|of_user| of_user.home);
    match path.strip_prefix("~") {
        Ok(rest) => home().map_or_else(|| path.to_owned(), |home| home.join(rest)),
        Err(_) => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leading_tilde_is_the_home_directory() {
        let home = directories::of_user().unwrap().home;
        assert_eq!(expanded(Path::new("~/a/b")), home.join("a/b"));
        for path in ["a/~/b", "~user/a", "/a", "b~"] {
            assert_eq!(expanded(Path::new(path)), Path::new(path));
        }
    }
}
