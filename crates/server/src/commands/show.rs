//! `hearth config show`: every setting with its value and where it came from.

use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cli::{ServeArgs, ShowArgs};
use crate::commands::serve::generation;
use crate::config::server::{model_path, server_config};
use crate::config::{Origin, Told};
use crate::open;
use crate::open::bundled::Bundled;

pub(super) fn show(args: &ShowArgs, told: Vec<Told>, bundled: Bundled) -> anyhow::Result<()> {
    // Wrong settings are refused here as `serve` would refuse them.
    server_config(&args.serve)?;
    let settings = all(&args.serve, told, bundled)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let shown: Vec<Value> = settings.iter().map(as_json).collect();
        let text = serde_json::to_string_pretty(&shown).context("settings are text")?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    let width = |of: fn(&Told) -> &str| settings.iter().map(|told| of(told).len()).max();
    let names = width(|told| &told.name).unwrap_or(0);
    let values = width(value).unwrap_or(0).min(40);
    for told in &settings {
        writeln!(
            out,
            "{:names$}  {:values$}  {}",
            told.name,
            value(told),
            told.origin
        )?;
    }
    Ok(())
}

/// What was typed, and what the model's card adds to it.
fn all(args: &ServeArgs, mut told: Vec<Told>, bundled: Bundled) -> anyhow::Result<Vec<Told>> {
    let loaded = open::load_or(model_path(args).map(|path| path.as_path()), bundled)?;
    let (_, _, by_card) = generation(args, &loaded);
    for card in by_card {
        let name = card.name.replace('_', "-");
        match told.iter_mut().find(|told| told.name == name) {
            // A flag that stands in for the card's value has been told already.
            Some(flag) if flag.origin != Origin::Default => {}
            Some(flag) => {
                flag.value = card.value;
                flag.origin = card.origin;
            }
            None => told.push(Told { name, ..card }),
        }
    }
    Ok(told)
}

fn value(told: &Told) -> &str {
    match told.value.is_empty() {
        true => "-",
        false => &told.value,
    }
}

fn as_json(told: &Told) -> Value {
    let value = (!told.value.is_empty()).then_some(&told.value);
    json!({"name": told.name, "value": value, "origin": told.origin.to_string()})
}
