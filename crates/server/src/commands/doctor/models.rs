//! The models of the flags and of the cache: whether they open, and the memory they take.

use std::path::{Path, PathBuf};

use gguf::GgufFile;

use super::finding::{Finding, Severity};
use crate::cli::ServeArgs;
use crate::commands::hosting::{self, ModelEntry};
use crate::commands::{all_causes, serving_plan};
use crate::config;
use crate::config::server::{model_path, server_config};
use crate::open::bundled::Bundled;
use crate::open::by_name;
use crate::open::model_path::{check_model, name_of};

/// The most models of the cache that are looked at.
const MOST_CACHED: usize = 8;

pub(super) fn findings(args: &ServeArgs, bundled: Bundled) -> Vec<Finding> {
    let entries = match hosting::entries(args) {
        Ok(Some(entries)) => entries,
        Ok(None) => {
            let config = server_config(args);
            vec![ModelEntry {
                name: config.map_or_else(|_| "model".to_owned(), |config| config.model_name),
                path: model_path(args).cloned(),
                is_main: true,
            }]
        }
        Err(error) => {
            let finding = Finding::new("model", Severity::Problem, all_causes(&error));
            return vec![finding.action("correct the flag, or the file that it names")];
        }
    };
    let named = |path: &Path| {
        entries
            .iter()
            .any(|entry| entry.path.as_deref() == Some(path))
    };
    let mut found: Vec<Finding> = entries
        .iter()
        .map(|entry| of_entry(args, entry, bundled))
        .collect();
    if model_path(args).is_none() {
        let hub = config::hub::of_user();
        let cached = hub.map(|hub| hub.cache().list()).unwrap_or_default();
        let files = cached
            .into_iter()
            .filter(|model| model.path.is_file() && !named(&model.path));
        found.extend(files.take(MOST_CACHED).map(|model| {
            let entry = ModelEntry {
                name: model.name,
                path: Some(model.path),
                is_main: false,
            };
            let mut finding = of_entry(args, &entry, bundled);
            // It is not asked for, so it stops nothing.
            finding.severity = finding.severity.min(Severity::Note);
            finding
        }));
    }
    found
}

/// One model: its file, and what opening it would take.
fn of_entry(args: &ServeArgs, entry: &ModelEntry, bundled: Bundled) -> Finding {
    let name = &entry.name;
    let place = entry.path.as_ref().map_or_else(
        || "in the executable".to_owned(),
        |path| path.display().to_string(),
    );
    let finding = |severity, what: String| Finding::new("model", severity, what).at(place.clone());
    if let Some(path) = &entry.path
        && path.to_str().is_some_and(|word| name_of(word).is_some())
        && by_name::in_cache(path) == *path
    {
        let is_offline = config::hub::of_user().is_ok_and(|hub| hub.is_offline());
        let severity = if is_offline {
            Severity::Problem
        } else {
            Severity::Note
        };
        return finding(severity, format!("{name} is not downloaded")).action(format!(
            "`hearth inspect {place} --plan` shows its memory, `hearth pull {place}` downloads it"
        ));
    }
    match serving_plan::plan(&hosting::args_of(args, entry), bundled) {
        Ok(lines) if entry.path.is_none() => finding(Severity::Note, lines.join("\n"))
            .action("this is a toy; name a model to serve, such as unsloth/Qwen3.5-4B-GGUF:Q4_K_M"),
        Ok(lines) => finding(Severity::Ok, lines.join("\n")),
        Err(error) => {
            let opens = |path: &PathBuf| check_model(path).is_ok() && GgufFile::open(path).is_ok();
            let action = if entry.path.as_ref().is_none_or(opens) {
                "`hearth inspect FILE --plan` shows what fits; see --max-ctx, --kv-type and --max-sequences"
            } else {
                "name a GGUF file, or a model of the hub such as unsloth/Qwen3.5-4B-GGUF:Q4_K_M; `hearth list` shows those that are downloaded"
            };
            finding(Severity::Problem, format!("{name}: {}", all_causes(&error))).action(action)
        }
    }
}
