//! Accepts connections and bounds their number, their time to read and their time to write.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tower_http::timeout::RequestBodyTimeoutLayer;

/// Delay after a failed accept, such as for want of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(200);

/// Bounds of all connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionLimits {
    /// Open connections; further ones wait in the listener's backlog.
    pub(crate) open: usize,
    /// Time for a request's head, between two parts of its body, and between two requests.
    pub(crate) read: Duration,
    /// Time for which a client may take nothing of what is written to it.
    pub(crate) write: Duration,
}

/// Serves connections until `close` is ready, then those that are open until they end.
pub(crate) async fn accept(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    close: impl Future<Output = ()>,
) {
    let router = router.layer(RequestBodyTimeoutLayer::new(limits.read));
    let permits = Arc::new(Semaphore::new(limits.open.min(Semaphore::MAX_PERMITS)));
    let open = GracefulShutdown::new();
    tokio::pin!(close);
    loop {
        let next = async {
            let permit = Arc::clone(&permits).acquire_owned().await;
            (permit, accept_one(&listener).await)
        };
        let (permit, stream) = tokio::select! {
            next = next => next,
            () = &mut close => break,
        };
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(limits.write));
        let mut http = http1::Builder::new();
        // The timeout of the head also ends a connection without a next request.
        http.timer(TokioTimer::new())
            .header_read_timeout(limits.read);
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(TokioIo::new(Box::pin(stream)), service);
        let connection = open.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection broke off");
            }
            drop(permit);
        });
    }
    drop(listener);
    open.shutdown().await;
}

/// The next connection; failures of single connections are passed over.
async fn accept_one(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "a connection keeps its delay");
                }
                return stream;
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}
