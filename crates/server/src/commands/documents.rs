//! `hearth completions` and `hearth man`: files for shells and for `man`, made from the definition
//! of the command line.

use std::io::Write;

use anyhow::Context;

use crate::cli::{CompletionsArgs, ManArgs};
use crate::config;

/// The executable's name.
const NAME: &str = "hearth";

pub(super) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut config::documented(), NAME, &mut text);
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
