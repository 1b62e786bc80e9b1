//! Life cycle of one server.

use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::engine::handle::EngineHandle;
use crate::engine::{Engine, EngineFactory, EnginePhase};
use crate::error::ServeError;
use crate::http::connections::{self, ConnectionLimits};
use crate::http::routes;
use crate::http::shutdown::ShutdownSignal;
use crate::http::state::App;
use crate::models::ModelHost;
use crate::settings::ServerConfig;

/// Time between two looks for a model file that was shortened.
const TRUNCATION_CHECK: Duration = Duration::from_secs(1);
/// Time for connections to flush after the engine has ended.
const LAST_BYTES: Duration = Duration::from_secs(2);

/// Serves until a shutdown is requested or the engine fails.
///
/// The listener answers at once: health reports "loading" until `factory`, run on the engine
/// thread, returns the model. The first shutdown request stops admission, rejects queued requests
/// and lets running ones finish within the timeout. The second returns at once.
pub async fn serve(
    config: ServerConfig,
    factory: EngineFactory,
    listener: TcpListener,
    stop: ShutdownSignal,
) -> Result<(), ServeError> {
    let (engine, handle) = Engine::start(factory, config.queue_limit)?;
    let served = serve_with(config, handle.clone(), listener, stop).await;
    // Loading cannot be interrupted and a second signal does not wait: process exit ends the
    // thread.
    let leaves =
        handle.phase() == EnginePhase::Loading || matches!(served, Err(ServeError::Forced));
    if !leaves {
        handle.drain(Duration::ZERO);
        // The engine ends with its current step at the latest; a blocking join would stall a
        // worker.
        let _ = tokio::task::spawn_blocking(move || engine.join()).await;
    }
    served
}

/// Serves several models until a shutdown is requested. A model that cannot be loaded and an engine
/// that is lost concern only their own requests.
pub async fn serve_models(
    config: ServerConfig,
    host: ModelHost,
    listener: TcpListener,
    stop: ShutdownSignal,
) -> Result<(), ServeError> {
    let timeouts = config.timeouts;
    let limits = limits_of(&config);
    let app = App::hosted(config, host.clone());
    let (closing, mut server) = start_accepting(app, limits, listener);
    tokio::select! {
        () = stop.requested(1) => {}
        file = truncated_file() => {
            // Long enough for error events of open requests.
            tokio::time::sleep(timeouts.failure_grace).await;
            host.shut_down(Duration::ZERO).await;
            return Err(ServeError::EngineLost(format!(
                "{file}: the file was shortened while it was in use"
            )));
        }
        broken = &mut server => {
            host.shut_down(timeouts.shutdown).await;
            return broken.map_err(|error| ServeError::Io(std::io::Error::other(error)));
        }
    }
    tracing::info!(grace_s = timeouts.shutdown.as_secs(), "stopping");
    drop(closing);
    let drained = async {
        host.shut_down(timeouts.shutdown).await;
        let _ = tokio::time::timeout(LAST_BYTES, &mut server).await;
    };
    tokio::select! {
        () = drained => Ok(()),
        () = stop.requested(2) => Err(ServeError::Forced),
    }
}

fn limits_of(config: &ServerConfig) -> ConnectionLimits {
    ConnectionLimits {
        open: config.max_connections,
        read: config.timeouts.read,
        write: config.timeouts.write,
    }
}

/// Accepts connections in a task of its own, until the sender is dropped.
fn start_accepting(
    app: App,
    limits: ConnectionLimits,
    listener: TcpListener,
) -> (oneshot::Sender<()>, JoinHandle<()>) {
    let (closing, close) = oneshot::channel::<()>();
    let close = async {
        // A dropped sender has the same effect.
        let _ = close.await;
    };
    let server = connections::accept(listener, routes::router(app), limits, close);
    (closing, tokio::spawn(server))
}

/// As [`serve`], on an engine that the caller started and joins.
pub async fn serve_with(
    config: ServerConfig,
    handle: EngineHandle,
    listener: TcpListener,
    stop: ShutdownSignal,
) -> Result<(), ServeError> {
    let timeouts = config.timeouts;
    let limits = limits_of(&config);
    let app = App::new(config, handle.clone());
    let (closing, mut server) = start_accepting(app, limits, listener);
    let ended =
        |phase: &EnginePhase| matches!(phase, EnginePhase::Failed(_) | EnginePhase::Stopped);
    let life = async {
        match handle.wait_for(ended).await {
            // A failed engine without a model failed to load it.
            EnginePhase::Failed(detail) if handle.model().is_none() => {
                Ended::NotLoaded(detail.to_string())
            }
            EnginePhase::Failed(detail) => Ended::Lost(detail.to_string()),
            _ => Ended::Stopped,
        }
    };
    let outcome = tokio::select! {
        how = life => how,
        () = stop.requested(1) => Ended::Asked,
        broken = &mut server => {
            handle.drain(timeouts.shutdown);
            return broken.map_err(|error| ServeError::Io(std::io::Error::other(error)));
        }
    };
    let result = match outcome {
        Ended::NotLoaded(detail) => Err(ServeError::Load(detail)),
        Ended::Lost(detail) => {
            // Long enough for health probes and for error events of open requests.
            tokio::time::sleep(timeouts.failure_grace).await;
            Err(ServeError::EngineLost(detail))
        }
        Ended::Stopped => Ok(()),
        Ended::Asked => {
            tracing::info!(grace_s = timeouts.shutdown.as_secs(), "stopping");
            if handle.phase() == EnginePhase::Loading {
                return Ok(());
            }
            handle.drain(timeouts.shutdown);
            drop(closing);
            let drained = async {
                let phase = handle.wait_for(ended).await;
                let _ = tokio::time::timeout(LAST_BYTES, &mut server).await;
                phase
            };
            return tokio::select! {
                phase = drained => match phase {
                    EnginePhase::Failed(detail) => Err(ServeError::EngineLost(detail.to_string())),
                    _ => Ok(()),
                },
                () = stop.requested(2) => Err(ServeError::Forced),
            };
        }
    };
    drop(closing);
    let _ = tokio::time::timeout(LAST_BYTES, &mut server).await;
    result
}

/// Waits until a model file is shortened while it is in use; from then on no weights are right.
async fn truncated_file() -> String {
    loop {
        match gguf::truncated_file() {
            Some(file) => return file.to_string(),
            None => tokio::time::sleep(TRUNCATION_CHECK).await,
        }
    }
}

enum Ended {
    NotLoaded(String),
    Lost(String),
    Stopped,
    Asked,
}
