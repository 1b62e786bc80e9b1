//! What all routes share.

use std::sync::Arc;

use crate::engine::active_requests::Board;
use crate::engine::control::Live;
use crate::engine::handle::EngineHandle;
use crate::engine::{Phase, Ready};
use crate::error::{ApiError, phase_error};
use crate::http::metrics::Metrics;
use crate::http::middleware::Keys;
use crate::settings::ServerConfig;

/// The shared state; cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    config: ServerConfig,
    engine: EngineHandle,
    keys: Keys,
    metrics: Metrics,
    live: Live,
    board: Arc<Board>,
    started_unix: u64,
}

impl App {
    /// Joins a configuration and a running engine.
    pub fn new(config: ServerConfig, engine: EngineHandle) -> App {
        App(Arc::new(Inner {
            keys: Keys::new(&config.api_keys),
            metrics: Metrics::new(),
            live: Live::default(),
            board: Arc::default(),
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
    pub fn keys(&self) -> &Keys {
        &self.0.keys
    }

    /// The meters.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Who is being served.
    pub fn board(&self) -> &Arc<Board> {
        &self.0.board
    }

    /// Answers under way.
    pub fn live(&self) -> &Live {
        &self.0.live
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
