//! Tests of a server whose model file is shortened.

use std::fs::{self, File};

use crate::client::ServerProcess;
use crate::process::model;

#[test]
fn shortened_model_ends_requests_with_an_error_and_the_server_with_a_status() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::copy(model(), &path).unwrap();
    let server = ServerProcess::start(&[path.to_str().unwrap(), "--device", "cpu"]);
    assert_eq!(server.chat().status, 200);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    let other = "A text that no cache holds, so that the weights are read.";
    let body = format!(r#"{{"messages":[{{"role":"user","content":"{other}"}}],"max_tokens":4}}"#);
    let answer = server.request("/v1/chat/completions", &body);
    assert_eq!(answer.status, 500, "{}", answer.body);
    assert!(answer.body.contains("was shortened"), "{}", answer.body);
    let (code, log) = server.wait();
    assert_eq!(code, Some(74), "{log}");
    assert!(log.contains("model.gguf: the file was shortened"), "{log}");
}
