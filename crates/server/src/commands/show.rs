//! `hearth config show`: every setting with its value and origin.

use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cli::{ServeArgs, ShowArgs};
use crate::commands::serve::generation;
use crate::config::server::{model_path, server_config};
use crate::config::{Origin, ResolvedSetting};
use crate::open;
use crate::open::bundled::Bundled;

pub(super) fn show(
    args: &ShowArgs,
    settings: Vec<ResolvedSetting>,
    bundled: Bundled,
) -> anyhow::Result<()> {
    // Invalid settings fail here as they do in `serve`.
    server_config(&args.serve)?;
    let settings = with_card(&args.serve, settings, bundled)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let shown: Vec<Value> = settings.iter().map(as_json).collect();
        let text =
            serde_json::to_string_pretty(&shown).context("cannot format the settings as JSON")?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    let width =
        |of: fn(&ResolvedSetting) -> &str| settings.iter().map(|setting| of(setting).len()).max();
    let names = width(|setting| &setting.name).unwrap_or(0);
    let values = width(value).unwrap_or(0).min(40);
    for setting in &settings {
        writeln!(
            out,
            "{:names$}  {:values$}  {}",
            setting.name,
            value(setting),
            setting.origin
        )?;
    }
    Ok(())
}

/// The settings of the command line, and the ones that the model's card sets.
fn with_card(
    args: &ServeArgs,
    mut settings: Vec<ResolvedSetting>,
    bundled: Bundled,
) -> anyhow::Result<Vec<ResolvedSetting>> {
    let loaded = open::load_or(model_path(args).map(|path| path.as_path()), bundled)?;
    let (_, _, by_card) = generation(args, &loaded);
    for card in by_card {
        let name = card.name.replace('_', "-");
        match settings.iter_mut().find(|setting| setting.name == name) {
            // A setting that is set elsewhere overrides the card's value.
            Some(flag) if flag.origin != Origin::Default => {}
            Some(flag) => {
                flag.value = card.value;
                flag.origin = card.origin;
            }
            None => settings.push(ResolvedSetting { name, ..card }),
        }
    }
    Ok(settings)
}

fn value(settings: &ResolvedSetting) -> &str {
    if settings.value.is_empty() {
        "-"
    } else {
        &settings.value
    }
}

fn as_json(settings: &ResolvedSetting) -> Value {
    let value = (!settings.value.is_empty()).then_some(&settings.value);
    json!({"name": settings.name, "value": value, "origin": settings.origin.to_string()})
}
