//! Flags of `hearth serve` on allowed hosts, allowed origins and connections.

use clap::Args;
use clap::builder::FalseyValueParser;
use clap::value_parser;

use super::{ResponsesArgs, at_least_one};
use crate::http::access::{parse_allowed_host, parse_cors_origin};

/// Allowed hosts, allowed origins and limits of connections.
#[derive(Debug, Clone, Args)]
pub struct ListenArgs {
    /// A host name besides localhost in the Host header of requests to a server without a key, such
    /// as `host.docker.internal`; may be repeated, and `*` allows any. With a key every name is
    /// allowed.
    #[arg(
        long,
        env = "HEARTH_ALLOWED_HOST",
        value_name = "HOST",
        value_delimiter = ',',
        value_parser = parse_allowed_host
    )]
    pub allowed_host: Vec<String>,
    /// An origin besides localhost whose web pages can use the server, such as
    /// `https://chat.example.org`; may be repeated, and `*` allows any [default: none without a
    /// key, any with one].
    #[arg(
        long,
        env = "HEARTH_CORS_ORIGIN",
        value_name = "ORIGIN",
        value_delimiter = ',',
        value_parser = parse_cors_origin
    )]
    pub cors_origin: Vec<String>,
    /// Send no CORS headers.
    #[arg(long, env = "HEARTH_NO_CORS", value_parser = FalseyValueParser::new())]
    pub no_cors: bool,
    /// The longest wait for a request's head, for more of its body, and for the next request of a
    /// connection, in seconds.
    #[arg(long, env = "HEARTH_READ_TIMEOUT", value_name = "SECONDS", default_value_t = 60,
        value_parser = value_parser!(u64).range(1..=86_400))]
    pub read_timeout: u64,
    /// The most open connections; further ones wait.
    #[arg(long, env = "HEARTH_MAX_CONNECTIONS", value_name = "N", default_value = "1024",
        value_parser = at_least_one)]
    pub max_connections: usize,
    /// Kept responses.
    #[command(flatten)]
    pub responses: ResponsesArgs,
}
