//! Tests that a device error is a server error on every route that generates, whole and as a
//! stream.

use conformance::fake::{FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use serde_json::{Value, json};

use crate::test_server::ServerSetup;

/// The routes that run the model, each with a request.
fn requests() -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/responses", json!({"input": "hi"})),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 9}),
        ),
    ]
}

/// The faults of a device, each with the status of a whole response.
const FAULTS: [(RunnerMethod, FaultKind, u16); 5] = [
    (RunnerMethod::Open, FaultKind::OutOfMemory, 503),
    (RunnerMethod::Prefill, FaultKind::OutOfMemory, 503),
    (RunnerMethod::Prefill, FaultKind::DeviceLost, 500),
    (RunnerMethod::Verify, FaultKind::DeviceLost, 500),
    (RunnerMethod::Commit, FaultKind::DeviceLost, 500),
];

/// Types of server errors in both dialects, and the code of a temporary one.
const SERVER_ERRORS: [&str; 3] = ["server_error", "api_error", "unavailable"];

/// Every `error` object of a stream's events.
fn errors(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter_map(|data| serde_json::from_str::<Value>(data).ok())
        .flat_map(|event| [event["error"].clone(), event["response"]["error"].clone()])
        .filter(|error| !error.is_null())
        .collect()
}

#[tokio::test]
async fn device_errors_are_server_errors_on_every_route() {
    for (route, request) in requests() {
        for (call, kind, status) in FAULTS {
            let case = format!("{route}, {call:?}, {kind:?}");
            let server = ServerSetup::saying("a reply").open().await;
            server.watch.fake.fail(InjectedFault {
                call,
                when: FaultTrigger::From(0),
                kind,
            });
            let response = server.post(route, &request).await;
            assert_eq!(response.status, status, "{case}");
            let error = response.json().await["error"].clone();
            let kind = error["type"].as_str().unwrap();
            assert!(SERVER_ERRORS.contains(&kind), "{case}: {error}");
        }
    }
}

#[tokio::test]
async fn device_errors_are_server_errors_in_every_stream() {
    for (route, mut request) in requests() {
        request["stream"] = json!(true);
        for (call, kind, _) in FAULTS {
            let case = format!("{route}, {call:?}, {kind:?}");
            let server = ServerSetup::saying("a reply").open().await;
            server.watch.fake.fail(InjectedFault {
                call,
                when: FaultTrigger::From(0),
                kind,
            });
            let stream = server.post(route, &request).await;
            if stream.status >= 500 {
                continue;
            }
            assert_eq!(stream.status, 200, "{case}");
            let text = stream.text().await;
            let errors = errors(&text);
            assert!(!errors.is_empty(), "{case}: {text}");
            for error in errors {
                let named = error["type"].as_str().or_else(|| error["code"].as_str());
                let named = named.unwrap_or_default();
                assert!(SERVER_ERRORS.contains(&named), "{case}: {error}");
            }
        }
    }
}
