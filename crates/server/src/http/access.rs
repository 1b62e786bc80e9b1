//! Access of browsers and foreign hosts to a server without an API key.
//!
//! A web page can send requests to any address its reader reaches, and a name under its control
//! can resolve to 127.0.0.1. Without a key the server therefore checks what pages cannot forge: the
//! `Host` and `Origin` headers, and a JSON content type or the user agent of curl, which a page may
//! not send across origins without a preflight request. With a key, the key is the check.

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};

use crate::error::ApiError;
use crate::settings::ServerConfig;

/// Origins that may read replies from a web page.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CorsOrigins {
    /// All, by `--cors-origin '*'` or an API key.
    Any,
    /// Loopback origins, the server's own, and these, in lowercase.
    Listed(Vec<String>),
    /// None: no CORS header is sent.
    #[default]
    Disabled,
}

/// Which requests the server takes and which web pages may read the replies.
#[derive(Debug, Clone)]
pub struct AccessPolicy {
    /// Host names beside loopback ones, in lowercase and without a port.
    hosts: Vec<String>,
    /// Whether any origin may send requests.
    any_origin: bool,
    /// Further origins that may send requests.
    origins: Vec<String>,
    cors: CorsOrigins,
}

impl AccessPolicy {
    /// The policy of `config`.
    pub fn new(config: &ServerConfig) -> AccessPolicy {
        let lower = |texts: &[String]| -> Vec<String> {
            texts
                .iter()
                .map(|text| text.trim_end_matches('/').to_ascii_lowercase())
                .collect()
        };
        let has_keys = !config.api_keys.is_empty();
        let mut hosts = lower(&config.allowed_hosts);
        // The address in `--host` was typed by the server's owner.
        hosts.push(bare_host(&config.host.to_ascii_lowercase()).to_owned());
        let origins = lower(&config.cors_origins);
        let any_origin = origins.iter().any(|origin| origin == "*");
        let cors = if !config.cors {
            CorsOrigins::Disabled
        } else if any_origin || (has_keys && origins.is_empty()) {
            CorsOrigins::Any
        } else {
            CorsOrigins::Listed(origins.clone())
        };
        AccessPolicy {
            hosts,
            any_origin,
            origins,
            cors,
        }
    }

    /// Refuses what a foreign web page could send to a server without a key.
    pub fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        self.check_host(uri, headers)?;
        self.check_origin(headers)?;
        if *method == Method::POST && !is_json(headers) && !is_data_of_curl(headers) {
            return Err(ApiError::UnsupportedMediaType);
        }
        Ok(())
    }

    fn check_host(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        let named = requested_host(uri, headers);
        let name = named.as_deref().map(bare_host).unwrap_or_default();
        let known = |host: &String| host == name || host == "*";
        if is_loopback(name) || (!name.is_empty() && self.hosts.iter().any(known)) {
            return Ok(());
        }
        Err(ApiError::Forbidden {
            message: format!(
                "host {name:?} is not a name of this server; add --allowed-host {name}, or require a key with --api-key"
            ),
        })
    }

    fn check_origin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        match header_text(headers, header::ORIGIN) {
            Some(origin) if !self.any_origin && !self.trusts(&origin, headers) => {
                Err(ApiError::Forbidden {
                    message: format!(
                        "pages of {origin} may not use this server; add --cors-origin {origin}, or require a key with --api-key"
                    ),
                })
            }
            _ => Ok(()),
        }
    }

    /// Whether `origin`, in lowercase, is a loopback origin, the server's own, or listed.
    fn trusts(&self, origin: &str, headers: &HeaderMap) -> bool {
        let Some((_, authority)) = origin.split_once("://") else {
            // The origin of sandboxed pages and local files is the text "null".
            return self.origins.iter().any(|known| known == origin);
        };
        is_loopback(bare_host(authority))
            || header_text(headers, header::HOST).is_some_and(|host| host == authority)
            || self.origins.iter().any(|known| known == origin)
    }

    /// The value of `Access-Control-Allow-Origin`, if one is sent.
    ///
    /// A value other than `*` depends on the request, so that caches need `Vary: Origin`.
    pub fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        match &self.cors {
            CorsOrigins::Disabled => None,
            CorsOrigins::Any => Some(HeaderValue::from_static("*")),
            CorsOrigins::Listed(_) => {
                let origin = header_text(headers, header::ORIGIN)?;
                if self.trusts(&origin, headers) {
                    headers.get(header::ORIGIN).cloned()
                } else {
                    None
                }
            }
        }
    }
}

fn header_text(headers: &HeaderMap, name: header::HeaderName) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    Some(text.to_ascii_lowercase())
}

/// The host and port that the request names; the target's authority wins over the header.
fn requested_host(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    match uri.authority() {
        Some(authority) => Some(authority.as_str().to_ascii_lowercase()),
        None => header_text(headers, header::HOST),
    }
}

