//! A small HTTP/1.1 client over a plain socket, so that a test can disconnect at any byte.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// Maximum time for which a test waits.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(120);

/// A response with parsed headers and an unread body.
pub(crate) struct HttpResponse {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    socket: BufReader<TcpStream>,
    /// Unread bytes of the current chunk.
    chunk: Vec<u8>,
    over: bool,
}

/// Sends a request and parses the response headers.
pub(crate) async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> HttpResponse {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        head.push_str("host: localhost\r\n");
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body).await.unwrap();
    read_head(socket).await
}

pub(crate) async fn read_head(socket: TcpStream) -> HttpResponse {
    let mut socket = BufReader::new(socket);
    let status_line = read_line(&mut socket).await;
    let status = status_line
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .unwrap_or_else(|| panic!("no status in {status_line:?}"));
    let mut headers = Vec::new();
    loop {
        let line = read_line(&mut socket).await;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    HttpResponse {
        status,
        headers,
        socket,
        chunk: Vec::new(),
        over: false,
    }
}

async fn read_line(socket: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    tokio::time::timeout(MAX_WAIT, socket.read_line(&mut line))
        .await
        .expect("a line in time")
        .unwrap();
    line.trim_end().to_owned()
}

impl HttpResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Names of the headers that start with `prefix`.
    pub(crate) fn header_names_starting(&self, prefix: &str) -> Vec<&str> {
        let names = self.headers.iter().map(|(name, _)| name.as_str());
        names.filter(|name| name.starts_with(prefix)).collect()
    }

    /// The whole body.
    pub(crate) async fn bytes(mut self) -> Vec<u8> {
        if let Some(length) = self.header("content-length") {
            let mut body = vec![0; length.parse().unwrap()];
            tokio::time::timeout(MAX_WAIT, self.socket.read_exact(&mut body))
                .await
                .expect("a body in time")
                .unwrap();
            return body;
        }
        let mut body = Vec::new();
        while let Some(part) = self.part().await {
            body.extend(part);
        }
        body
    }

    pub(crate) async fn json(self) -> Value {
        let bytes = self.bytes().await;
        serde_json::from_slice(&bytes)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&bytes)))
    }

    pub(crate) async fn text(self) -> String {
        String::from_utf8(self.bytes().await).unwrap()
    }

    /// The next chunk of a chunked body.
    async fn part(&mut self) -> Option<Vec<u8>> {
        if self.over || self.header("transfer-encoding") != Some("chunked") {
            return None;
        }
        let size = usize::from_str_radix(&read_line(&mut self.socket).await, 16).ok()?;
        let mut part = vec![0; size + 2];
        let read = self.socket.read_exact(&mut part);
        tokio::time::timeout(MAX_WAIT, read)
            .await
            .expect("a chunk in time")
            .ok()?;
        part.truncate(size);
        self.over = size == 0;
        (!self.over).then_some(part)
    }

    /// The next event of a stream, comments included, without its empty line.
    pub(crate) async fn event(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.chunk.windows(2).position(|w| w == b"\n\n") {
                let event = self.chunk.drain(..end + 2).collect::<Vec<u8>>();
                let text = String::from_utf8(event).expect("valid UTF-8 in every event");
                return Some(text.trim_end().to_owned());
            }
            let part = self.part().await?;
            self.chunk.extend(part);
        }
    }

    /// All named events of a stream with their data, up to its end.
    pub(crate) async fn events(mut self) -> Vec<(String, Value)> {
        let mut events = Vec::new();
        while let Some(event) = self.event().await {
            if event.starts_with(':') {
                continue;
            }
            let named = event.strip_prefix("event: ");
            let (name, data) = named
                .and_then(|event| event.split_once("\ndata: "))
                .unwrap_or_else(|| panic!("an event without name or data: {event}"));
            let data = serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"));
            events.push((name.to_owned(), data));
        }
        events
    }

    /// All data of a stream up to `[DONE]`, which must be last.
    pub(crate) async fn chunks(mut self) -> Vec<Value> {
        let mut chunks = Vec::new();
        while let Some(event) = self.event().await {
            let Some(data) = event.strip_prefix("data: ") else {
                assert!(event.starts_with(':'), "{event}");
                continue;
            };
            if data == "[DONE]" {
                assert_eq!(self.event().await, None, "nothing after the end");
                return chunks;
            }
            chunks.push(serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}")));
        }
        panic!("the stream has no [DONE]: {chunks:?}");
    }
}
