//! Merging settings into a file that may hold others, which stay unchanged.
//!
//! TOML and YAML are edited as text. The markers tell our lines from the user's at the next run,
//! and no well-kept YAML library keeps comments.

use anyhow::{Context, bail};
use serde_json::{Map, Value};

/// Markers around our lines in files that are edited as text.
const BEGIN: &str = "# hearth: begin";
const END: &str = "# hearth: end";

/// A file's text after a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Merged {
    /// The new text.
    pub(super) text: String,
    /// Settings that keep the user's value, as `name stays value`.
    pub(super) kept: Vec<String>,
}

/// Merges `ours` into a JSON object: objects are merged recursively, other values of ours win.
///
/// `choices` are JSON pointers to values that the user may choose. Ours is set only if there is
/// none, or an earlier one of ours (`hearth/...`).
///
/// # Errors
/// If the text is not a JSON object; comments are not plain JSON.
pub(super) fn json(old: &str, ours: &Value, choices: &[&str]) -> anyhow::Result<Merged> {
    let old_value: Value = if old.trim().is_empty() {
        Value::Object(Map::new())
    } else {
        serde_json::from_str(old).context("the file is not plain JSON")?
    };
    if !old_value.is_object() {
        bail!("the file is not a JSON object");
    }
    let mut ours = ours.clone();
    let mut kept = Vec::new();
    for choice in choices {
        let theirs = old_value.pointer(choice).and_then(Value::as_str);
        let Some(theirs) = theirs.filter(|theirs| !theirs.starts_with("hearth/")) else {
            continue;
        };
        if let Some(mine) = ours.pointer_mut(choice) {
            kept.push(format!("{} stays {theirs}", choice.trim_start_matches('/')));
            *mine = Value::String(theirs.to_owned());
        }
    }
    let mut merged = old_value.clone();
    merge_values(&mut merged, ours);
    let text = if merged == old_value {
        old.to_owned()
    } else {
        serde_json::to_string_pretty(&merged)? + "\n"
    };
    Ok(Merged { text, kept })
}

fn merge_values(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                match into.get_mut(&key) {
                    Some(old) => merge_values(old, value),
                    None => {
                        into.insert(key, value);
                    }
                }
            }
        }
        (into, from) => *into = from,
    }
}

/// Adds the top-level keys `top` at the front of a TOML document, and the lines `table` of a table
/// `name` at its end.
///
/// # Errors
/// If the text is not TOML, or has a table `name` outside our markers.
pub(super) fn toml(
    old: &str,
    top: &[(&str, String)],
    (name, table): (&str, &str),
) -> anyhow::Result<Merged> {
    let rest = without_our_lines(old);
    let theirs: toml::Table = rest.parse().context("the file is not TOML")?;
    let path: Vec<&str> = name.split('.').collect();
    let mut at = Some(&theirs);
    for part in &path[..path.len() - 1] {
        at = at.and_then(|table| table.get(*part)?.as_table());
    }
    if at.is_some_and(|table| table.contains_key(path[path.len() - 1])) {
        bail!("the file already has a table [{name}]; remove it, or change it by hand");
    }
    let mut kept = Vec::new();
    let mut first = Vec::new();
    for (key, value) in top {
        match theirs.get(*key) {
            Some(other) if other.to_string() != *value => kept.push(format!("{key} stays {other}")),
            Some(_) => {}
            None => first.push(format!("{key} = {value}")),
        }
    }
    let mut text = String::new();
    if !first.is_empty() {
        text += &block(&first.join("\n"));
    }
    text += &rest;
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text += &block(&format!("[{name}]\n{}", table.trim_end()));
    text.parse::<toml::Table>()
        .context("the merged text is not TOML")?;
    Ok(Merged { text, kept })
}

/// Sets top-level keys of a YAML document, each with its whole block, which begins with the key's
/// own line.
///
/// # Errors
/// If the document is in flow style (braces).
pub(super) fn yaml(old: &str, keys: &[(&str, String)]) -> anyhow::Result<Merged> {
    let begins = |line: &str| line.trim_start().starts_with(['{', '[']);
    let mut lines = old.lines().filter(|line| !line.trim().is_empty());
    if lines.next().is_some_and(begins) {
        bail!("the file is YAML in flow style (braces), which cannot be edited line by line");
    }
    let mut text = old.to_owned();
    for (key, block) in keys {
        text = with_block(&text, key, block);
    }
    Ok(Merged {
        text,
        kept: Vec::new(),
    })
}

/// The document with one top-level key's block replaced, or appended.
fn with_block(old: &str, key: &str, block: &str) -> String {
    let mut text = String::new();
    let mut lines = old.lines().peekable();
    let mut done = false;
    while let Some(line) = lines.next() {
        let opens = line
            .strip_prefix(key)
            .is_some_and(|rest| rest.starts_with(':'));
        if !opens || done {
            text += line;
            text.push('\n');
            continue;
        }
        done = true;
        // Indented lines and list items belong to the old block.
        while lines
            .next_if(|next| next.starts_with([' ', '\t', '-']))
            .is_some()
        {}
        text += block.trim_end();
        text.push('\n');
    }
    if !done {
        text += block.trim_end();
        text.push('\n');
    }
    text
}

