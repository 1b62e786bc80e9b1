//! The HTTP client of the commands that talk to a running server. It sends plain HTTP only.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::http::request::Builder;
use ureq::http::{HeaderMap, Method, Request, Response};
use ureq::{Agent, Body};

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest response body, in bytes.
const MAX_BODY_BYTES: u64 = 64 << 20;

/// A client of one server.
#[derive(Debug, Clone)]
pub(super) struct HttpClient {
    /// `http://host:port`, without a path.
    base: String,
    /// Sent as a bearer token with each request, if the server asks for one.
    key: Option<String>,
    agent: Agent,
}

/// A response, read to its end.
#[derive(Debug, Clone)]
pub(super) struct HttpResponse {
    /// The status code.
    pub(super) status: u16,
    headers: HeaderMap,
    /// The body; bytes that are not UTF-8 are replaced.
    pub(super) body: String,
    /// From the request to the first byte of the body, or to its end if it is empty.
    pub(super) first_byte: Duration,
}

impl HttpResponse {
    /// A header's value, if it is text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body as JSON; null if it is not JSON.
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }

    /// Name and data of each server-sent event, in order; the name is empty for an event without
    /// one.
    pub(super) fn events(&self) -> Vec<(String, String)> {
        let mut events = Vec::new();
        let mut name = String::new();
        for line in self.body.lines() {
            if let Some(event) = line.strip_prefix("event: ") {
                name = event.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                events.push((std::mem::take(&mut name), data.to_owned()));
            }
        }
        events
    }
}

impl HttpClient {
    /// A client of the server at `url`, such as `http://host:port`; a path such as `/v1` is
    /// dropped.
    ///
    /// A request fails if nothing arrives for `read_timeout`.
    ///
    /// # Errors
    /// If the URL has another scheme than `http`, or no host.
    pub(super) fn new(
        url: &str,
        key: Option<String>,
        read_timeout: Duration,
    ) -> anyhow::Result<HttpClient> {
        let rest = url.strip_prefix("http://").ok_or_else(|| {
            anyhow::anyhow!("--url {url}: use http://HOST:PORT; a proxy can add encryption")
        })?;
        let host = rest.split('/').next().unwrap_or_default();
        if host.is_empty() {
            anyhow::bail!("--url {url}: the host is missing; use http://HOST:PORT");
        }
        let has_port = host.rfind(':').is_some_and(|at| !host[at..].contains(']'));
        let port = if has_port { "" } else { ":80" };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // Each request has a connection of its own, as those of a new client would.
            .max_idle_connections(0)
            .proxy(None)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_per_read(Some(read_timeout));
        Ok(HttpClient {
            base: format!("http://{host}{port}"),
            key,
            agent: config.build().new_agent(),
        })
    }

    /// The same client with another key.
    pub(super) fn with_key(&self, key: &str) -> HttpClient {
        HttpClient {
            key: Some(key.to_owned()),
            ..self.clone()
        }
    }

    /// `http://host:port`, without a path.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// The key that requests carry.
    pub(super) fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Sends a GET and reads the whole response.
    ///
    /// # Errors
    /// If the server cannot be reached, breaks off, or is silent for too long. No status is an
    /// error.
    pub(super) fn get(&self, path: &str) -> Result<HttpResponse, ureq::Error> {
        self.send(Method::GET, path, &[], b"")
    }

    /// Sends a POST with a JSON body and reads the whole response.
    ///
    /// # Errors
    /// As [`HttpClient::get`].
    pub(super) fn post(&self, path: &str, body: &Value) -> Result<HttpResponse, ureq::Error> {
        self.send(Method::POST, path, &[], body.to_string().as_bytes())
    }

    /// Sends a POST and gives each line of a streamed response to `line` as it arrives, with the
    /// time since the request. Returns the status, and the body if the status is not 200.
    ///
    /// # Errors
    /// As [`HttpClient::get`].
    pub(super) fn post_stream(
        &self,
        path: &str,
        body: &Value,
        mut line: impl FnMut(&str, Duration),
    ) -> Result<(u16, String), ureq::Error> {
        let request = self.request(Method::POST, path);
        let request = request.header("content-type", "application/json");
        let start = Instant::now();
        let response = self.agent.run(request.body(body.to_string())?)?;
        if response.status() != 200 {
            let response = read_response(response, start)?;
            return Ok((response.status, response.body));
        }
        let body = response.into_body().into_with_config();
        let mut reader = BufReader::new(body.limit(MAX_BODY_BYTES).reader());
        let mut text = Vec::new();
        while reader.read_until(b'\n', &mut text)? > 0 {
            line(String::from_utf8_lossy(&text).trim_end(), start.elapsed());
            text.clear();
        }
        Ok((200, String::new()))
    }

