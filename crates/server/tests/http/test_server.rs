//! A complete server on its own port, with a scripted device and a vocabulary of a few hundred
//! tokens.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use chat::Tokenizer;
use chat::template::ChatTemplate;
use contract::{FimTokens, Limits, PreTokenizer, TokenId, TokenKind, Vocab};
use decode::{PrefixConfig, SchedulerConfig, SpeculationConfig};
use serde_json::{Value, json};
use server::engine::{BoxError, EngineFactory, Loaded};
use server::http::shutdown::{ShutdownSignal, ShutdownTrigger};
use server::settings::{GenerationDefaults, ServerConfig};
use server::text::constraints::ModelConstraints;
use server::text::model_context::{ModelContext, ModelDescription};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::client::{self, HttpResponse};
use crate::script::{Script, ScriptRunner, Watch};

pub(crate) const TEMPLATE: &str = "{%- for message in messages %}\
{%- if message.content == 'template, break' %}{{ raise_exception('no such talk') }}{% endif %}\
{%- if message.content == 'template, fall' %}{{ no_such_function() }}{% endif %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{% endif %}\
{%- endif %}";

const SPECIAL: [(&str, TokenKind); 10] = [
    ("<|endoftext|>", TokenKind::Control),
    ("<|im_start|>", TokenKind::Control),
    ("<|im_end|>", TokenKind::Control),
    ("<think>", TokenKind::UserDefined),
    ("</think>", TokenKind::UserDefined),
    ("<tool_call>", TokenKind::UserDefined),
    ("</tool_call>", TokenKind::UserDefined),
    ("<|fim_prefix|>", TokenKind::Control),
    ("<|fim_suffix|>", TokenKind::Control),
    ("<|fim_middle|>", TokenKind::Control),
];

/// One token per byte in the byte-mapped alphabet, and a few special strings.
pub(crate) fn vocab() -> Vocab {
    let mut tokens = Vec::new();
    let mut next = 256;
    for byte in 0..=255_u8 {
        let shown = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let letter = if shown {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap()
        };
        tokens.push(letter.to_string());
    }
    let mut kinds = vec![TokenKind::Normal; 256];
    for (text, kind) in SPECIAL {
        tokens.push(text.to_owned());
        kinds.push(kind);
    }
    Vocab {
        tokens,
        kinds,
        pre: PreTokenizer::Qwen2,
        eos: vec![special("<|im_end|>"), special("<|endoftext|>")],
        eos_token: Some(special("<|im_end|>")),
        chat_template: Some(TEMPLATE.to_owned()),
        fim: Some(FimTokens {
            prefix: special("<|fim_prefix|>"),
            suffix: special("<|fim_suffix|>"),
            middle: special("<|fim_middle|>"),
            repository: None,
            file: None,
        }),
        ..Vocab::default()
    }
}

pub(crate) fn special(text: &str) -> TokenId {
    let at = SPECIAL.iter().position(|(s, _)| *s == text).unwrap();
    TokenId(256 + at as u32)
}

/// The tokens of a text: one per byte, except for the special strings.
pub(crate) fn tokens(text: &str) -> Vec<TokenId> {
    let mut ids = Vec::new();
    let mut rest = text;
    'outer: while !rest.is_empty() {
        for (string, _) in SPECIAL {
            if let Some(after) = rest.strip_prefix(string) {
                ids.push(special(string));
                rest = after;
                continue 'outer;
            }
        }
        let first = rest.chars().next().unwrap();
        let mut bytes = [0; 4];
        ids.extend(
            first
                .encode_utf8(&mut bytes)
                .bytes()
                .map(|b| TokenId(u32::from(b))),
        );
        rest = &rest[first.len_utf8()..];
    }
    ids
}

/// A script that replies `text` and ends.
pub(crate) fn says(text: &str) -> Option<Script> {
    let tokens = tokens(text);
    Some(Arc::new(move |n| {
        tokens.get(n).copied().unwrap_or(special("<|im_end|>"))
    }))
}

/// Configuration of a test server.
pub(crate) struct ServerSetup {
    pub(crate) script: Option<Script>,
    pub(crate) config: ServerConfig,
    pub(crate) limits: Limits,
    pub(crate) prefix: PrefixConfig,
    pub(crate) step: Duration,
    pub(crate) load_time: Duration,
    pub(crate) load_error: Option<&'static str>,
}

impl ServerSetup {
    pub(crate) fn saying(text: &str) -> ServerSetup {
        ServerSetup {
            script: says(text),
            ..ServerSetup::default()
        }
    }

    pub(crate) async fn open(self) -> TestServer {
        TestServer::open(self).await
    }
}

impl Default for ServerSetup {
    fn default() -> ServerSetup {
        let mut config = ServerConfig {
            model_name: "tiny".to_owned(),
            ..ServerConfig::default()
        };
        config.timeouts.failure_grace = Duration::from_secs(4);
        ServerSetup {
            script: None,
            config,
            limits: Limits {
                sequences: 4,
                context: 512,
                tree_nodes: 8,
                prefill_chunk: 64,
                pool_tokens: None,
            },
            prefix: PrefixConfig::default(),
            step: Duration::ZERO,
            load_time: Duration::ZERO,
            load_error: None,
        }
    }
}

