//! The OpenAPI description of this server.

use axum::Json;
use serde_json::{Map, Value, json};

use super::status::VERSION;

mod operations;
mod replies;
mod requests;

use operations::{EVENTS, JSON, OPERATIONS, Operation, ResponseContent};

/// `GET /openapi.json`.
pub(super) async fn openapi() -> Json<Value> {
    Json(document())
}

fn document() -> Value {
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        let full = match operation.path {
            "/" | "/v1" => operation.path.to_owned(),
            path if path.starts_with("/api/") => path.to_owned(),
            path => format!("/v1{path}"),
        };
        let methods = paths.entry(full).or_insert_with(|| json!({}));
        methods[operation.method] = operation_object(operation);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Hearth",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "A local language model server. Every path behind /v1 is served without it too.",
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": components(),
        },
    })
}

fn operation_object(operation: &Operation) -> Value {
    let anthropic = operation.path.starts_with("/messages");
    let ollama = operation.path.starts_with("/api/");
    let open = matches!(operation.path, "/" | "/health" | "/status");
    let mut responses = Map::new();
    responses.insert("200".to_owned(), success(operation));
    // Health and the pages are open to everyone.
    let key = (!open).then_some(401);
    for status in operation.errors.iter().copied().chain(key) {
        let (status, description) = match status {
            400 => ("400", "The request is wrong; the message says where"),
            401 => ("401", "No key, or a wrong one"),
            404 => ("404", "Nothing of that name"),
            413 => ("413", "The body is too large"),
            429 if anthropic => ("529", "The queue is full"),
            429 => ("429", "The queue is full"),
            503 => ("503", "The model is loading, or the server is stopping"),
            _ => ("500", "A defect of the server or the model's file"),
        };
        let schema = match (operation.body, anthropic) {
            // Health reports its state in its own format.
            (None, _) if status == "503" && matches!(operation.path, "/" | "/v1" | "/health") => {
                json!({"$ref": "#/components/schemas/Health"})
            }
            (_, true) => json!({"$ref": "#/components/schemas/AnthropicError"}),
            _ if ollama => json!({"$ref": "#/components/schemas/OllamaError"}),
            (_, false) => json!({"$ref": "#/components/schemas/Error"}),
        };
        let content = json!({ JSON: {"schema": schema} });
        let response = json!({"description": description, "content": content});
        responses.insert(status.to_owned(), response);
    }
    let mut object = json!({
        "operationId": operation_id(operation),
        "summary": operation.summary,
        "responses": responses,
    });
    if open {
        object["security"] = json!([]);
    }
    if operation.path.contains("{id}") {
        object["parameters"] = json!([
            {"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}
        ]);
    }
    if operation.path == "/slots" {
        object["parameters"] = json!([{
            "name": "fail_on_no_slot", "in": "query", "required": false,
            "description": "1 makes a device without a free sequence an error",
            "schema": {"type": "integer", "enum": [0, 1]},
        }]);
    }
    if let Some(schema) = operation.body {
        let schema = json!({"$ref": format!("#/components/schemas/{schema}")});
        object["requestBody"] = json!({"required": true, "content": { JSON: {"schema": schema} }});
    }
    object
}

/// A name in camel case: the method, then the words of the path.
fn operation_id(operation: &Operation) -> String {
    let mut id = operation.method.to_owned();
    let path = match operation.path {
        "/" => "page",
        "/v1" => "root",
        path => path,
    };
    for word in path.split(|letter: char| !letter.is_ascii_alphanumeric()) {
        let mut letters = word.chars();
        id.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        id.push_str(letters.as_str());
    }
    id
}

/// All named schemas.
fn components() -> Value {
    let mut all = requests::schemas();
    all.extend(replies::schemas());
    Value::Object(all)
}

/// The successful response.
fn success(operation: &Operation) -> Value {
    let response = operation.response;
    let kinds = response.kinds().iter().map(|kind| {
        let schema = match *kind {
            JSON => json!({"$ref": format!("#/components/schemas/{}", operation.reply)}),
            // Some clients apply the schema to the whole stream, some to each event, so it has no
            // type.
            EVENTS => {
                json!({"description": "server-sent events; the data of each is JSON or [DONE]"})
            }
            _ => json!({"type": "string"}),
        };
        ((*kind).to_owned(), json!({ "schema": schema }))
    });
    let description = match response {
        ResponseContent::JsonOrEvents => "The answer; a stream of events if one was asked for",
        ResponseContent::JsonOrLines => "The answer; lines of JSON unless no stream was asked for",
        _ => "The answer",
    };
    let content: Map<String, Value> = kinds.collect();
    let mut success = json!({"description": description, "content": content});
    if matches!(
        response,
        ResponseContent::JsonOrEvents | ResponseContent::JsonOrLines
    ) {
        success["headers"] = json!({"x-hearth-note": {
            "description": "what of a schema that is not strict the reply is not held to",
            "schema": {"type": "string"},
        }});
    }
    success
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openapi_document_lists_exactly_the_routes() {
        let mut listed: Vec<String> = OPERATIONS
            .iter()
            .map(|operation| operation.path)
            .filter(|path| !matches!(*path, "/" | "/v1"))
            .map(|path| match path {
                path if path.starts_with("/api/") => path.to_owned(),
                "/models/{id}" => "/v1/models/{*id}".to_owned(),
                path => format!("/v1{path}"),
            })
            .collect();
        let mut served: Vec<String> = super::super::paths().collect();
        listed.sort();
        // A path may have several methods.
        listed.dedup();
        served.sort();
        assert_eq!(listed, served);
    }

    #[test]
    fn operations_have_unique_ids_and_known_replies() {
        let document = document();
        let mut ids: Vec<String> = OPERATIONS.iter().map(operation_id).collect();
        assert!(
            ids.contains(&"postChatCompletionsInputTokens".to_owned()),
            "{ids:?}"
        );
        ids.sort();
        let n = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), n);
        for operation in &OPERATIONS {
            let has_json = operation.response.kinds().contains(&JSON);
            assert_eq!(has_json, !operation.reply.is_empty(), "{}", operation.path);
            if has_json {
                let schema = &document["components"]["schemas"][operation.reply];
                assert!(schema.is_object(), "{}", operation.reply);
            }
        }
    }

    #[test]
    fn document_is_valid_openapi() {
        let document = document();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for (name, schema) in schemas {
            if let Err(error) = jsonschema::meta::validate(schema) {
                panic!("{name}: {error}");
            }
        }
        for (path, methods) in document["paths"].as_object().unwrap() {
            for operation in methods.as_object().unwrap().values() {
                for key in ["operationId", "summary", "responses"] {
                    assert!(operation.get(key).is_some(), "{path}: {key}");
                }
                let named = path.matches('{').count();
                let listed = operation.get("parameters").and_then(Value::as_array);
                let listed = listed.into_iter().flatten();
                let in_path = listed.filter(|parameter| parameter["in"] == "path");
                assert_eq!(in_path.count(), named, "{path}");
                for response in operation["responses"].as_object().unwrap().values() {
                    assert!(response["description"].is_string(), "{path}");
                }
            }
        }
    }

    #[test]
    fn openapi_references_resolve() {
        fn walk(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(to)) = map.get("$ref") {
                        found.push(to.trim_start_matches('#').to_owned());
                    }
                    map.values().for_each(|value| walk(value, found));
                }
                Value::Array(items) => items.iter().for_each(|value| walk(value, found)),
                _ => {}
            }
        }
        let document = document();
        let mut found = Vec::new();
        walk(&document, &mut found);
        assert!(found.len() > 20);
        for to in found {
            assert!(document.pointer(&to).is_some(), "{to}");
        }
    }
}
