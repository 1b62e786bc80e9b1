//! Server-sent events: encoder, writer task and streaming response.
//!
//! Each stream has a writer task and a short channel to the connection. The task sends keep-alives,
//! times out a stalled reader, and is dropped with its request when the reader disconnects.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use crate::settings::Timeouts;

/// Channel capacity: parts that a slow reader may lag behind.
const CHANNEL_PARTS: usize = 32;

/// Encodes all events of one engine step into one buffer.
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
            // The serialised types hold strings and numbers only, so this cannot fail; the line
            // stays well-formed.
            Err(error) => tracing::error!(%error, "an event could not be written"),
        }
        self.out.put_slice(b"\n\n");
    }

    /// A line of JSON, without the marks of server-sent events.
    pub fn line(&mut self, value: &impl Serialize) {
        if let Err(error) = serde_json::to_writer((&mut self.out).writer(), value) {
            // As above.
            tracing::error!(%error, "a line could not be written");
        }
        self.out.put_slice(b"\n");
    }

    /// `event: name` and `data: {json}`.
    pub fn event(&mut self, name: &str, value: &impl Serialize) {
        self.out.put_slice(b"event: ");
        self.out.put_slice(name.as_bytes());
        self.out.put_slice(b"\n");
        self.data(value);
    }

    /// Terminator of OpenAI streams.
    pub fn done(&mut self) {
        self.out.put_slice(b"data: [DONE]\n\n");
    }

    /// A comment, which clients ignore.
    pub fn comment(&mut self, text: &str) {
        self.out.put_slice(b": ");
        self.out.put_slice(text.as_bytes());
        self.out.put_slice(b"\n\n");
    }

    /// Bytes encoded since the last call; `None` if there are none.
    pub fn take(&mut self) -> Option<Bytes> {
        if self.out.is_empty() {
            return None;
        }
        Some(self.out.split().freeze())
    }
}

/// The reader disconnected or stalled beyond the write timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the client has gone")]
pub struct ClientGone;

/// Keep-alive of an idle stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// SSE comment, which readers skip.
    Comment,
    /// Anthropic's `ping` event; its clients ignore comments as signs of life.
    Ping,
    /// A space before the next line of JSON, which readers skip.
    Space,
}

impl KeepAlive {
    fn bytes(self) -> Bytes {
        Bytes::from_static(match self {
            KeepAlive::Comment => b": keepalive\n\n",
            KeepAlive::Ping => b"event: ping\ndata: {\"type\":\"ping\"}\n\n",
            KeepAlive::Space => b" ",
        })
    }

    /// The keep-alive with a comment, where the stream has comments.
    fn comment(self, text: &str) -> Option<Bytes> {
        let mut out = SseEncoder::default();
        match self {
            KeepAlive::Comment => out.comment(text),
            KeepAlive::Ping => {
                out.comment(text);
                out.out.put(self.bytes());
            }
            KeepAlive::Space => {}
        }
        out.take()
    }

    /// Content type of the stream.
    fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            KeepAlive::Comment | KeepAlive::Ping => "text/event-stream; charset=utf-8",
            KeepAlive::Space => "application/x-ndjson",
        })
    }
}

/// Time between two comments on the progress of work before a reply.
const COMMENT_INTERVAL: Duration = Duration::from_secs(1);

/// Writing end of a stream.
#[derive(Debug)]
pub struct SseWriter {
    parts: mpsc::Sender<Bytes>,
    write_timeout: Duration,
    keep_alive_interval: Duration,
    keep_alive: KeepAlive,
    last_write: Instant,
}

impl SseWriter {
    /// Sends a part; waits for a slow reader up to the write timeout.
    pub async fn send(&mut self, part: Bytes) -> Result<(), ClientGone> {
        let sent = self.parts.send_timeout(part, self.write_timeout).await;
        self.last_write = Instant::now();
        sent.map_err(|_| ClientGone)
    }

    /// Sends what is encoded, if anything is.
    pub async fn send_encoded(&mut self, out: &mut SseEncoder) -> Result<(), ClientGone> {
        match out.take() {
            Some(part) => self.send(part).await,
            None => Ok(()),
        }
    }

    /// Waits for `work` and sends keep-alives meanwhile; fails when the reader disconnects.
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

    /// As [`keep_alive_while`](SseWriter::keep_alive_while), with a comment on the progress at once
    /// and then each second.
    pub async fn comment_while<T>(
        &mut self,
        work: impl Future<Output = T>,
        text: impl Fn() -> String,
    ) -> Result<T, ClientGone> {
        tokio::pin!(work);
        loop {
            if let Some(comment) = self.keep_alive.comment(&text()) {
                self.send(comment).await?;
            }
            let next = timeout(COMMENT_INTERVAL, &mut work);
            if let Ok(done) = self.keep_alive_while(next).await? {
                return Ok(done);
            }
        }
    }
}

/// Streaming response whose body `write` produces. Headers are sent at once.
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
    headers.insert(header::CONTENT_TYPE, keep_alive.content_type());
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_events_take_one_line_and_empty_the_encoder() {
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
    async fn stalled_reader_is_disconnected() {
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
    async fn progress_is_a_comment_each_second_and_a_ping_where_comments_do_not_count() {
        let cases = [
            (KeepAlive::Comment, ": 1 of 2\n\n"),
            (
                KeepAlive::Ping,
                ": 1 of 2\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n",
            ),
        ];
        for (keep_alive, expected) in cases {
            let (parts, mut body) = mpsc::channel(8);
            let mut writer = SseWriter {
                parts,
                write_timeout: Duration::from_secs(120),
                keep_alive_interval: Duration::from_secs(10),
                keep_alive,
                last_write: Instant::now(),
            };
            let work = tokio::time::sleep(Duration::from_millis(2500));
            let done = writer.comment_while(work, || "1 of 2".to_owned()).await;
            assert_eq!(done, Ok(()));
            assert_eq!(body.len(), 3);
            assert_eq!(body.recv().await.unwrap(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_stream_gets_keep_alives_and_disconnect_is_detected() {
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