/// What an engine thread loads: a scripted device, and the text side of the small vocabulary.
pub(crate) fn loaded(
    runner: ScriptRunner,
    sequences: usize,
    prefix: PrefixConfig,
) -> Result<Loaded, BoxError> {
    let vocab = vocab();
    let n_tokens = vocab.tokens.len();
    let tokenizer = Arc::new(Tokenizer::new(&vocab)?);
    let defaults = GenerationDefaults {
        temperature: 0.0,
        ..GenerationDefaults::default()
    };
    let model = ModelContext {
        constraints: ModelConstraints::new(&tokenizer, &vocab.eos, n_tokens, &defaults.reasoning),
        tokenizer,
        template: ChatTemplate::from_vocab(&vocab)?,
        eos: vocab.eos.clone(),
        defaults,
        compressor: None,
        description: ModelDescription {
            trained_context: 1024,
            vocab: n_tokens,
            parameters: 12,
            size_bytes: 34,
            architecture: "script".to_owned(),
            quantization: "Q4_K_M".to_owned(),
            path: Some("/models/tiny.gguf".to_owned()),
            ..ModelDescription::default()
        },
    };
    Ok(Loaded {
        runner: Box::new(contract::checked::CheckedRunner::new(runner)),
        scheduler: SchedulerConfig {
            max_sequences: sequences,
            prefix,
            eos: vocab.eos.clone(),
            // Scripts repeat themselves; drafts would shorten replies that must take long.
            speculation: SpeculationConfig {
                budget: 0,
                ..SpeculationConfig::default()
            },
            ..SchedulerConfig::default()
        },
        model,
        store: None,
    })
}

/// A running server.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) watch: Watch,
    pub(crate) stop: ShutdownTrigger,
    pub(crate) served: JoinHandle<Result<(), server::error::ServeError>>,
}

impl TestServer {
    async fn open(setup: ServerSetup) -> TestServer {
        let n_tokens = vocab().tokens.len();
        let (runner, watch) = ScriptRunner::new(n_tokens, setup.limits, setup.step, setup.script);
        let (load_time, load_error) = (setup.load_time, setup.load_error);
        let (sequences, prefix) = (setup.limits.sequences, setup.prefix);
        let factory: EngineFactory = Box::new(move |_| {
            std::thread::sleep(load_time);
            if let Some(error) = load_error {
                return Err(error.into());
            }
            loaded(runner, sequences, prefix)
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (switch, stop) = ShutdownSignal::new();
        let served = tokio::spawn(server::serve(setup.config, factory, listener, stop));
        let server = TestServer {
            address,
            watch,
            stop: switch,
            served,
        };
        if load_time.is_zero() && load_error.is_none() {
            server.until(200).await;
        }
        server
    }

    /// Waits until health returns `status`.
    pub(crate) async fn until(&self, status: u16) {
        let wait = async {
            while self.get("/health").await.status != status {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(client::MAX_WAIT, wait)
            .await
            .expect("health in time");
    }

    pub(crate) async fn get(&self, path: &str) -> HttpResponse {
        client::send(self.address, "GET", path, &[], b"").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> HttpResponse {
        self.post_bytes(path, body.to_string().as_bytes()).await
    }

    pub(crate) async fn post_bytes(&self, path: &str, body: &[u8]) -> HttpResponse {
        let headers = [("content-type", "application/json")];
        client::send(self.address, "POST", path, &headers, body).await
    }

    /// A chat request with a fixed message and additional fields.
    pub(crate) async fn chat(&self, fields: Value) -> HttpResponse {
        self.post("/v1/chat/completions", &chat_body(fields)).await
    }

    /// Waits until the metrics have this line.
    pub(crate) async fn until_metric(&self, line: &str) {
        until_true(line, async || {
            let text = self.get("/metrics").await.text().await;
            text.lines().any(|l| l == line)
        })
        .await;
    }

    /// Waits until `n` requests are listed as waiting or running.
    pub(crate) async fn until_requests(&self, n: usize) {
        until_true("requests are listed", async || {
            let slots = self.get("/slots/summary").await.json().await;
            slots["requests"].as_array().map(Vec::len) == Some(n)
        })
        .await;
    }

    /// Waits until `holds`.
    pub(crate) async fn eventually(&self, what: &str, holds: impl Fn(&Watch) -> bool) {
        let wait = async {
            while !holds(&self.watch) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let waited = tokio::time::timeout(client::MAX_WAIT, wait).await;
        waited.unwrap_or_else(|_| panic!("in time: {what}"));
    }
}

/// Asks `holds` until it is true: what a reply leaves behind may come a moment after it.
pub(crate) async fn until_true(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(client::MAX_WAIT, wait).await;
    waited.unwrap_or_else(|_| panic!("in time: {what}"));
}

pub(crate) fn chat_body(fields: Value) -> Value {
    let mut body = json!({"model": "any", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}
