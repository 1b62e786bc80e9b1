//! Responses that are kept by their ids, put into the input of a request that refers to them.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::dialect::fields::parse_body;
use crate::error::ChatError;

/// A kept turn of a conversation: a request's own input and the items that answered it, as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTurn {
    /// The `input` of the request: a text or items.
    pub input: String,
    /// The `output` of its response.
    pub output: String,
}

/// The fields of a request that concern kept responses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StateFields {
    /// The response that this one follows.
    pub previous: Option<String>,
    /// Whether the response may be kept; the default of the protocol.
    pub store: bool,
    /// Whether items of the input refer to kept ones.
    pub has_references: bool,
    /// The request's own input, as JSON.
    pub input: String,
}

#[derive(Deserialize)]
struct RawState<'a> {
    previous_response_id: Option<Value>,
    store: Option<Value>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

impl StateFields {
    /// Reads them. A body that is wrong has none; its own parser says what is wrong.
    pub fn read(body: &[u8]) -> StateFields {
        let Ok(state) = serde_json::from_slice::<RawState<'_>>(body) else {
            return StateFields::default();
        };
        let input = state.input.map_or("[]", RawValue::get);
        StateFields {
            previous: match state.previous_response_id {
                Some(Value::String(id)) => Some(id),
                _ => None,
            },
            store: !matches!(state.store, Some(Value::Bool(false))),
            has_references: input.contains("item_reference"),
            input: input.to_owned(),
        }
    }
}

/// The body with the turns before it in its input, and with the items that it refers to; `item`
/// gives the JSON of a kept item. A reference to an unknown item stays, for the parser to refuse.
///
/// # Errors
/// If the body is no JSON object.
pub fn with_history(
    body: &[u8],
    turns: &[StoredTurn],
    item: impl Fn(&str) -> Option<String>,
) -> Result<Vec<u8>, ChatError> {
    let mut map = parse_body(body)?;
    let mut items = Vec::new();
    for turn in turns {
        items.extend(items_of(parsed(&turn.input)));
        items.extend(items_of(parsed(&turn.output)));
    }
    match map.get_mut("input").map(Value::take) {
        Some(Value::Array(own)) => items.extend(own.into_iter().map(|own| {
            let found = referred(&own).and_then(&item);
            found.map_or(own, |found| parsed(&found))
        })),
        Some(other @ Value::String(_)) => items.extend(items_of(other)),
        // What is wrong with it is the parser's to say.
        Some(other) if !other.is_null() => {
            map.insert("input".to_owned(), other);
            return Ok(written(&map));
        }
        _ => {}
    }
    map.insert("input".to_owned(), Value::Array(items));
    map.shift_remove("previous_response_id");
    Ok(written(&map))
}

/// The ids of the items in an input or an output.
pub fn item_ids(items: &str) -> Vec<String> {
    let Value::Array(items) = parsed(items) else {
        return Vec::new();
    };
    let ids = items.iter().filter_map(|item| item.get("id")?.as_str());
    ids.map(str::to_owned).collect()
}

/// The JSON of the item with an id in an input or an output.
pub fn item_by_id(items: &str, id: &str) -> Option<String> {
    let Value::Array(items) = parsed(items) else {
        return None;
    };
    let found = items
        .iter()
        .find(|item| item.get("id").is_some_and(|own| own == id));
    found.map(Value::to_string)
}

/// The items of an input as a list; `id` numbers those that have none.
pub fn listed_items(input: &str, id: impl Fn(usize) -> String) -> Vec<Value> {
    let items = items_of(parsed(input)).into_iter().enumerate();
    let with_id = |(index, mut item): (usize, Value)| {
        if let Value::Object(map) = &mut item {
            map.entry("id").or_insert_with(|| id(index).into());
            map.entry("type").or_insert_with(|| "message".into());
        }
        item
    };
    items.map(with_id).collect()
}

/// Kept JSON was checked when it was kept.
fn parsed(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or(Value::Null)
}

fn written(map: &Map<String, Value>) -> Vec<u8> {
    serde_json::to_vec(map).unwrap_or_default()
}

/// An input as items: a text is a message of the user.
fn items_of(input: Value) -> Vec<Value> {
    match input {
        Value::Array(items) => items,
        Value::String(text) => vec![json!({
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        })],
        _ => Vec::new(),
    }
}

/// The id that an item refers to.
fn referred(item: &Value) -> Option<&str> {
    if item.get("type")? != "item_reference" {
        return None;
    }
    item.get("id")?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_a_body_is_read_without_its_items() {
        let body = json!({"input": [{"type": "item_reference", "id": "a"}],
            "previous_response_id": "resp_1"});
        let state = StateFields::read(body.to_string().as_bytes());
        assert_eq!(state.previous.as_deref(), Some("resp_1"));
        assert!(state.store && state.has_references);
        assert_eq!(parsed(&state.input), body["input"]);
        let state = StateFields::read(b"{\"input\": \"hi\", \"store\": false}");
        assert!(!state.store && !state.has_references);
        assert_eq!(state.input, "\"hi\"");
        assert_eq!(StateFields::read(b"nonsense"), StateFields::default());
    }

    #[test]
    fn turns_before_and_referred_items_become_input() {
        let turns = [StoredTurn {
            input: json!("one").to_string(),
            output: json!([{"type": "message", "id": "msg_1"}]).to_string(),
        }];
        let body = json!({"model": "m", "previous_response_id": "resp_1",
            "input": [{"type": "item_reference", "id": "fc_1"},
                {"type": "item_reference", "id": "no"}]});
        let item = |id: &str| (id == "fc_1").then(|| json!({"id": "fc_1"}).to_string());
        let whole = with_history(body.to_string().as_bytes(), &turns, item).unwrap();
        let whole: Value = serde_json::from_slice(&whole).unwrap();
        assert_eq!(
            whole,
            json!({"model": "m", "input": [
                {"type": "message", "role": "user",
                    "content": [{"type": "input_text", "text": "one"}]},
                {"type": "message", "id": "msg_1"},
                {"id": "fc_1"},
                {"type": "item_reference", "id": "no"},
            ]})
        );
        let text = with_history(b"{\"input\": \"two\"}", &turns, |_| None).unwrap();
        let text: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(text["input"].as_array().unwrap().len(), 3);
        let wrong = with_history(b"{\"input\": 3}", &turns, |_| None).unwrap();
        assert_eq!(wrong, b"{\"input\":3}");
    }

    #[test]
    fn items_are_found_and_listed_by_id() {
        let items = json!([{"id": "a", "role": "user"}, {"role": "user"}]).to_string();
        assert_eq!(item_ids(&items), ["a"]);
        assert_eq!(
            item_by_id(&items, "a").unwrap(),
            "{\"id\":\"a\",\"role\":\"user\"}"
        );
        assert_eq!(item_by_id(&items, "b"), None);
        let listed = listed_items(&items, |index| format!("msg_{index}"));
        assert_eq!(listed[1]["id"], "msg_1");
        assert_eq!(listed[0]["type"], "message");
    }
}
