//! `hearth pull`, `hearth list` and `hearth rm`: models by name, and the cache.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hub::{CachedModel, Hub, ModelName, Pulled};
use serde_json::{Value, json};

use crate::cli::{ListArgs, PullArgs, RmArgs};
use crate::config::{self, card};
use crate::open::{self, by_name};
use crate::progress::bytes_text;

/// Beginnings of the names of draft files that are run; those of other kinds are not offered.
const RUN_DRAFTS: [&str; 2] = ["dflash-", "dspark-"];

pub(super) fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let hub = config::hub::of_user()?;
    let names = parsed(&hub, &args.names)?;
    let mut out = std::io::stdout().lock();
    for name in &names {
        let pulled = by_name::pull(&hub, name, &|_| {})?;
        match pulled.downloaded_bytes {
            0 => tracing::info!("{name} is up to date"),
            bytes => tracing::info!("{name} is pulled: {} came", bytes_text(bytes)),
        }
        let drafts = drafts(&hub, &pulled);
        if args.json {
            let object = json!({
                "name": name.to_string(),
                "path": pulled.path.display().to_string(),
                "size_bytes": pulled.size_bytes,
                "downloaded_bytes": pulled.downloaded_bytes,
                "drafts": drafts,
            });
            writeln!(out, "{object}")?;
        } else {
            if !drafts.is_empty() {
                let all = drafts.join(" or ");
                tracing::info!("a draft makes it faster: `hearth serve {name} --draft {all}`");
            }
            writeln!(out, "{}", pulled.path.display())?;
        }
    }
    Ok(())
}

/// Names of drafts for a pulled model: of its repository, and the one that its card knows.
fn drafts(hub: &Hub, pulled: &Pulled) -> Vec<String> {
    let by_card = card_draft(hub, &pulled.path).into_iter();
    let is_run = |name: &&String| RUN_DRAFTS.iter().any(|prefix| name.contains(prefix));
    let beside = pulled.drafts.iter().filter(is_run).cloned();
    by_card.chain(beside).collect()
}

/// The draft that the card of a model knows. A file that does not open has none: `serve` says why.
fn card_draft(hub: &Hub, path: &Path) -> Option<String> {
    if !path.is_file() {
        return None;
    }
    let loaded = open::load(path).ok()?;
    let found = card::find(&loaded.info, None);
    let draft = found.card.draft_of(&loaded.spec.name)?;
    Some(hub.parse(&draft.source).ok()?.to_string())
}

pub(super) fn list(args: &ListArgs) -> anyhow::Result<()> {
    let hub = config::hub::of_user()?;
    let models = hub.cache().list();
    let mut out = std::io::stdout().lock();
    if args.json {
        let all: Vec<Value> = models.iter().map(as_json).collect();
        writeln!(out, "{}", Value::Array(all))?;
        return Ok(());
    }
    if models.is_empty() {
        let root = hub.cache().root().display();
        tracing::info!("no models in {root}; `hearth pull OWNER/REPO` downloads one");
        return Ok(());
    }
    let names = models.iter().map(|model| model.name.chars().count());
    let width = names.max().unwrap_or(0).max("NAME".len());
    writeln!(
        out,
        "{:width$}  {:12}  {:>10}  USED",
        "NAME", "QUANT", "SIZE"
    )?;
    let now = SystemTime::now();
    for model in &models {
        let no_quant = if model.path.is_dir() {
            "safetensors"
        } else {
            "-"
        };
        let quant = model.quant.as_deref().unwrap_or(no_quant);
        let size = bytes_text(model.size_bytes);
        let used = model.used.and_then(|used| now.duration_since(used).ok());
        let used = used.map_or("-".to_owned(), age);
        writeln!(out, "{:width$}  {quant:12}  {size:>10}  {used}", model.name)?;
    }
    Ok(())
}

fn as_json(model: &CachedModel) -> Value {
    let used = model
        .used
        .and_then(|used| used.duration_since(UNIX_EPOCH).ok());
    json!({
        "name": model.name,
        "quant": model.quant,
        "size_bytes": model.size_bytes,
        "used": used.map(|used| used.as_secs()),
        "path": model.path.display().to_string(),
    })
}

/// How long ago, in the largest unit.
fn age(since: Duration) -> String {
    let seconds = since.as_secs();
    let (count, unit) = match seconds {
        0..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    match count {
        0 => "now".to_owned(),
        1 => format!("1 {unit} ago"),
        count => format!("{count} {unit}s ago"),
    }
}

pub(super) fn rm(args: &RmArgs) -> anyhow::Result<()> {
    let hub = config::hub::of_user()?;
    for name in parsed(&hub, &args.names)? {
        let removed = hub.cache().remove(&name)?;
        let free = bytes_text(removed.bytes);
        match removed.files {
            1 => tracing::info!("{name}: 1 file removed, {free} free again"),
            files => tracing::info!("{name}: {files} files removed, {free} free again"),
        }
    }
    Ok(())
}

/// All names, before anything is done for one.
fn parsed(hub: &Hub, names: &[String]) -> anyhow::Result<Vec<ModelName>> {
    let names = names.iter().map(|name| Ok(hub.parse(name)?));
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_in_the_largest_unit() {
        let of = |seconds| age(Duration::from_secs(seconds));
        assert_eq!(
            (of(5), of(60)),
            ("now".to_owned(), "1 minute ago".to_owned())
        );
        assert_eq!(
            (of(7300), of(200_000)),
            ("2 hours ago".to_owned(), "2 days ago".to_owned())
        );
    }
}
