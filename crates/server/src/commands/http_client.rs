//! Just enough of an HTTP client to ask a server about itself: one request a connection, no encryption.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// The largest answer that is read, in bytes.
const MOST_BYTES: u64 = 64 << 20;

/// A server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Server {
    /// As in `host:port`.
    authority: String,
    /// Sent with each request, if the server wants one.
    pub(super) key: Option<String>,
    /// Longest wait for anything to come.
    pub(super) patience: Duration,
}

/// What came back.
#[derive(Debug, Clone)]
pub(super) struct HttpResponse {
    /// The status.
    pub(super) status: u16,
    /// Header lines, names in small letters.
    pub(super) headers: Vec<(String, String)>,
    /// The body.
    pub(super) body: String,
    /// From the request to the first byte of the body, or to the end where there is none.
    pub(super) first_byte: Duration,
}

impl HttpResponse {
    /// A header's value.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(other, _)| other == name);
        found.next().map(|(_, value)| value.as_str())
    }

    /// The body as JSON; null where it is none.
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }

    /// The data of an event stream, in order, with the names of events where they have some.
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

impl Server {
    /// Reads `http://host:port`; a path such as `/v1` behind it is left away.
    pub(super) fn parse(url: &str) -> anyhow::Result<Server> {
        let rest = url.strip_prefix("http://").ok_or_else(|| {
            anyhow::anyhow!("--url {url}: use http://HOST:PORT; encryption is left to a proxy")
        })?;
        let host = rest.split('/').next().unwrap_or_default();
        if host.is_empty() {
            anyhow::bail!("--url {url}: the host is missing; use http://HOST:PORT");
        }
        let port_at = host.rfind(':').filter(|at| !host[*at..].contains(']'));
        let authority = match port_at {
            Some(_) => host.to_owned(),
            None => format!("{host}:80"),
        };
        Ok(Server {
            authority,
            key: None,
            patience: Duration::from_secs(600),
        })
    }

    /// `http://host:port`, with nothing behind it.
    pub(super) fn base(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Sends a request and reads the whole answer; a JSON body makes it a POST unless a method is given.
    pub(super) fn ask(&self, path: &str, body: Option<&Value>) -> Result<HttpResponse> {
        let method = if body.is_some() { "POST" } else { "GET" };
        let text = body.map(Value::to_string).unwrap_or_default();
        self.send((method, path), &[], text.as_bytes())
    }

    /// Sends a request with further headers and any body.
    pub(super) fn send(
        &self,
        (method, path): (&str, &str),
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<HttpResponse> {
        let mut stream = self.connect()?;
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n",
            self.authority,
            body.len()
        );
        if !body.is_empty() {
            head += "content-type: application/json\r\n";
        }
        if let Some(key) = &self.key {
            head += &format!("authorization: Bearer {key}\r\n");
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        let begun = Instant::now();
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        let mut bytes = Vec::new();
        let mut first_byte = None;
        let mut chunk = [0; 1 << 14];
        loop {
            let n = stream.read(&mut chunk)?;
            bytes.extend_from_slice(&chunk[..n]);
            let body_has_begun = || {
                let at = head_end(&bytes)?;
                (bytes.len() > at).then_some(())
            };
            if first_byte.is_none() && (n == 0 || body_has_begun().is_some()) {
                first_byte = Some(begun.elapsed());
            }
            if n == 0 {
                break;
            }
            if bytes.len() as u64 > MOST_BYTES {
                return Err(broken("the answer has no end"));
            }
        }
        let first_byte = first_byte.unwrap_or_default();
        read_answer(&bytes, first_byte)
    }

    fn connect(&self) -> Result<TcpStream> {
        let mut last = broken("the host has no address");
        for address in self.authority.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(self.patience))?;
                    stream.set_nodelay(true)?;
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn broken(why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, why.to_owned())
}

/// Where the body begins.
fn head_end(bytes: &[u8]) -> Option<usize> {
    let at = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    Some(at + 4)
}

fn read_answer(bytes: &[u8], first_byte: Duration) -> Result<HttpResponse> {
    let at = head_end(bytes).ok_or_else(|| broken("the answer is no HTTP"))?;
    let head = String::from_utf8_lossy(&bytes[..at]);
    let mut lines = head.lines();
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1)?.parse().ok())
        .ok_or_else(|| broken("the answer has no status"))?;
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim().to_lowercase(), value.trim().to_owned()))
        .collect();
    let chunked = headers
        .iter()
        .any(|(name, value)| name == "transfer-encoding" && value.eq_ignore_ascii_case("chunked"));
    let body = match chunked {
        true => whole(&bytes[at..])?,
        false => bytes[at..].to_vec(),
    };
    Ok(HttpResponse {
        status,
        headers,
        body: String::from_utf8_lossy(&body).into_owned(),
        first_byte,
    })
}

/// The body that was sent in chunks.
fn whole(mut rest: &[u8]) -> Result<Vec<u8>> {
    let cut = || broken("the answer ends in the middle");
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|window| window == b"\r\n");
        let line = line.ok_or_else(cut)?;
        let size = std::str::from_utf8(&rest[..line]).unwrap_or_default();
        let size = size.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16).map_err(|_| broken("a chunk has no size"))?;
        rest = &rest[line + 2..];
        if size == 0 {
            return Ok(body);
        }
        body.extend_from_slice(rest.get(..size).ok_or_else(cut)?);
        rest = rest.get(size + 2..).ok_or_else(cut)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_and_without_a_path() {
        for (url, base) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
            ("http://host", "http://host:80"),
            ("http://[::1]:9/v1", "http://[::1]:9"),
            ("http://[::1]", "http://[::1]:80"),
        ] {
            assert_eq!(Server::parse(url).unwrap().base(), base, "{url}");
        }
        for wrong in ["https://x", "127.0.0.1:8000", "http:///v1"] {
            assert!(Server::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn chunks_are_put_together_and_a_cut_answer_is_an_error() {
        let text = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n";
        let answer = read_answer(text, Duration::ZERO).unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (200, "abcde"));
        for cut in 48..text.len() - 5 {
            assert!(read_answer(&text[..cut], Duration::ZERO).is_err(), "{cut}");
        }
    }
}
