//! `hearth completions` and `hearth man`: files for shells and for `man`, made from the definition
//! of the command line.

use std::io::Write;

use anyhow::Context;
use clap::builder::PossibleValuesParser;

use crate::cli::{CompletionsArgs, ManArgs};
use crate::commands::connect;
use crate::config;

/// The executable's name.
const NAME: &str = "hearth";
/// The commands whose first word is a client.
const OF_CLIENTS: [&str; 2] = ["connect", "launch"];

pub(super) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut text = Vec::new();
    let mut command = config::documented();
    for name in OF_CLIENTS {
        command = command.mut_subcommand(name, |command| {
            command.mut_args(|arg| match arg.get_id().as_str() {
                "client" => arg.value_parser(PossibleValuesParser::new(connect::names())),
                _ => arg,
            })
        });
    }
    clap_complete::generate(args.shell, &mut command, NAME, &mut text);
    std::io::stdout().lock().write_all(&text)?;
    Ok(())
}

pub(super) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let command = config::documented();
    let Some(dir) = &args.dir else {
        let mut text = Vec::new();
        clap_mangen::Man::new(command).render(&mut text)?;
        std::io::stdout().lock().write_all(&text)?;
        return Ok(());
    };
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(command, dir))
        .with_context(|| format!("--dir {}", dir.display()))
}
