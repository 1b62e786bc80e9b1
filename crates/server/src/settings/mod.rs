//! What the server was told, as plain values. `config.rs` fills these from flags, environment and file;
//! nothing else in the crate reads a setting from anywhere.

pub mod reasoning;

use std::time::Duration;

use chat::request::LateSystem;
use contract::AttentionWindow;

use crate::settings::reasoning::ReasoningDefaults;

/// Everything the HTTP side and the engine thread need to be told.
///
/// [`ServerConfig::default`] gives the documented defaults.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Address to listen on. The server never binds it by itself: it is handed a listener.
    pub host: String,
    /// Port to listen on.
    pub port: u16,
    /// The id under which the model is listed; clients may send any name unless `strict_model` is set.
    pub model_name: String,
    /// Refuse requests that name another model.
    pub strict_model: bool,
    /// Keys of which one must be presented; empty lets everyone in.
    pub api_keys: Vec<String>,
    /// Allow browsers of any origin.
    pub cors: bool,
    /// Serve `/metrics`.
    pub metrics: bool,
    /// Serve `/status` and what belongs to it.
    pub status_page: bool,
    /// Longest request body, in bytes.
    pub body_limit_bytes: usize,
    /// Send the usage chunk of a stream even when it was not asked for.
    pub always_usage: bool,
    /// Write prompts into the log.
    pub log_prompts: bool,
    /// What becomes of a system message in the middle of a conversation.
    pub late_system: LateSystem,
    /// Time limits.
    pub timeouts: Timeouts,
    /// How many requests may wait for a place on the device.
    pub queue_limit: usize,
    /// How far back replies look.
    pub window: WindowPolicy,
    /// What a request gets that does not say.
    pub defaults: GenerationDefaults,
}

/// Which requests look through a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowPolicy {
    /// The window.
    pub window: AttentionWindow,
    /// Whether requests with tools look through it too; what they can call stands at the beginning of their prompts.
    pub force: bool,
}

impl WindowPolicy {
    /// The window of a request.
    pub fn of(self, has_tools: bool) -> AttentionWindow {
        if has_tools && !self.force {
            AttentionWindow::FULL
        } else {
            self.window
        }
    }
}

/// Time limits; `None` means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// How long a request may wait for its turn before it is refused.
    pub queue: Option<Duration>,
    /// How long a request may take in all before it is ended as if it had reached its length limit.
    pub request: Option<Duration>,
    /// How long a client may take nothing of its stream before it is given up.
    pub write: Duration,
    /// How long a stream may stay silent before a comment is sent.
    pub keep_alive: Duration,
    /// How long running requests may go on after the server was asked to stop.
    pub shutdown: Duration,
    /// How long one turn of the engine may take before health reports it as stuck.
    pub stall: Duration,
    /// How long failing health stays visible after the engine was lost, before the process ends.
    pub linger: Duration,
}

/// What a request gets where it says nothing. The model's card overrides the neutral values.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationDefaults {
    /// Tokens of a chat reply, thinking included; `None` uses all the room there is.
    pub max_tokens: Option<usize>,
    /// Tokens of a text completion.
    pub completion_max_tokens: usize,
    /// Whether to think when a request does not say; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Sampling temperature.
    pub temperature: f32,
    /// Nucleus mass.
    pub top_p: f32,
    /// Candidates kept; 0 keeps all.
    pub top_k: usize,
    /// Least probability relative to the best.
    pub min_p: f32,
    /// Repetition penalty; 1 is none.
    pub repetition_penalty: f32,
    /// Presence penalty; 0 is none.
    pub presence_penalty: f32,
    /// How long thinking may be.
    pub reasoning: ReasoningDefaults,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            model_name: "model".to_owned(),
            strict_model: false,
            api_keys: Vec::new(),
            cors: true,
            metrics: true,
            status_page: false,
            body_limit_bytes: 64 << 20,
            always_usage: false,
            log_prompts: false,
            late_system: LateSystem::default(),
            timeouts: Timeouts::default(),
            queue_limit: 64,
            window: WindowPolicy::default(),
            defaults: GenerationDefaults::default(),
        }
    }
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            queue: Some(Duration::from_secs(600)),
            request: None,
            write: Duration::from_secs(120),
            keep_alive: Duration::from_secs(10),
            shutdown: Duration::from_secs(30),
            stall: Duration::from_secs(300),
            linger: Duration::from_secs(2),
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
            reasoning: ReasoningDefaults::default(),
        }
    }
}
