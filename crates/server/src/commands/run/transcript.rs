//! Conversations in files: JSON with the messages as the chat API takes them.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use chat::conversation::{Message, Role};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

/// Writes a conversation, which only this user can read. Another file of that name that holds no
/// conversation stays.
///
/// # Errors
/// If the file cannot be written, or is something else.
pub(super) fn save(path: &Path, model: &str, history: &[Message]) -> anyhow::Result<()> {
    let place = path.display();
    if path.exists() && load(path).is_err() {
        bail!("{place} exists and is no saved conversation; choose another name");
    }
    let messages: Vec<Value> = history.iter().map(as_json).collect();
    let text = serde_json::to_string_pretty(&json!({"model": model, "messages": messages}))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut file = NamedTempFile::new_in(folder).with_context(|| place.to_string())?;
    writeln!(file, "{text}").with_context(|| place.to_string())?;
    file.persist(path).with_context(|| place.to_string())?;
    Ok(())
}

fn as_json(message: &Message) -> Value {
    let mut object = json!({"role": message.role.name(), "content": message.content});
    if let Some(reasoning) = &message.reasoning {
        object["reasoning_content"] = reasoning.as_str().into();
    }
    object
}

/// Reads a conversation.
///
/// # Errors
/// If the file cannot be read, or an entry is no message.
pub(super) fn load(path: &Path) -> anyhow::Result<Vec<Message>> {
    let place = path.display();
    let text = fs::read_to_string(path).with_context(|| place.to_string())?;
    let value: Value = serde_json::from_str(&text).with_context(|| place.to_string())?;
    let Some(messages) = value["messages"].as_array() else {
        bail!("{place}: no list \"messages\", as /save writes it");
    };
    let entries = messages.iter().enumerate();
    entries
        .map(|(index, entry)| {
            message(entry).with_context(|| {
                format!(
                    "{place}: messages[{index}] needs a role (system, user or assistant) and a text"
                )
            })
        })
        .collect()
}

fn message(entry: &Value) -> Option<Message> {
    let role = match entry["role"].as_str()? {
        "system" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        _ => return None,
    };
    let mut message = Message::new(role, entry["content"].as_str()?);
    message.reasoning = entry["reasoning_content"].as_str().map(str::to_owned);
    Some(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_conversations_load_and_other_files_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        let mut answer = Message::new(Role::Assistant, "Hi \u{1b}.");
        answer.reasoning = Some("A greeting.".to_owned());
        let history = [
            Message::new(Role::System, "Be brief."),
            Message::new(Role::User, "Hello\nthere"),
            answer,
        ];
        for _ in 0..2 {
            save(&path, "m", &history).unwrap();
            let found = load(&path).unwrap();
            assert_eq!(format!("{found:?}"), format!("{history:?}"));
        }
        let other = folder.path().join("other.json");
        fs::write(&other, "{\"a\": 1}").unwrap();
        assert!(
            save(&other, "m", &history)
                .unwrap_err()
                .to_string()
                .contains("another name")
        );
        assert_eq!(fs::read_to_string(&other).unwrap(), "{\"a\": 1}");
        fs::write(
            &other,
            "{\"messages\": [{\"role\": \"tool\", \"content\": \"\"}]}",
        )
        .unwrap();
        assert!(
            load(&other)
                .unwrap_err()
                .to_string()
                .contains("messages[0]")
        );
    }
}
