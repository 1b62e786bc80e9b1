//! Putting settings into a file that may hold others: what is not ours stays as it is.

use anyhow::{Context, bail};
use serde_json::{Map, Value};

/// Lines of ours in files that are not rewritten as a whole stand between these.
const BEGIN: &str = "# hearth: begin";
const END: &str = "# hearth: end";

/// What was made of a file's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Merged {
    /// The new text.
    pub(super) text: String,
    /// What of ours was left out because the user's own says something else.
    pub(super) kept: Vec<String>,
}

/// A JSON document with `ours` in it: objects are joined, anything else of ours wins. The values at the JSON
/// pointers `choices` are the user's to choose: they are set only where nothing is, or where ours was.
pub(super) fn json(old: &str, ours: &Value, choices: &[&str]) -> anyhow::Result<Merged> {
    let old_value: Value = match old.trim().is_empty() {
        true => Value::Object(Map::new()),
        false => serde_json::from_str(old).context("it is not plain JSON")?,
    };
    if !old_value.is_object() {
        bail!("it is no JSON object");
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
    join(&mut merged, ours);
    let text = match merged == old_value {
        true => old.to_owned(),
        false => serde_json::to_string_pretty(&merged)? + "\n",
    };
    Ok(Merged { text, kept })
}

fn join(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                match into.get_mut(&key) {
                    Some(old) => join(old, value),
                    None => {
                        into.insert(key, value);
                    }
                }
            }
        }
        (into, from) => *into = from,
    }
}

/// A TOML document with `top`, keys and values before all tables, and `table`, whole lines of a table called
/// `name`, behind everything.
pub(super) fn toml(
    old: &str,
    top: &[(&str, String)],
    (name, table): (&str, &str),
) -> anyhow::Result<Merged> {
    let rest = without_ours(old);
    let theirs: toml::Table = rest.parse().context("it is not TOML")?;
    let path: Vec<&str> = name.split('.').collect();
    let mut at = Some(&theirs);
    for part in &path[..path.len() - 1] {
        at = at.and_then(|table| table.get(*part)?.as_table());
    }
    if at.is_some_and(|table| table.contains_key(path[path.len() - 1])) {
        bail!("it has a table [{name}] already; take that out, or change it by hand");
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
        .context("what would be written is not TOML")?;
    Ok(Merged { text, kept })
}

/// A YAML document whose top-level `keys` are ours; each comes with its block, the key's own line first.
pub(super) fn yaml(old: &str, keys: &[(&str, String)]) -> anyhow::Result<Merged> {
    let begins = |line: &str| line.trim_start().starts_with(['{', '[']);
    let mut lines = old.lines().filter(|line| !line.trim().is_empty());
    if lines.next().is_some_and(begins) {
        bail!("it is YAML in braces, which is not taken apart here");
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

/// The document with the block of one top-level key replaced, or put at the end.
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
        // The old block goes on over lines that are indented, or items of a list.
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

/// A YAML list with our items at its end.
pub(super) fn yaml_items(old: &str, items: &str) -> anyhow::Result<Merged> {
    let rest = without_ours(old);
    let mut lines = rest.lines().map(str::trim_end);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    if first.is_some_and(|line| !line.starts_with('-') && line != "---") {
        bail!("it is no YAML list");
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

fn block(lines: &str) -> String {
    format!("{BEGIN}\n{lines}\n{END}\n")
}

/// The text without what was put there before.
fn without_ours(text: &str) -> String {
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
    fn json_is_joined_and_choices_stay_the_users() {
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
    fn toml_keeps_comments_and_other_tables_and_can_be_written_twice() {
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
    fn yaml_blocks_are_replaced_whole_and_the_rest_stays() {
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
    fn items_are_added_to_a_list_once() {
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
