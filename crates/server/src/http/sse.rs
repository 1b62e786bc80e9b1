//! Server-sent events: the bytes of one stream, and who writes them.
//!
//! A stream is written by a task of its own into a short channel that the connection reads. So silence can be
//! filled with comments, a reader that takes nothing can be given up, and a reader that goes away is noticed at
//! once: the task is dropped, and with it the request.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::settings::Timeouts;

/// Parts that may wait for a slow reader before the writer has to wait too.
const CHANNEL_PARTS: usize = 32;

/// Encodes events into one buffer, so that all of one engine step goes out in one piece.
#[derive(Debug, Default)]
pub struct SseEncoder {
    out: BytesMut,
}

impl SseEncoder {
    /// `data: {json}`.
    pub fn data(&mut self, value: &impl Serialize) {
        self.out.put_slice(b"data: ");
        match serde_json::to_writer((&mut self.out).writer(), value) {
            Ok(()) => {}
            // The types written here hold strings and numbers only, so this cannot arise; a client still
            // gets a well-formed line if it ever does.
            Err(error) => tracing::error!(%error, "an event could not be written"),
        }
        self.out.put_slice(b"\n\n");
    }

    /// `event: name` and `data: {json}`.
    pub fn event(&mut self, name: &str, value: &impl Serialize) {
        self.out.put_slice(b"event: ");
        self.out.put_slice(name.as_bytes());
        self.out.put_slice(b"\n");
        self.data(value);
    }

    /// The end mark of OpenAI streams.
    pub fn done(&mut self) {
        self.out.put_slice(b"data: [DONE]\n\n");
    }

    /// A comment, which clients ignore.
    pub fn comment(&mut self, text: &str) {
        self.out.put_slice(b": ");
        self.out.put_slice(text.as_bytes());
        self.out.put_slice(b"\n\n");
    }

    /// What was encoded since the last call; `None` when that is nothing.
    pub fn take(&mut self) -> Option<Bytes> {
        if self.out.is_empty() {
            return None;
        }
        Some(self.out.split().freeze())
    }
}

/// The reader has gone, or has taken nothing for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the client has gone")]
pub struct ClientGone;

/// What fills a stream that has been silent for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// A comment, which every reader skips.
    Comment,
    /// Anthropic's event for this; its clients do not count comments as signs of life.
    Ping,
}

impl KeepAlive {
    fn bytes(self) -> Bytes {
        Bytes::from_static(match self {
            KeepAlive::Comment => b": keepalive\n\n",
            KeepAlive::Ping => b"event: ping\ndata: {\"type\":\"ping\"}\n\n",
        })
    }
}

/// The writing end of a stream.
#[derive(Debug)]
pub struct SseWriter {
    parts: mpsc::Sender<Bytes>,
    write_timeout: Duration,
    keep_alive_interval: Duration,
    keep_alive: KeepAlive,
    last_write: Instant,
}

impl SseWriter {
    /// Hands a part to the connection; waits while it is behind, up to the write limit.
    pub async fn send(&mut self, part: Bytes) -> Result<(), ClientGone> {
        let sent = self.parts.send_timeout(part, self.write_timeout).await;
        self.last_write = Instant::now();
        sent.map_err(|_| ClientGone)
    }

    /// Waits for `work`, filling it whenever the stream has been silent for too long, and giving up
    /// when the reader goes.
    pub async fn keep_alive_while<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, ClientGone> {
        tokio::pin!(work);
        loop {
            let keep_alive_at = self.last_write + self.keep_alive_interval;
            tokio::select! {
                biased;
                done = timeout_at(keep_alive_at, &mut work) => match done {
                    Ok(value) => return Ok(value),
                    Err(_) => self.send(self.keep_alive.bytes()).await?,
                },
                () = self.parts.closed() => return Err(ClientGone),
            }
        }
    }
}

/// A streaming response whose body is what `write` sends. Headers go out at once.
pub fn response<F, W>(timeouts: Timeouts, keep_alive: KeepAlive, write: W) -> Response
where
    F: Future<Output = Result<(), ClientGone>> + Send + 'static,
    W: FnOnce(SseWriter) -> F,
{
    let (parts, body) = mpsc::channel(CHANNEL_PARTS);
    let writer = SseWriter {
        parts,
        write_timeout: timeouts.write,
        keep_alive_interval: timeouts.keep_alive,
        keep_alive,
        last_write: Instant::now(),
    };
    tokio::spawn(write(writer));
    let body = stream::unfold(body, |mut body| async {
        let part = body.recv().await?;
        Some((Ok::<_, Infallible>(part), body))
    });
    let mut response = Body::from_stream(body).into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_one_line_each_and_leave_the_encoder_empty() {
        let mut encoder = SseEncoder::default();
        assert_eq!(encoder.take(), None);
        encoder.data(&serde_json::json!({"text": "a\nb"}));
        encoder.comment("keepalive");
        encoder.done();
        let bytes = encoder.take().unwrap();
        assert_eq!(
            bytes,
            "data: {\"text\":\"a\\nb\"}\n\n: keepalive\n\ndata: [DONE]\n\n"
        );
        assert_eq!(encoder.take(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_given_up() {
        let (parts, mut body) = mpsc::channel(1);
        let mut writer = SseWriter {
            parts,
            write_timeout: Duration::from_secs(120),
            keep_alive_interval: Duration::from_secs(10),
            keep_alive: KeepAlive::Comment,
            last_write: Instant::now(),
        };
        let begun = Instant::now();
        assert_eq!(writer.send(Bytes::from_static(b"a")).await, Ok(()));
        assert_eq!(writer.send(Bytes::from_static(b"b")).await, Err(ClientGone));
        assert_eq!(begun.elapsed(), Duration::from_secs(120));
        assert_eq!(body.recv().await.unwrap(), "a");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_filled_and_a_leaving_reader_is_noticed() {
        let (parts, mut body) = mpsc::channel(8);
        let mut writer = SseWriter {
            parts,
            write_timeout: Duration::from_secs(120),
            keep_alive_interval: Duration::from_secs(10),
            keep_alive: KeepAlive::Comment,
            last_write: Instant::now(),
        };
        let work = tokio::time::sleep(Duration::from_secs(25));
        assert_eq!(writer.keep_alive_while(work).await, Ok(()));
        assert_eq!(body.len(), 2);
        assert_eq!(body.recv().await.unwrap(), ": keepalive\n\n");
        drop(body);
        let never = std::future::pending::<()>();
        assert_eq!(writer.keep_alive_while(never).await, Err(ClientGone));
    }
}
