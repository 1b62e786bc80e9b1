//! `hearth config show`: every setting with its value and origin.

use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cli::{ServeArgs, ShowArgs};
use crate::commands::serve::generation;
use crate::config::server::{model_path, server_config};
use crate::config::{Origin, ResolvedSetting, unset};
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
    let rows: Vec<(&ResolvedSetting, String)> = settings
        .iter()
        .map(|setting| (setting, value(setting)))
        .collect();
    let names = rows.iter().map(|(setting, _)| setting.name.len()).max();
    let values = rows.iter().map(|(_, value)| value.chars().count()).max();
    let (names, values) = (names.unwrap_or(0), values.unwrap_or(0).min(40));
    for (setting, value) in rows {
        let (name, origin) = (&setting.name, setting.origin);
        writeln!(out, "{name:names$}  {value:values$}  {origin}")?;
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

/// The value; in brackets what no value means.
fn value(setting: &ResolvedSetting) -> String {
    if setting.value.is_empty() {
        format!("({})", unset::meaning(&setting.name))
    } else {
        setting.value.clone()
    }
}

fn as_json(setting: &ResolvedSetting) -> Value {
    let value = (!setting.value.is_empty()).then_some(&setting.value);
    let mut shown =
        json!({"name": setting.name, "value": value, "origin": setting.origin.to_string()});
    if value.is_none() {
        shown["meaning"] = unset::meaning(&setting.name).into();
    }
    shown
}
