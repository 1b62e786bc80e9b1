//! AppShared state of all routes.

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
use crate::models::{Lease, ModelHost};
use crate::settings::ServerConfig;

/// State that all routes share. A clone is another reference to it.
#[derive(Clone)]
pub struct App {
    shared: Arc<AppShared>,
    /// The request's model, where the server has several: it stays loaded as long as this.
    lease: Option<Arc<Lease>>,
}

/// Where the engines of requests come from.
enum Engines {
    /// The one engine of the server.
    One(EngineHandle),
    /// The engines of several models.
    Hosted(ModelHost),
}

struct AppShared {
    config: ServerConfig,
    engines: Engines,
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
        App::with_engines(config, Engines::One(engine))
    }

    /// Combines a configuration and several models.
    pub fn hosted(config: ServerConfig, host: ModelHost) -> App {
        App::with_engines(config, Engines::Hosted(host))
    }

    fn with_engines(config: ServerConfig, engines: Engines) -> App {
        let shared = AppShared {
            keys: ApiKeys::new(&config.api_keys),
            access: AccessPolicy::new(&config),
            metrics: Metrics::new(),
            controls: ControlRegistry::default(),
            active_requests: Arc::default(),
            started_unix: crate::ids::unix_now(),
            fingerprint: format!("hearth-{}-{}", env!("CARGO_PKG_VERSION"), config.model_name),
            config,
            engines,
        };
        App {
            shared: Arc::new(shared),
            lease: None,
        }
    }

    /// The same state, with the engine of a lease.
    #[must_use]
    pub fn with_lease(&self, lease: Arc<Lease>) -> App {
        App {
            shared: Arc::clone(&self.shared),
            lease: Some(lease),
        }
    }

    /// The host of several models, if the server has one.
    pub fn host(&self) -> Option<&ModelHost> {
        match &self.shared.engines {
            Engines::One(_) => None,
            Engines::Hosted(host) => Some(host),
        }
    }

    /// The id of the request's model; without a request that of the default.
    pub fn model_name(&self) -> &str {
        let lease = self.lease.as_deref();
        lease.map_or(&self.config().model_name, |lease| lease.name())
    }

    /// Settings of this process, fixed at its start.
    pub fn config(&self) -> &ServerConfig {
        &self.shared.config
    }

    /// The engine of the request's model, which takes its job and shows its status. Outside a
    /// request for a model, the engine that was used last.
    pub fn engine(&self) -> EngineHandle {
        match (&self.lease, &self.shared.engines) {
            (Some(lease), _) => lease.engine().clone(),
            (None, Engines::One(engine)) => engine.clone(),
            (None, Engines::Hosted(host)) => host.current(),
        }
    }

    /// API keys that are accepted now.
    pub fn keys(&self) -> ApiKeys {
        match &self.shared.config.api_key_updates {
            Some(updates) => ApiKeys::new(&updates.borrow()),
            None => self.shared.keys.clone(),
        }
    }

    /// Decides which hosts and which web pages' origins are allowed.
    pub fn access(&self) -> &AccessPolicy {
        &self.shared.access
    }

    /// Counters and gauges of `GET /metrics`.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// Queued and running requests, as `GET /slots` lists them.
    pub fn active_requests(&self) -> &Arc<ActiveRequests> {
        &self.shared.active_requests
    }

    /// Reasoning controls of running responses.
    pub fn controls(&self) -> &ControlRegistry {
        &self.shared.controls
    }

    /// Start time in seconds since 1970.
    pub fn started_unix(&self) -> u64 {
        self.shared.started_unix
    }

    /// `system_fingerprint` of all replies: the build and the served model.
    pub fn fingerprint(&self) -> &str {
        &self.shared.fingerprint
    }

    /// The loaded model.
    ///
    /// # Errors
    /// While the model loads, and after the engine failed or stopped.
    pub fn model(&self) -> Result<Arc<ModelHandle>, ApiError> {
        let status = self.engine().status();
        match (status.phase, status.model) {
            (EnginePhase::Ready | EnginePhase::Draining, Some(model)) => Ok(model),
            (EnginePhase::Ready, None) => Err(ApiError::unavailable(
                "no model is loaded; a request for a reply loads one",
            )),
            (phase, _) => Err(phase_error(&phase)),
        }
    }

    /// Rejects another model's name if `strict_model` is set. Of several models, the choice has
    /// checked it.
    pub fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        if self.lease.is_some() {
            return Ok(());
        }
        let served = &self.config().model_name;
        match asked {
            Some(asked)
                if self.config().strict_model
                    && asked.strip_suffix(":latest").unwrap_or(asked) != served =>
            {
                Err(ApiError::ModelNotFound {
                    asked: asked.to_owned(),
                    served: served.clone(),
                })
            }
            _ => Ok(()),
        }
    }
}
