//! A model on a running server, for a conversation that loads none itself.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use chat::conversation::Message;
use chat::reply::{FinishReason, Reply, ReplyDelta};
use serde_json::{Value, json};

use crate::cli::RunArgs;
use crate::commands::generate::{ReplyOptions, TimedReply};
use crate::commands::http_client::HttpClient;
use crate::open::by_name;

/// Where a server is looked for.
const DEFAULT_URL: &str = "http://127.0.0.1:8000";
/// Longest wait for the list of models.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest silence in a reply; the server sends signs of life more often.
const REPLY_TIMEOUT: Duration = Duration::from_secs(600);
/// Time between two looks at whether the reply was cancelled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A model that a server runs.
pub(super) struct ServedModel {
    client: HttpClient,
    /// The id that requests name.
    pub(super) id: String,
}

/// A request that the server did not take, or a reply that it broke off.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct ServedError(String);

/// The running server's model that the command line means; `None` if there is none, and it is
/// loaded here.
///
/// # Errors
/// If the server of `--url` cannot be used.
pub(super) fn find(args: &RunArgs, model: Option<&Path>) -> anyhow::Result<Option<ServedModel>> {
    let url = args.url.as_deref().unwrap_or(DEFAULT_URL);
    let is_named = args.url.is_some();
    let asking = HttpClient::new(url, args.api_key.clone(), LIST_TIMEOUT)?;
    let base = asking.base().to_owned();
    let response = match asking.get("/v1/models") {
        Ok(response) => response,
        Err(_) if !is_named => return Ok(None),
        Err(error) => {
            return Err(error).with_context(|| {
                format!("{base} does not respond; start `hearth serve`, or use --local")
            });
        }
    };
    let is_ours = response
        .header("server")
        .is_some_and(|server| server.starts_with("hearth/"));
    if !is_ours && !is_named {
        return Ok(None);
    }
    if response.status == 401 {
        if is_named {
            bail!("{base} requires a key; give it with --api-key, or use --local");
        }
        tracing::info!("the server at {base} requires a key (--api-key); the model is loaded here");
        return Ok(None);
    }
    let list = response.json();
    let ids = list["data"].as_array().into_iter().flatten();
    let ids: Vec<&str> = ids.filter_map(|entry| entry["id"].as_str()).collect();
    let found = match model {
        None => ids.first().copied(),
        Some(path) => ids.iter().copied().find(|id| means(path, id)),
    };
    match found {
        Some(id) => Ok(Some(ServedModel {
            client: HttpClient::new(url, args.api_key.clone(), REPLY_TIMEOUT)?,
            id: id.to_owned(),
        })),
        None if is_named => bail!("{base} has no such model; it has: {}", ids.join(", ")),
        None => Ok(None),
    }
}

/// Whether a file or a name is the model with this id.
fn means(path: &Path, id: &str) -> bool {
    let stem = |path: &Path| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let first = stem
            .split_once("-00001-of-")
            .map(|(name, _)| name.to_owned());
        first.unwrap_or_else(|| stem.into_owned())
    };
    path.as_os_str() == id || stem(path) == id || stem(&by_name::in_cache(path)) == id
}

impl ServedModel {
    /// `http://host:port`.
    pub(super) fn base(&self) -> &str {
        self.client.base()
    }

    /// Requests a reply and passes its deltas on as they arrive.
    ///
    /// # Errors
    /// [`ServedError`] if the server refuses or breaks off; an error of `on_delta`.
    pub(super) fn reply(
        &self,
        history: &[Message],
        options: &ReplyOptions,
        on_delta: &mut dyn FnMut(&ReplyDelta) -> std::io::Result<()>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> anyhow::Result<TimedReply> {
        let body = request(&self.id, history, options);
        let start = Instant::now();
        // A thread reads, so that ctrl-C works while the server is silent. Dropping the receiver
        // ends it at the next line, which closes the connection and so ends the request.
        let client = self.client.clone();
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let failed = |error: &dyn std::fmt::Display| Err(ServedError(error.to_string()));
            match client.stream("/v1/chat/completions", &body) {
                Err(error) => {
                    let _ = sender.send(failed(&error));
                }
                Ok(body) => {
                    for line in BufReader::new(body).lines() {
                        let line = line.or_else(|error| failed(&error));
                        if sender.send(line).is_err() {
                            return;
                        }
                    }
                }
            }
        });
        let mut stream = ReplyStream::new(start);
        loop {
            let line = match lines.recv_timeout(POLL_INTERVAL) {
                Ok(line) => line?,
                Err(RecvTimeoutError::Timeout) if is_cancelled() => break,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            stream.line(&line, on_delta)?;
            if is_cancelled() {
                break;
            }
        }
        if !is_cancelled() && stream.timed.finish.is_none() {
            return Err(ServedError("the server broke the reply off".to_owned()).into());
        }
        Ok(stream.timed)
    }
}

