//! Requests: redirects, tokens, status codes as errors, and retries.

use std::io::{self, Read};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde_json::Value;
use ureq::http::{HeaderMap, Request, Response, Uri};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, Body, Timeout};

use crate::settings::Tuning;
use crate::{HubError, HubSettings, OnEvent, PullEvent};

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Attempts at the first request while no server is reached, so that a wrong name of a host or a
/// network that is off is soon reported.
const UNREACHABLE_ATTEMPTS: u32 = 3;
/// The most redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// The largest answer of the hub's interface, in bytes.
const MAX_ANSWER: u64 = 64 << 20;
/// The longest sentence of a server that an error repeats, in characters.
const MAX_SENTENCE: usize = 200;

/// The client of one hub.
pub(crate) struct Client {
    agent: Agent,
    /// The hub's address.
    pub(crate) endpoint: String,
    token: Option<String>,
    /// Attempts and waits.
    pub(crate) tuning: Tuning,
}

/// A response whose body is not read yet.
pub(crate) struct Answer {
    /// 200 or 206.
    pub(crate) status: u16,
    /// The headers of the last response and, of redirects, those that describe the file.
    pub(crate) headers: HeaderMap,
    /// Where the last redirect led.
    pub(crate) url: String,
    body: Body,
}

impl Answer {
    /// A header's value, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body, byte by byte; a cut is an error.
    pub(crate) fn reader(self) -> impl Read {
        self.body.into_with_config().limit(u64::MAX).reader()
    }
}

