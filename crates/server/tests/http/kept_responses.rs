//! Responses that are kept by their ids, and requests that refer to them.

use serde_json::{Value, json};
use server::kept_responses::ResponseStore;

use crate::client;
use crate::test_server::{ServerSetup, TestServer};

const RESPONSES: &str = "/v1/responses";

async fn respond(server: &TestServer, body: Value) -> Value {
    let answer = server.post(RESPONSES, &body).await;
    let status = answer.status;
    let body = answer.json().await;
    assert_eq!(status, 200, "{body}");
    body
}

async fn input_tokens(server: &TestServer, body: Value) -> u64 {
    let counted = server.post("/v1/responses/input_tokens", &body).await;
    counted.json().await["input_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn response_follows_a_kept_one() {
    let server = ServerSetup::saying("fine").open().await;
    let first = respond(&server, json!({"input": "how are you"})).await;
    assert_eq!(
        (&first["store"], &first["previous_response_id"]),
        (&json!(true), &json!(null))
    );
    let mut follow = json!({"input": [{"role": "user", "content": "and now"}], "stream": true,
        "previous_response_id": first["id"]});
    let events = server.post(RESPONSES, &follow).await.events().await;
    let second = events.last().unwrap().1["response"].clone();
    assert_eq!(second["previous_response_id"], first["id"]);
    // The same conversation, sent whole.
    let whole = json!({"input": [
        {"role": "user", "content": "how are you"},
        first["output"][0],
        {"role": "user", "content": "and now"},
    ]});
    let expected = input_tokens(&server, whole).await;
    assert_eq!(second["usage"]["input_tokens"].as_u64(), Some(expected));
    follow["previous_response_id"] = second["id"].clone();
    assert!(input_tokens(&server, follow).await > expected);
    // One item of it.
    let item = first["output"][0]["id"].clone();
    let referred = json!({"input": [{"type": "item_reference", "id": item},
        {"role": "user", "content": "x"}]});
    let sent = json!({"input": [first["output"][0], {"role": "user", "content": "x"}]});
    assert_eq!(
        input_tokens(&server, referred).await,
        input_tokens(&server, sent).await
    );
}

#[tokio::test]
async fn kept_responses_are_shown_and_forgotten() {
    let server = ServerSetup::saying("ok").open().await;
    let first = respond(&server, json!({"input": "hi", "metadata": {"a": "b"}})).await;
    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.json().await, first);
    let items = server
        .get(&format!("{path}/input_items"))
        .await
        .json()
        .await;
    assert_eq!(items["data"][0]["content"][0]["text"], "hi");
    assert!(
        items["first_id"].as_str().unwrap().starts_with("msg_"),
        "{items}"
    );
    let deleted = client::send(server.address, "DELETE", &path, &[], b"").await;
    assert_eq!(deleted.json().await["deleted"], true);
    let again = client::send(server.address, "DELETE", &path, &[], b"").await;
    assert_eq!(again.status, 404);
    assert_eq!(server.get(&path).await.status, 404);
    let follow = json!({"input": "x", "previous_response_id": first["id"]});
    let refused = server.post(RESPONSES, &follow).await;
    assert_eq!(refused.status, 400);
    let error = refused.json().await["error"].clone();
    assert_eq!(error["code"], "previous_response_not_found");
    let unkept = respond(&server, json!({"input": "hi", "store": false})).await;
    assert_eq!(unkept["store"], false);
    let path = format!("{RESPONSES}/{}", unkept["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.status, 404);
}

#[tokio::test]
async fn server_without_a_store_keeps_nothing() {
    let mut setup = ServerSetup::saying("ok");
    setup.config.responses = ResponseStore::in_memory(0);
    let server = setup.open().await;
    let first = respond(&server, json!({"input": "hi", "store": true})).await;
    assert_eq!(first["store"], false);
    let follow = json!({"input": "x", "previous_response_id": first["id"]});
    let refused = server.post(RESPONSES, &follow).await;
    let error = refused.json().await["error"].clone();
    assert_eq!(error["code"], "previous_response_not_found");
}
