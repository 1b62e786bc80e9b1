//! `hearth connect`: what to tell a client so that it talks to this server, printed or written.

mod clients;
mod merge;
mod pieces;

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::cli::ConnectArgs;
use crate::commands::http_client::Server;
use crate::config::directories;
use clients::{CLIENTS, Client};
use pieces::FileFormat;

/// How long the server may take to tell its model.
const PATIENCE: Duration = Duration::from_secs(10);
/// Sent where the server wants no key but the client wants one.
const NO_KEY: &str = "none";
/// The most tokens of a reply that clients are told of.
const MOST_OUTPUT: usize = 32_768;

/// The server that clients are pointed at.
pub(super) struct Target {
    /// `http://host:port`.
    base: String,
    /// The model's id.
    model: String,
    /// Its context in tokens.
    context: usize,
    /// The key it asks for.
    key: Option<String>,
}

impl Target {
    fn key(&self) -> &str {
        self.key.as_deref().unwrap_or(NO_KEY)
    }

    /// Tokens of a reply: a quarter of the context, within reason.
    fn output(&self) -> usize {
        (self.context / 4).min(MOST_OUTPUT)
    }
}

pub(super) fn connect(args: &ConnectArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let Some(name) = &args.client else {
        for client in &CLIENTS {
            writeln!(out, "{:14} {}", client.name, client.title)?;
        }
        return Ok(());
    };
    let client = find(name)?;
    let target = target(args)?;
    let places =
        directories::places().context("HOME is not set, so there is no place for settings")?;
    let pieces = (client.pieces)(&target, &places);
    for piece in &pieces {
        let file = piece.file.display();
        if !args.write {
            writeln!(out, "# {file}\n{}", piece.text()?)?;
            continue;
        }
        let written = piece.write()?;
        match (&written.backup, written.changed) {
            (_, false) => writeln!(out, "{file} says so already")?,
            (None, true) => writeln!(out, "{file} written")?,
            (Some(copy), true) => {
                writeln!(out, "{file} changed; what it was is in {}", copy.display())?;
            }
        }
        for kept in &written.kept {
            writeln!(out, "  your own {kept}")?;
        }
    }
    let sourced = pieces.iter().find_map(|piece| match piece.form {
        FileFormat::Variables(_) if args.write => Some(format!(". {}\n", piece.file.display())),
        _ => None,
    });
    writeln!(
        out,
        "# then\n{}{}",
        sourced.unwrap_or_default(),
        (client.then)(&target)
    )?;
    Ok(())
}

fn find(name: &str) -> anyhow::Result<&'static Client> {
    let known = CLIENTS.iter().find(|client| client.name == name);
    known.with_context(|| {
        let names: Vec<&str> = CLIENTS.iter().map(|client| client.name).collect();
        format!("{name}: no such client; use one of {}", names.join(", "))
    })
}

/// What the flags say, and for the rest what the server tells.
fn target(args: &ConnectArgs) -> anyhow::Result<Target> {
    let mut server = Server::parse(&args.url)?;
    server.key = args.api_key.clone();
    server.patience = PATIENCE;
    let base = server.base();
    if let (Some(model), Some(context)) = (&args.model, args.context) {
        return Ok(Target {
            base,
            model: model.clone(),
            context,
            key: args.api_key.clone(),
        });
    }
    let answer = server.ask("/v1/models", None).with_context(|| {
        format!(
            "{base} does not answer; start `hearth serve`, or give --url, or --model and --context"
        )
    })?;
    if answer.status == 401 {
        bail!("{base} asks for a key; give it with --api-key");
    }
    let list = answer.json();
    let listed = list["data"].as_array().into_iter().flatten();
    let wanted = |entry: &&serde_json::Value| match &args.model {
        Some(model) => entry["id"] == model.as_str(),
        None => entry["id"].is_string(),
    };
    let entry = listed.into_iter().find(wanted);
    let model = match (&args.model, entry) {
        (Some(model), _) => model.clone(),
        (None, Some(entry)) => entry["id"].as_str().unwrap_or_default().to_owned(),
        (None, None) => bail!(
            "{base}/v1/models names no model (status {}); give --model",
            answer.status
        ),
    };
    let told = entry.and_then(|entry| entry["context_length"].as_u64());
    let context = args
        .context
        .or(told.and_then(|tokens| usize::try_from(tokens).ok()));
    Ok(Target {
        context: context.with_context(|| {
            format!("{base} does not tell the context of {model}; give it with --context")
        })?,
        base,
        model,
        key: args.api_key.clone(),
    })
}