    /// Sends a POST with a JSON body; the response's body arrives while it is read, whatever the
    /// status.
    ///
    /// # Errors
    /// As [`HttpClient::get`].
    pub(super) fn stream(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<impl Read + Send + 'static, ureq::Error> {
        let request = self.request(Method::POST, path);
        let request = request.header("content-type", "application/json");
        let response = self.agent.run(request.body(body.to_string())?)?;
        let body = response.into_body().into_with_config();
        Ok(body.limit(MAX_BODY_BYTES).reader())
    }

    /// A request with the key.
    fn request(&self, method: Method, path: &str) -> Builder {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base));
        match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    /// Sends any request, with further headers, and reads the whole response.
    ///
    /// # Errors
    /// As [`HttpClient::get`].
    pub(super) fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<HttpResponse, ureq::Error> {
        let mut request = self.request(method, path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let start = Instant::now();
        let response = if body.is_empty() {
            self.agent.run(request.body(())?)
        } else {
            request = request.header("content-type", "application/json");
            self.agent.run(request.body(body)?)
        }?;
        read_response(response, start)
    }
}

fn read_response(response: Response<Body>, start: Instant) -> Result<HttpResponse, ureq::Error> {
    let (head, body) = response.into_parts();
    let mut reader = body.into_with_config().limit(MAX_BODY_BYTES).reader();
    let mut bytes = Vec::new();
    // The first read returns as soon as a byte is there, which is what `first_byte` measures.
    let mut chunk = [0; 1 << 14];
    let n = reader.read(&mut chunk)?;
    let first_byte = start.elapsed();
    bytes.extend_from_slice(&chunk[..n]);
    reader.read_to_end(&mut bytes)?;
    Ok(HttpResponse {
        status: head.status.as_u16(),
        headers: head.headers,
        body: String::from_utf8_lossy(&bytes).into_owned(),
        first_byte,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn urls_parse_with_and_without_path_and_port() {
        for (url, base) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
            ("http://host", "http://host:80"),
            ("http://[::1]:9/v1", "http://[::1]:9"),
            ("http://[::1]", "http://[::1]:80"),
        ] {
            let client = HttpClient::new(url, None, TIMEOUT).unwrap();
            assert_eq!(client.base(), base, "{url}");
        }
        for wrong in ["https://x", "127.0.0.1:8000", "http:///v1"] {
            assert!(HttpClient::new(wrong, None, TIMEOUT).is_err(), "{wrong}");
        }
    }

    /// What a client makes of one response, sent as `parts` with a pause before each but the first.
    fn get(
        parts: &'static [&'static str],
        read_timeout: Duration,
    ) -> Result<HttpResponse, ureq::Error> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let n = stream.read(&mut request).unwrap();
            for (index, part) in parts.iter().enumerate() {
                thread::sleep(PAUSE * u32::from(index > 0));
                // A client that gave up has closed the connection.
                let _ = stream.write_all(part.as_bytes());
            }
            String::from_utf8_lossy(&request[..n]).into_owned()
        });
        let client = HttpClient::new(&url, Some("k".to_owned()), read_timeout).unwrap();
        let response = client.get("/x");
        let request = server.join().unwrap().to_lowercase();
        assert!(request.starts_with("get /x http/1.1\r\n"), "{request}");
        assert!(request.contains("authorization: bearer k\r\n"), "{request}");
        response
    }

    const PAUSE: Duration = Duration::from_millis(200);
    const HEAD: &str = "HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n";

    #[test]
    fn event_stream_is_read_to_its_end_and_first_byte_is_timed() {
        let parts = &[
            HEAD,
            "13\r\nevent: a\ndata: {\"x\"\r\n",
            "13\r\n:1}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n",
        ];
        let response = get(parts, TIMEOUT).unwrap();
        assert_eq!((response.status, response.header("x-a")), (503, Some("b")));
        let events = response.events();
        let [(first, data), (second, done)] = &events[..] else {
            panic!("{events:?}");
        };
        assert_eq!((first.as_str(), data.as_str()), ("a", "{\"x\":1}"));
        assert_eq!((second.as_str(), done.as_str()), ("", "[DONE]"));
        assert!(response.first_byte >= PAUSE, "{:?}", response.first_byte);
        assert!(response.first_byte < TIMEOUT, "{:?}", response.first_byte);
    }

    #[test]
    fn cut_response_is_an_error() {
        for parts in [
            &["HTTP/1.1 200 OK\r\n"][..],
            &[HEAD, "3\r\nab"],
            &[HEAD, "3\r\nabc\r\n"],
            &["HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab"],
            &["no HTTP at all\r\n\r\n"],
        ] {
            assert!(get(parts, TIMEOUT).is_err(), "{parts:?}");
        }
    }

    #[test]
    fn silent_server_is_a_timeout() {
        let error = get(&[HEAD, "1\r\na\r\n0\r\n\r\n"], PAUSE / 10).unwrap_err();
        assert!(matches!(error, ureq::Error::Timeout(_)), "{error:?}");
    }
}
