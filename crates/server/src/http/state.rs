//! Shared state of all routes.

use std::sync::Arc;

use crate::engine::active_requests::ActiveRequests;
use crate::engine::control::ControlRegistry;
use crate::engine::errors::phase_error;
use crate::engine::handle::EngineHandle;
use crate::engine::{EnginePhase, ModelHandle};
use crate::error::ApiError;
use crate::http::access::AccessPolicy;
use crate::http::metrics::Metrics;
use crate::http::middleware::ApiKeys;
use crate::settings::ServerConfig;

/// State that all routes share. A clone is another reference to it.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    config: ServerConfig,
    engine: EngineHandle,
    keys: ApiKeys,
    access: AccessPolicy,
    metrics: Metrics,
    controls: ControlRegistry,
    active_requests: Arc<ActiveRequests>,
    started_unix: u64,
    /// The build and the served model.
    fingerprint: String,
}

impl App {
    /// Combines a configuration and a running engine.
    pub fn new(config: ServerConfig, engine: EngineHandle) -> App {
        App(Arc::new(Inner {
            keys: ApiKeys::new(&config.api_keys),
            access: AccessPolicy::new(&config),
            metrics: Metrics::new(),
            controls: ControlRegistry::default(),
            active_requests: Arc::default(),
            started_unix: crate::ids::unix_now(),
            fingerprint: format!("hearth-{}-{}", env!("CARGO_PKG_VERSION"), config.model_name),
            config,
            engine,
        }))
    }

    /// Settings of this process, fixed at its start.
    pub fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    /// Submits requests to the engine thread and reads its status.
    pub fn engine(&self) -> &EngineHandle {
        &self.0.engine
    }

    /// API keys that are accepted now.
    pub fn keys(&self) -> ApiKeys {
        match &self.0.config.api_key_updates {
            Some(updates) => ApiKeys::new(&updates.borrow()),
            None => self.0.keys.clone(),
        }
    }

    /// Decides which hosts and which web pages' origins are allowed.
    pub fn access(&self) -> &AccessPolicy {
        &self.0.access
    }

    /// Counters and gauges of `GET /metrics`.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Queued and running requests, as `GET /slots` lists them.
    pub fn active_requests(&self) -> &Arc<ActiveRequests> {
        &self.0.active_requests
    }

    /// Reasoning controls of running responses.
    pub fn controls(&self) -> &ControlRegistry {
        &self.0.controls
    }

    /// Start time in seconds since 1970.
    pub fn started_unix(&self) -> u64 {
        self.0.started_unix
    }

    /// `system_fingerprint` of all replies: the build and the served model.
    pub fn fingerprint(&self) -> &str {
        &self.0.fingerprint
    }

    /// The loaded model.
    ///
    /// # Errors
    /// While the model loads, and after the engine failed or stopped.
    pub fn model(&self) -> Result<Arc<ModelHandle>, ApiError> {
        let status = self.0.engine.status();
        match (status.phase, status.model) {
            (EnginePhase::Ready | EnginePhase::Draining, Some(model)) => Ok(model),
            (phase, _) => Err(phase_error(&phase)),
        }
    }

    /// Rejects another model's name if `strict_model` is set.
    pub fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        let served = &self.0.config.model_name;
        match asked {
            Some(asked) if self.0.config.strict_model && asked != served => {
                Err(ApiError::ModelNotFound {
                    asked: asked.to_owned(),
                    served: served.clone(),
                })
            }
            _ => Ok(()),
        }
    }
}