impl Client {
    /// A client with the settings' proxy and token.
    pub(crate) fn new(settings: &HubSettings) -> Client {
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            // The system's certificates, so that those of a company's proxy count.
            .root_certs(RootCerts::PlatformVerifier)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("hearth/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(settings.tuning.read_timeout))
            .timeout_per_read(Some(settings.tuning.read_timeout));
        if !settings.proxy {
            config = config.proxy(None);
        }
        Client {
            agent: config.build().new_agent(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
            tuning: settings.tuning.clone(),
        }
    }

    /// Whether requests to the endpoint carry a token.
    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// An answer of the hub's interface as JSON, with its headers.
    ///
    /// # Errors
    /// By the status; [`HubError::Protocol`] if it is no JSON.
    pub(crate) fn json(
        &self,
        url: &str,
        report: OnEvent<'_>,
    ) -> Result<(Value, HeaderMap), HubError> {
        self.retrying(report, || {
            let answer = self.open(url, None)?;
            let (url, headers) = (answer.url.clone(), answer.headers.clone());
            let mut text = Vec::new();
            answer
                .reader()
                .take(MAX_ANSWER)
                .read_to_end(&mut text)
                .map_err(|error| self.broken(&url, &error))?;
            let value = serde_json::from_slice(&text).map_err(|error| HubError::Protocol {
                url: plain(&url),
                detail: error.to_string(),
            })?;
            Ok((value, headers))
        })
    }

    /// Runs a request again after errors that may pass, with growing waits.
    pub(crate) fn retrying<T>(
        &self,
        report: OnEvent<'_>,
        mut request: impl FnMut() -> Result<T, HubError>,
    ) -> Result<T, HubError> {
        let mut failed = 0;
        loop {
            match request() {
                Err(error) if error.is_transient() => {
                    failed += 1;
                    let is_away =
                        matches!(error, HubError::Unreachable { .. } | HubError::Proxy { .. });
                    if is_away && failed >= UNREACHABLE_ATTEMPTS {
                        return Err(error);
                    }
                    self.wait(failed, error, report)?;
                }
                result => return result,
            }
        }
    }

    /// Waits after the `failed`-th failure in a row, or returns the error if it was the last.
    pub(crate) fn wait(
        &self,
        failed: u32,
        error: HubError,
        report: OnEvent<'_>,
    ) -> Result<(), HubError> {
        if failed >= self.tuning.attempts {
            return Err(error);
        }
        let doubled = self.tuning.backoff * 2_u32.saturating_pow(failed - 1);
        let wait = error.retry_after().unwrap_or(doubled);
        if wait > self.tuning.max_wait && error.retry_after().is_some() {
            return Err(error);
        }
        let wait = wait.min(self.tuning.max_wait);
        report(PullEvent::Retrying {
            error: &error,
            wait,
        });
        thread::sleep(wait);
        Ok(())
    }

    /// Sends a GET and follows redirects. The token goes to the endpoint only.
    ///
    /// # Errors
    /// By the status, or by how the connection failed.
    pub(crate) fn open(&self, url: &str, range: Option<(u64, u64)>) -> Result<Answer, HubError> {
        let mut url = url.to_owned();
        let mut kept = HeaderMap::new();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(&url, range)?;
            let status = response.status().as_u16();
            for name in ["x-repo-commit", "x-linked-etag", "x-linked-size"] {
                if let Some(value) = response.headers().get(name) {
                    kept.insert(name, value.clone());
                }
            }
            match status {
                200 | 206 => {
                    let (head, body) = response.into_parts();
                    let mut headers = head.headers;
                    headers.extend(kept);
                    return Ok(Answer {
                        status,
                        headers,
                        url,
                        body,
                    });
                }
                301 | 302 | 303 | 307 | 308 => url = self.redirect(&url, response.headers())?,
                _ => return Err(refusal(&url, status, response)),
            }
        }
        Err(HubError::Protocol {
            url: plain(&url),
            detail: format!("more than {MAX_REDIRECTS} redirects"),
        })
    }

    fn send(&self, url: &str, range: Option<(u64, u64)>) -> Result<Response<Body>, HubError> {
        let mut request = Request::get(url);
        if let Some(token) = &self.token
            && origin(url).is_some()
            && origin(url) == origin(&self.endpoint)
        {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some((start, end)) = range {
            request = request.header("range", format!("bytes={start}-{}", end - 1));
        }
        let request = request.body(()).map_err(|error| HubError::Protocol {
            url: plain(url),
            detail: error.to_string(),
        })?;
        self.agent
            .run(request)
            .map_err(|error| self.failure(url, error))
    }

    /// The address that a redirect names.
    fn redirect(&self, url: &str, headers: &HeaderMap) -> Result<String, HubError> {
        let wrong = |detail: &str| HubError::Protocol {
            url: plain(url),
            detail: detail.to_owned(),
        };
        let to = headers
            .get("location")
            .and_then(|value| value.to_str().ok())
            .ok_or_else(|| wrong("a redirect without an address"))?;
        let next = if to.starts_with("https://") || to.starts_with("http://") {
            to.to_owned()
        } else if to.starts_with('/') && !to.starts_with("//") {
            format!("{}{to}", origin(url).unwrap_or_default())
        } else {
            return Err(wrong("a redirect to an address of another form"));
        };
        if url.starts_with("https://") && !next.starts_with("https://") {
            return Err(wrong("a redirect from https to http"));
        }
        Ok(next)
    }

    /// The error of a request without a response.
    fn failure(&self, url: &str, error: ureq::Error) -> HubError {
        let url = plain(url);
        match error {
            ureq::Error::ConnectProxyFailed(detail) => HubError::Proxy {
                url,
                proxy: self.proxy().unwrap_or_default(),
                detail,
            },
            ureq::Error::Tls(detail) => HubError::Certificate {
                url,
                detail: detail.to_owned(),
            },
            ureq::Error::Rustls(
                error @ (rustls::Error::InvalidCertificate(_) | rustls::Error::General(_)),
            ) => HubError::Certificate {
                url,
                detail: error.to_string(),
            },
            ureq::Error::BadUri(detail) => HubError::Protocol { url, detail },
            ureq::Error::Protocol(error) => HubError::Unreachable {
                url,
                detail: error.to_string(),
            },
            ureq::Error::Io(error) if is_certificate(&error) => HubError::Certificate {
                url,
                detail: error.to_string(),
            },
            error => {
                let detail = match &error {
                    ureq::Error::Io(error) => error.to_string(),
                    ureq::Error::HostNotFound => "the host's address is not known".to_owned(),
                    ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => {
                        "no connection in time".to_owned()
                    }
                    ureq::Error::Timeout(_) => "no answer in time".to_owned(),
                    other => other.to_string(),
                };
                match self.proxy() {
                    Some(proxy) => HubError::Proxy { url, proxy, detail },
                    None => HubError::Unreachable { url, detail },
                }
            }
        }
    }

    /// Host and port of the proxy in use, without its user and password.
    fn proxy(&self) -> Option<String> {
        let proxy = self.agent.config().proxy()?;
        Some(format!("{}:{}", proxy.host(), proxy.port()))
    }

    /// The error of a body that broke off.
    pub(crate) fn broken(&self, url: &str, error: &io::Error) -> HubError {
        HubError::Unreachable {
            url: plain(url),
            detail: format!("the connection broke: {error}"),
        }
    }
}

fn is_certificate(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// The error of a status that is neither a success nor a redirect.
///
/// `repository` makes 401, 403 and 404 exact.
fn refusal(url: &str, status: u16, response: Response<Body>) -> HubError {
    let url = plain(url);
    let headers = response.headers();
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let retry_after = text("retry-after")
        .and_then(|text| text.trim().parse().ok())
        .map(Duration::from_secs);
    let code = text("x-error-code").unwrap_or_default().to_owned();
    let sentence: String = text("x-error-message")
        .unwrap_or_default()
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_SENTENCE)
        .collect();
    match status {
        429 => HubError::RateLimited { url, retry_after },
        408 | 500.. => HubError::Server {
            url,
            status,
            retry_after,
        },
        404 | 410 => HubError::NotFound { url, code },
        401 | 403 => HubError::Refused {
            url,
            status,
            code,
            sentence: match sentence.as_str() {
                "" => String::new(),
                text => format!(" ({text})"),
            },
        },
        _ => HubError::Protocol {
            url,
            detail: format!("status {status} {sentence}"),
        },
    }
}

/// Scheme, host and port of an address.
pub(crate) fn origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    let (scheme, host) = (uri.scheme_str()?, uri.host()?.to_ascii_lowercase());
    let port = uri
        .port_u16()
        .unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some(format!("{scheme}://{host}:{port}"))
}

/// An address without its query, which may hold a signature, and without a user.
pub(crate) fn plain(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or(url);
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
            let host = host.rsplit('@').next().unwrap_or(host);
            format!("{scheme}://{host}/{path}")
        }
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_compare_by_scheme_host_and_port() {
        assert_eq!(origin("https://A.b/c?d"), origin("https://a.b:443"));
        assert_ne!(origin("https://a.b"), origin("http://a.b"));
        assert_ne!(origin("http://a.b:1"), origin("http://a.b:2"));
        assert_ne!(origin("https://a.b"), origin("https://a.b.evil"));
        assert_eq!(origin("nonsense"), None);
    }

    #[test]
    fn shown_addresses_have_no_signature_and_no_password() {
        assert_eq!(plain("https://u:p@a.b/c?sig=1"), "https://a.b/c");
        assert_eq!(plain("https://a.b"), "https://a.b/");
    }
}
