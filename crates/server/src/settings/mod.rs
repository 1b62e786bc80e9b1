//! Settings as plain values. `config` fills them from flags, environment and file.

pub mod compression;
pub mod keep_alive;
pub mod model_pulls;
pub mod reasoning;

use std::borrow::Cow;
use std::time::Duration;

use chat::openai::response::ReasoningField;
use chat::request::LateSystem;
use contract::AttentionWindow;
use decode::InitialPhase;
use model::CardSampling;
use model::markup::CardMarkup;
use tokio::sync::watch;

use crate::kept_responses::ResponseStore;
use crate::settings::model_pulls::ModelPulls;
use crate::settings::reasoning::ReasoningDefaults;

/// Settings of the HTTP side and the engine thread.
///
/// [`ServerConfig::default`] has the documented defaults.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Listen address. The caller binds the listener.
    pub host: String,
    /// Listen port.
    pub port: u16,
    /// Model id; clients may send any name unless `strict_model` is set.
    pub model_name: String,
    /// Rejects other model names.
    pub strict_model: bool,
    /// Accepted API keys; an empty list disables the check.
    pub api_keys: Vec<String>,
    /// Newer API keys, if they are reloaded while the server runs.
    pub api_key_updates: Option<watch::Receiver<Vec<String>>>,
    /// Host names that a server without a key takes beside loopback names; `*` is any.
    pub allowed_hosts: Vec<String>,
    /// Origins beside loopback ones whose web pages may use the server; `*` is any.
    pub cors_origins: Vec<String>,
    /// Sends CORS headers to allowed origins.
    pub cors: bool,
    /// Maximum open connections; further ones wait in the listener's backlog.
    pub max_connections: usize,
    /// Serves `/metrics`.
    pub metrics: bool,
    /// Serves `/status` and its data.
    pub status_page: bool,
    /// Maximum request body in bytes.
    pub body_limit_bytes: usize,
    /// Sends the usage chunk of every stream.
    pub always_usage: bool,
    /// Logs prompts.
    pub log_prompts: bool,
    /// Policy for a system message after the first message.
    pub late_system: LateSystem,
    /// Field of a chat completion that carries reasoning.
    pub reasoning_field: ReasoningField,
    /// Timeouts.
    pub timeouts: Timeouts,
    /// Maximum queue length.
    pub queue_limit: usize,
    /// Attention window policy.
    pub window: WindowPolicy,
    /// Defaults of a request.
    pub defaults: GenerationDefaults,
    /// Responses that are kept by their ids.
    pub responses: ResponseStore,
    /// Whether clients may have models pulled.
    pub pulls: ModelPulls,
}

/// Attention window policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowPolicy {
    /// The window.
    pub window: AttentionWindow,
    /// Whether the window also applies to requests with tools, whose definitions start the prompt.
    pub force: bool,
}

impl WindowPolicy {
    /// Window of a request.
    pub fn of(self, has_tools: bool) -> AttentionWindow {
        if has_tools && !self.force {
            AttentionWindow::FULL
        } else {
            self.window
        }
    }
}

/// Timeouts; `None` disables one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Maximum queue time.
    pub queue: Option<Duration>,
    /// Maximum request time; the request then ends as at its length limit.
    pub request: Option<Duration>,
    /// Maximum time for a request's head, between two parts of its body, and between requests.
    pub read: Duration,
    /// Maximum time for which a client may not read its stream.
    pub write: Duration,
    /// Idle time before a keep-alive is sent.
    pub keep_alive: Duration,
    /// Grace period of running requests at shutdown.
    pub shutdown: Duration,
    /// Step time after which health reports a stall.
    pub stall: Duration,
    /// Time for which failed health stays visible before the process ends.
    pub failure_grace: Duration,
}

/// Defaults of a request. The model card overrides the neutral values.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationDefaults {
    /// Maximum chat reply tokens, reasoning included; `None` is the remaining context.
    pub max_tokens: Option<usize>,
    /// Maximum tokens of a text completion.
    pub completion_max_tokens: usize,
    /// Whether to reason by default; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Sampling temperature.
    pub temperature: f32,
    /// Top-p.
    pub top_p: f32,
    /// Top-k; 0 disables it.
    pub top_k: usize,
    /// Min-p.
    pub min_p: f32,
    /// Repetition penalty; 1 disables it.
    pub repetition_penalty: f32,
    /// Presence penalty; 0 disables it.
    pub presence_penalty: f32,
    /// Values of replies that do not reason, where they differ from those above.
    pub non_thinking: CardSampling,
    /// Reasoning limits.
    pub reasoning: ReasoningDefaults,
    /// The model card's tags.
    pub markup: CardMarkup,
}

impl GenerationDefaults {
    /// The defaults of a reply that begins in `phase`.
    pub fn of_reply(&self, phase: InitialPhase) -> Cow<'_, GenerationDefaults> {
        match phase {
            InitialPhase::Answer => Cow::Owned(self.of_non_thinking()),
            InitialPhase::Reasoning | InitialPhase::Undecided => Cow::Borrowed(self),
        }
    }

    /// The defaults of a reply that does not reason.
    pub fn of_non_thinking(&self) -> GenerationDefaults {
        let own = &self.non_thinking;
        GenerationDefaults {
            temperature: own.temperature.unwrap_or(self.temperature),
            top_p: own.top_p.unwrap_or(self.top_p),
            top_k: own.top_k.unwrap_or(self.top_k),
            min_p: own.min_p.unwrap_or(self.min_p),
            repetition_penalty: own.repetition_penalty.unwrap_or(self.repetition_penalty),
            presence_penalty: own.presence_penalty.unwrap_or(self.presence_penalty),
            ..self.clone()
        }
    }
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            model_name: "model".to_owned(),
            strict_model: false,
            api_keys: Vec::new(),
            api_key_updates: None,
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            cors: true,
            max_connections: 1024,
            metrics: true,
            status_page: false,
            body_limit_bytes: 64 << 20,
            always_usage: false,
            log_prompts: false,
            late_system: LateSystem::default(),
            reasoning_field: ReasoningField::default(),
            timeouts: Timeouts::default(),
            queue_limit: 64,
            window: WindowPolicy::default(),
            defaults: GenerationDefaults::default(),
            responses: ResponseStore::in_memory(64 << 20),
            pulls: ModelPulls::default(),
        }
    }
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            queue: Some(Duration::from_secs(600)),
            request: None,
            read: Duration::from_secs(60),
            write: Duration::from_secs(120),
            keep_alive: Duration::from_secs(10),
            shutdown: Duration::from_secs(30),
            stall: Duration::from_secs(300),
            failure_grace: Duration::from_secs(2),
        }
    }
}

impl Default for GenerationDefaults {
    fn default() -> GenerationDefaults {
        GenerationDefaults {
            max_tokens: None,
            completion_max_tokens: 16,
            thinking: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            non_thinking: CardSampling::default(),
            reasoning: ReasoningDefaults::default(),
            markup: CardMarkup::default(),
        }
    }
}
