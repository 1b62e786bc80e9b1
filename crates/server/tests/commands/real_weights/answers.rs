//! Real models behind HTTP: ten questions that a person could check, and a model without a chat
//! template.

use serde_json::json;

use super::{GEMMA3, SMOLLM2, weights};
use crate::client::ServerProcess;

/// Each question with a part of every right answer, in lower case.
const QUESTIONS: [(&str, &str); 10] = [
    ("What is the capital of Japan?", "tokyo"),
    ("What is 2 plus 2?", "4"),
    ("How many days are in a week?", "7"),
    ("What color is the sky on a clear day?", "blue"),
    ("What is the opposite of hot?", "cold"),
    ("What is the chemical formula of water?", "h2o"),
    ("Who wrote Romeo and Juliet?", "shakespeare"),
    ("What is the largest ocean on Earth?", "pacific"),
    ("Name the first month of the year.", "january"),
    ("Translate \"hello\" into Spanish.", "hola"),
];

/// The right answers begin with these words, so that little is generated.
const MAX_TOKENS: u32 = 32;

fn serve(file: &str) -> Option<ServerProcess> {
    let path = weights(file)?;
    let path = path.to_str().unwrap();
    let args = [path, "--device", "cpu", "--max-ctx", "1024"];
    Some(ServerProcess::start(&args))
}

#[test]
fn smollm2_answers_ten_questions_rightly() {
    let Some(server) = serve(SMOLLM2) else { return };
    for (question, part) in QUESTIONS {
        let body = json!({
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        });
        let reply = server.request("/v1/chat/completions", &body.to_string());
        assert_eq!(reply.status, 200, "{}", reply.body);
        let reply = reply.json();
        let answer = reply["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(answer.to_lowercase().contains(part), "{question} {answer}");
        for marker in ["<|", "|>"] {
            assert!(!answer.contains(marker), "{question} {answer}");
        }
    }
}

#[test]
fn gemma3_completes_texts_and_refuses_conversations_by_name() {
    let Some(server) = serve(GEMMA3) else { return };
    let body = json!({
        "prompt": "Monday, Tuesday, Wednesday,",
        "temperature": 0,
        "max_tokens": 4,
    });
    let reply = server.request("/v1/completions", &body.to_string());
    assert_eq!(reply.status, 200, "{}", reply.body);
    let reply = reply.json();
    let text = reply["choices"][0]["text"].as_str().unwrap();
    assert!(text.contains("Thursday, Friday"), "{text}");
    // Three days, three commas and the beginning of the text.
    assert_eq!(reply["usage"]["prompt_tokens"], 7);
    let chat = server.chat();
    assert_eq!(chat.status, 400, "{}", chat.body);
    assert!(chat.body.contains("no chat template"), "{}", chat.body);
}