fn request(model: &str, history: &[Message], options: &ReplyOptions) -> Value {
    let messages: Vec<Value> = history
        .iter()
        .map(|message| json!({"role": message.role.name(), "content": message.content}))
        .collect();
    let mut body = json!({
        "model": model,
        "messages": messages,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    let given = [
        ("temperature", options.temperature.map(Value::from)),
        ("top_p", options.top_p.map(Value::from)),
        ("top_k", options.top_k.map(Value::from)),
        ("min_p", options.min_p.map(Value::from)),
        ("max_tokens", options.max_tokens.map(Value::from)),
        ("seed", options.seed.map(Value::from)),
        ("enable_thinking", options.thinking.map(Value::from)),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    body
}

/// A reply as far as it has arrived.
struct ReplyStream {
    start: Instant,
    first: Option<Instant>,
    timed: TimedReply,
    deltas: usize,
}

impl ReplyStream {
    fn new(start: Instant) -> ReplyStream {
        ReplyStream {
            start,
            first: None,
            timed: TimedReply {
                reply: Reply::default(),
                finish: None,
                prompt: (0, Duration::ZERO),
                generated: (0, Duration::ZERO),
            },
            deltas: 0,
        }
    }

    /// Takes a line of the event stream, or the line of an error's body.
    fn line(
        &mut self,
        line: &str,
        on_delta: &mut dyn FnMut(&ReplyDelta) -> std::io::Result<()>,
    ) -> anyhow::Result<()> {
        let Some(data) = line
            .strip_prefix("data: ")
            .or(line.starts_with('{').then_some(line))
        else {
            return Ok(());
        };
        let Ok(chunk) = serde_json::from_str::<Value>(data) else {
            // The mark of the stream's end.
            return Ok(());
        };
        if let Some(message) = chunk["error"]["message"].as_str() {
            return Err(ServedError(message.to_owned()).into());
        }
        let delta = &chunk["choices"][0]["delta"];
        let reasoning = delta["reasoning_content"]
            .as_str()
            .or(delta["reasoning"].as_str());
        let content = delta["content"].as_str();
        let pieces = [
            reasoning.map(|text| ReplyDelta::Reasoning(text.to_owned())),
            content.map(|text| ReplyDelta::Content(text.to_owned())),
        ];
        let texts = [reasoning, content];
        for (piece, text) in pieces.into_iter().zip(texts) {
            let (Some(piece), Some(text)) = (piece, text) else {
                continue;
            };
            if text.is_empty() {
                continue;
            }
            let now = Instant::now();
            let first = *self.first.get_or_insert(now);
            self.deltas += 1;
            self.timed.prompt.1 = first - self.start;
            self.timed.generated = (self.deltas - 1, now - first);
            on_delta(&piece)?;
            self.timed.reply.push(piece);
        }
        match chunk["choices"][0]["finish_reason"].as_str() {
            Some("length") => self.timed.finish = Some(FinishReason::Length),
            Some(_) => self.timed.finish = Some(FinishReason::Stop),
            None => {}
        }
        let count = |name: &str| {
            let tokens = chunk["usage"][name].as_u64()?;
            usize::try_from(tokens).ok()
        };
        if let (Some(prompt), Some(completion)) =
            (count("prompt_tokens"), count("completion_tokens"))
        {
            self.timed.prompt.0 = prompt;
            self.timed.generated.0 = completion.saturating_sub(1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chat::conversation::Role;

    #[test]
    fn request_has_the_options_that_are_set() {
        let options = ReplyOptions {
            top_k: Some(5),
            thinking: Some(false),
            ..ReplyOptions::default()
        };
        let body = request("m", &[Message::new(Role::User, "hi")], &options);
        assert_eq!(body["messages"], json!([{"role": "user", "content": "hi"}]));
        assert_eq!(
            (&body["top_k"], &body["enable_thinking"]),
            (&json!(5), &json!(false))
        );
        assert!(body.get("temperature").is_none() && body.get("seed").is_none());
    }

    #[test]
    fn stream_yields_deltas_counts_and_the_finish_reason() {
        let mut stream = ReplyStream::new(Instant::now());
        let mut shown = String::new();
        let mut show = |piece: &ReplyDelta| {
            if let ReplyDelta::Content(text) | ReplyDelta::Reasoning(text) = piece {
                shown += text;
            }
            Ok(())
        };
        for line in [
            ": ping",
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"data: {"choices":[{"delta":{"reasoning_content":"Hm. "}}]}"#,
            r#"data: {"choices":[{"delta":{"content":"Yes."}}]}"#,
            r#"data: {"choices":[{"delta":{},"finish_reason":"length"}]}"#,
            r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}"#,
            "data: [DONE]",
        ] {
            stream.line(line, &mut show).unwrap();
        }
        assert_eq!(shown, "Hm. Yes.");
        let timed = stream.timed;
        assert_eq!(timed.finish, Some(FinishReason::Length));
        assert_eq!((timed.prompt.0, timed.generated.0), (9, 3));
        assert_eq!(
            (timed.reply.reasoning.as_str(), timed.reply.content.as_str()),
            ("Hm. ", "Yes.")
        );
        let mut refused = ReplyStream::new(Instant::now());
        let line = r#"{"error":{"message":"too long"}}"#;
        let error = refused.line(line, &mut |_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "too long");
        assert!(error.is::<ServedError>());
    }

    #[test]
    fn models_are_known_by_file_and_by_name() {
        for (path, id, expected) in [
            ("/models/a-q4.gguf", "a-q4", true),
            ("/models/a-00001-of-00002.gguf", "a", true),
            ("/models/a-q4.gguf", "a", false),
            ("local", "local", true),
        ] {
            assert_eq!(means(Path::new(path), id), expected, "{path} {id}");
        }
    }
}
