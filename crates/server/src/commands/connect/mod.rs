//! `hearth connect`: settings that point a client at this server, printed or written to its files.

mod clients;
mod coding_agents;
mod launch;
mod merge;
mod settings_file;
mod starts;

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::cli::ConnectArgs;
use crate::commands::http_client::HttpClient;
use crate::config::directories;
use clients::{CLIENTS, Client};
pub(super) use launch::launch;
use settings_file::FileFormat;

/// Longest wait for the server's model list.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Sent if the client needs a key and the server does not.
const NO_KEY: &str = "none";
/// The largest reply length that clients are configured for, in tokens.
const MAX_OUTPUT_TOKENS: usize = 32_768;

/// The server and model that clients are configured for.
pub(super) struct ServedModel {
    /// `http://host:port`.
    base: String,
    /// The model's id.
    model: String,
    /// The model's context in tokens.
    context: usize,
    /// The API key, if the server requires one.
    key: Option<String>,
}

impl ServedModel {
    fn key(&self) -> &str {
        self.key.as_deref().unwrap_or(NO_KEY)
    }

    /// The longest reply in tokens: a quarter of the context, up to [`MAX_OUTPUT_TOKENS`].
    fn output(&self) -> usize {
        (self.context / 4).min(MAX_OUTPUT_TOKENS)
    }
}

/// The names of all clients.
pub(super) fn names() -> [&'static str; CLIENTS.len()] {
    CLIENTS.map(|client| client.name)
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
    let target = served_model(args)?;
    let directories = directories::of_user()
        .context("HOME is not set, so the client's settings cannot be found; set it")?;
    let files = (client.files)(&target, &directories);
    for settings in &files {
        let file = settings.file.display();
        if !args.write {
            writeln!(out, "# {file}\n{}", settings.text()?)?;
            continue;
        }
        let written = settings.write()?;
        match (&written.backup, written.changed) {
            (_, false) => writeln!(out, "{file} is up to date")?,
            (None, true) => writeln!(out, "{file} written")?,
            (Some(copy), true) => {
                writeln!(out, "{file} changed; the old file is {}", copy.display())?;
            }
        }
        for kept in &written.kept {
            writeln!(out, "  kept yours: {kept}")?;
        }
    }
    let sourced = files.iter().find_map(|settings| match settings.format {
        FileFormat::Variables(_) if args.write => Some(format!(". {}\n", settings.file.display())),
        _ => None,
    });
    writeln!(
        out,
        "# next\n{}{}",
        sourced.unwrap_or_default(),
        (client.next)(&target)
    )?;
    Ok(())
}

fn find(name: &str) -> anyhow::Result<&'static Client> {
    let known = CLIENTS.iter().find(|client| client.name == name);
    known.with_context(|| {
        let names: Vec<&str> = CLIENTS.iter().map(|client| client.name).collect();
        // Many clients' programs have the first word of the name: `claude`, `qwen`, `openai`.
        let near = names.iter().find(|known| known.starts_with(name));
        let near = near.map_or(String::new(), |near| format!("did you mean {near}? "));
        format!(
            "{name}: unknown client; {near}use one of {}",
            names.join(", ")
        )
    })
}

/// Model and context by the flags, and else as the server reports them.
fn served_model(args: &ConnectArgs) -> anyhow::Result<ServedModel> {
    let client = HttpClient::new(&args.url, args.api_key.clone(), TIMEOUT)?;
    let base = client.base().to_owned();
    if let (Some(model), Some(context)) = (&args.model, args.context) {
        return Ok(ServedModel {
            base,
            model: model.clone(),
            context,
            key: args.api_key.clone(),
        });
    }
    let response = client.get("/v1/models").with_context(|| {
        format!(
            "{base} does not respond; start `hearth serve`, or give --url, or --model and --context"
        )
    })?;
    if response.status == 401 {
        bail!("{base} requires a key; give it with --api-key");
    }
    let list = response.json();
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
            response.status
        ),
    };
    let reported = entry.and_then(|entry| entry["context_length"].as_u64());
    let context = args
        .context
        .or(reported.and_then(|tokens| usize::try_from(tokens).ok()));
    Ok(ServedModel {
        context: context.with_context(|| {
            format!("{base} does not report the context of {model}; give it with --context")
        })?,
        base,
        model,
        key: args.api_key.clone(),
    })
}