/// The host of an authority: without user, port, brackets and the root's dot.
fn bare_host(authority: &str) -> &str {
    let bracketed = authority.starts_with('[');
    // An IPv6 address from `--host` has no brackets and no port.
    if !bracketed && authority.parse::<IpAddr>().is_ok() {
        return authority;
    }
    let after_user = authority.rsplit('@').next().unwrap_or(authority);
    let host = match after_user.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => after_user.split(':').next().unwrap_or(after_user),
    };
    host.strip_suffix('.').unwrap_or(host)
}

/// Whether the name, in lowercase, always means this machine.
fn is_loopback(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

/// Whether the body is declared as JSON.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(kind) = header_text(headers, header::CONTENT_TYPE) else {
        return false;
    };
    let essence = kind.split(';').next().unwrap_or_default().trim();
    essence == "application/json"
        || (essence.starts_with("application/") && essence.ends_with("+json"))
}

/// Whether curl or wget sends data that its user did not declare, which it calls a form, as in the
/// examples of Ollama's documents.
fn is_data_of_curl(headers: &HeaderMap) -> bool {
    let kind = header_text(headers, header::CONTENT_TYPE);
    let agent = header_text(headers, header::USER_AGENT).unwrap_or_default();
    kind.is_some_and(|kind| kind == "application/x-www-form-urlencoded")
        && ["curl/", "wget/"]
            .iter()
            .any(|name| agent.starts_with(name))
        && !headers.contains_key(header::ORIGIN)
}

/// A `--allowed-host` value: a host name or address without scheme and port, or `*`.
pub fn parse_allowed_host(text: &str) -> Result<String, String> {
    if text == "*" || text.parse::<IpAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    match text.parse::<Authority>() {
        Ok(authority) if authority.port().is_none() && !text.contains('@') => {
            Ok(bare_host(text).to_owned())
        }
        _ => {
            Err("must be a host name without scheme, port and path, such as my-box.lan".to_owned())
        }
    }
}

/// A `--cors-origin` value: `scheme://host[:port]`, `null`, or `*`.
pub fn parse_cors_origin(text: &str) -> Result<String, String> {
    if text == "*" || text == "null" {
        return Ok(text.to_owned());
    }
    let text = text.trim_end_matches('/');
    match text.split_once("://") {
        Some((scheme, host)) if !scheme.is_empty() && host.parse::<Authority>().is_ok() => {
            Ok(text.to_owned())
        }
        _ => Err("must be an origin such as https://chat.example.org, or *".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_names_differ_from_names_that_look_like_them() {
        for host in [
            "localhost",
            "localhost:8000",
            "localhost.:8000",
            "app.localhost",
            "127.0.0.1:8000",
            "127.9.9.9",
            "[::1]:8000",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(is_loopback(bare_host(host)), "{host}");
        }
        for host in [
            "",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "evil.example:80",
            "notlocalhost",
            "0.0.0.0",
            "10.0.0.1",
            "[::2]",
            "[fe80::1]",
        ] {
            assert!(!is_loopback(bare_host(host)), "{host}");
        }
    }

    #[test]
    fn only_json_content_types_pass() {
        for (kind, json) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("application/problem+json", true),
            ("text/plain", false),
            ("text/plain; application/json", false),
            ("multipart/form-data; boundary=application/json", false),
            ("application/x-www-form-urlencoded", false),
            ("application/jsonp", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            assert_eq!(is_json(&headers), json, "{kind}");
        }
        assert!(!is_json(&HeaderMap::new()));
    }

    #[test]
    fn undeclared_data_of_curl_passes_and_forms_of_pages_do_not() {
        let form = "application/x-www-form-urlencoded";
        for (kind, agent, origin, passes) in [
            (form, "curl/8.5.0", None, true),
            (form, "Wget/1.21", None, true),
            (form, "curl/8.5.0", Some("null"), false),
            (form, "Mozilla/5.0 curl/8.5.0", None, false),
            ("text/plain", "curl/8.5.0", None, false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
            if let Some(origin) = origin {
                headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
            }
            assert_eq!(is_data_of_curl(&headers), passes, "{kind} {agent}");
        }
    }

    #[test]
    fn malformed_flags_are_refused() {
        for host in ["*", "my-box", "host.docker.internal", "10.0.0.5", "::1"] {
            assert_eq!(parse_allowed_host(host).as_deref(), Ok(host));
        }
        for host in ["", "http://box", "box:80", "a/b", "u@box"] {
            assert!(parse_allowed_host(host).is_err(), "{host}");
        }
        for origin in ["*", "null", "https://a.example", "tauri://app:1"] {
            assert_eq!(parse_cors_origin(origin).as_deref(), Ok(origin));
        }
        assert_eq!(parse_cors_origin("http://a/").as_deref(), Ok("http://a"));
        for origin in ["", "a.example", "://a", "http://", "http://a/b"] {
            assert!(parse_cors_origin(origin).is_err(), "{origin}");
        }
    }
}
