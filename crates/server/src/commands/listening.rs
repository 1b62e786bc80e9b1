//! The port of `hearth serve`.

use std::io::ErrorKind;

use anyhow::{Context, bail};
use listenfd::ListenFd;
use tokio::net::TcpListener;

use crate::settings::ServerConfig;

/// An open port.
pub(super) struct Port {
    /// Where connections arrive.
    pub(super) listener: TcpListener,
    /// Whether the service manager opened it and started the server at the first request, which is
    /// to be answered once the model is loaded.
    pub(super) is_passed: bool,
}

/// The port of the service manager if it passed one (socket activation), else that of the settings.
///
/// # Errors
/// If the port cannot be opened.
pub(super) async fn listen(config: &ServerConfig) -> anyhow::Result<Port> {
    let passed = ListenFd::from_env().take_tcp_listener(0);
    if let Some(listener) = passed.context("the socket that was passed is no TCP port")? {
        listener.set_nonblocking(true)?;
        tracing::info!("the service manager passed the port; --host and --port are not used");
        return Ok(Port {
            listener: TcpListener::from_std(listener)?,
            is_passed: true,
        });
    }
    let (host, port) = (config.host.as_str(), config.port);
    match TcpListener::bind((host, port)).await {
        Ok(listener) => Ok(Port {
            listener,
            is_passed: false,
        }),
        Err(error) if error.kind() == ErrorKind::AddrInUse => bail!(
            "--port {port}: another program is listening on {host}:{port}; stop it, or choose another --port"
        ),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!("--port {port}: permission denied; ports below 1024 need more rights")
        }
        Err(error) => bail!("--host {host} --port {port}: cannot listen: {error}"),
    }
}