/// Appends items to a YAML list.
///
/// # Errors
/// If the document is not a list.
pub(super) fn yaml_items(old: &str, items: &str) -> anyhow::Result<Merged> {
    let rest = without_our_lines(old);
    let mut lines = rest.lines().map(str::trim_end);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    if first.is_some_and(|line| !line.starts_with('-') && line != "---") {
        bail!("the file is not a YAML list");
    }
    let mut text = rest;
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text += &block(items.trim_end());
    Ok(Merged {
        text,
        kept: Vec::new(),
    })
}

/// Lines between our markers.
fn block(lines: &str) -> String {
    format!("{BEGIN}\n{lines}\n{END}\n")
}

/// The text without our lines of an earlier run.
fn without_our_lines(text: &str) -> String {
    let mut kept = String::new();
    let mut ours = false;
    for line in text.split_inclusive('\n') {
        match line.trim_end() {
            BEGIN => ours = true,
            END if ours => ours = false,
            _ if !ours => kept += line,
            _ => {}
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_objects_merge_and_user_choices_stay() {
        let old = r#"{"theme": "dark", "model": "cloud/big", "provider": {"cloud": {"a": 1}, "hearth": {"old": true, "url": "x"}}}"#;
        let ours = json!({"model": "hearth/ember", "small": "hearth/ember", "provider": {"hearth": {"url": "y"}}});
        let merged = json(old, &ours, &["/model", "/small"]).unwrap();
        let value: Value = serde_json::from_str(&merged.text).unwrap();
        assert_eq!(value["theme"], "dark");
        assert_eq!(value["model"], "cloud/big");
        assert_eq!(value["small"], "hearth/ember");
        assert_eq!(value["provider"]["cloud"]["a"], 1);
        assert_eq!(
            value["provider"]["hearth"],
            json!({"old": true, "url": "y"})
        );
        assert_eq!(merged.kept, ["model stays cloud/big"]);
        let again = json(&merged.text, &ours, &["/model", "/small"]).unwrap();
        assert_eq!(again.text, merged.text);
        for wrong in ["{// no\n}", "[]", "{"] {
            assert!(json(wrong, &ours, &[]).is_err(), "{wrong}");
        }
    }

    const TOP: [(&str, &str); 2] = [("model", "\"ember\""), ("model_provider", "\"hearth\"")];

    fn codex(old: &str) -> anyhow::Result<Merged> {
        let top: Vec<(&str, String)> = TOP.iter().map(|(k, v)| (*k, (*v).to_owned())).collect();
        toml(old, &top, ("model_providers.hearth", "name = \"Hearth\"\n"))
    }

    #[test]
    fn toml_merge_keeps_comments_and_tables_and_is_idempotent() {
        let old = "# mine\napproval = \"never\"\n\n[model_providers.other]\nname = \"x\" # why\n";
        let merged = codex(old).unwrap();
        assert!(merged.text.contains(old), "{}", merged.text);
        let table: toml::Table = merged.text.parse().unwrap();
        assert_eq!(table["model"].as_str(), Some("ember"));
        assert_eq!(
            table["model_providers"]["hearth"]["name"].as_str(),
            Some("Hearth")
        );
        assert_eq!(codex(&merged.text).unwrap(), merged);
        let chosen = codex("model = \"big\"\n").unwrap();
        assert_eq!(chosen.kept, ["model stays \"big\""]);
        assert!(chosen.text.contains("model_provider = \"hearth\""));
        assert!(codex("[model_providers.hearth]\na = 1\n").is_err());
        assert!(codex("model = ").is_err());
    }

    #[test]
    fn yaml_blocks_are_replaced_and_other_keys_stay() {
        let old = "# mine\nmodel:\n  default: big\n  list:\n  - a\n- odd\nother: 1\n";
        let ours = [("model", "model:\n  default: ember\n".to_owned())];
        let merged = yaml(old, &ours).unwrap();
        assert_eq!(merged.text, "# mine\nmodel:\n  default: ember\nother: 1\n");
        assert_eq!(yaml(&merged.text, &ours).unwrap(), merged);
        assert_eq!(yaml("", &ours).unwrap().text, ours[0].1);
        assert_eq!(
            yaml("models: 1\n", &ours).unwrap().text,
            "models: 1\nmodel:\n  default: ember\n"
        );
        assert!(yaml("{model: 1}", &ours).is_err());
    }

    #[test]
    fn yaml_items_are_appended_once() {
        let old = "- model_id: mine\n  api_base: x";
        let merged = yaml_items(old, "- model_id: ember\n").unwrap();
        assert!(merged.text.starts_with(old) && merged.text.contains("\n- model_id: ember\n"));
        assert_eq!(
            yaml_items(&merged.text, "- model_id: ember").unwrap(),
            merged
        );
        assert!(yaml_items("models:\n- a\n", "- b").is_err());
    }
}
