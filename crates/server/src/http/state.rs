//! What all routes share.

use std::sync::Arc;

use crate::engine::active_requests::ActiveRequests;
use crate::engine::control::ControlRegistry;
use crate::engine::handle::EngineHandle;
use crate::engine::{Phase, Ready};
use crate::error::{ApiError, phase_error};
use crate::http::metrics::Metrics;
use crate::http::middleware::ApiKeys;
use crate::settings::ServerConfig;

/// The shared state; cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    config: ServerConfig,
    engine: EngineHandle,
    keys: ApiKeys,
    metrics: Metrics,
    controls: ControlRegistry,
    active_requests: Arc<ActiveRequests>,
    started_unix: u64,
}

impl App {
    /// Joins a configuration and a running engine.
    pub fn new(config: ServerConfig, engine: EngineHandle) -> App {
        App(Arc::new(Inner {
            keys: ApiKeys::new(&config.api_keys),
            metrics: Metrics::new(),
            controls: ControlRegistry::default(),
            active_requests: Arc::default(),
            started_unix: crate::ids::unix_now(),
            config,
            engine,
        }))
    }

    /// What the server was told.
    pub fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    /// The door to the engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.0.engine
    }

    /// Who is let in.
    pub fn keys(&self) -> &ApiKeys {
        &self.0.keys
    }

    /// The meters.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Who is being served.
    pub fn active_requests(&self) -> &Arc<ActiveRequests> {
        &self.0.active_requests
    }

    /// Answers under way.
    pub fn controls(&self) -> &ControlRegistry {
        &self.0.controls
    }

    /// When the server started, in seconds since 1970.
    pub fn started_unix(&self) -> u64 {
        self.0.started_unix
    }

    /// The loaded model; an error while it is loading or after the engine was lost.
    pub fn ready(&self) -> Result<Arc<Ready>, ApiError> {
        let published = self.0.engine.published();
        match (published.phase, published.ready) {
            (Phase::Ready | Phase::Draining, Some(ready)) => Ok(ready),
            (phase, _) => Err(phase_error(&phase)),
        }
    }

    /// Refuses another model's name if names are checked.
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
