//! Request bodies: read up to a limit, then parsed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use chat::CancelFlag;
use futures::{StreamExt, TryStreamExt};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinHandle;
use tower_http::timeout::TimeoutError;

use crate::error::ApiError;

/// Limits of discarding an oversized body before the error is sent: closing the connection while
/// the client still writes would lose the error.
const DISCARD_TIME: Duration = Duration::from_secs(20);
const DISCARD_BYTES: usize = 1 << 30;

/// Memory reserved before anything arrived: a client may announce a long body and send none.
const FIRST_RESERVE_BYTES: usize = 64 << 10;

/// Memory of all bodies together; a single body may take more.
static ALL_BODIES: BodyMemory = BodyMemory::new(512 << 20);

/// Bodies above this size are prepared a few at a time: rendering and encoding take about ten times
/// a body's memory.
const LARGE_BYTES: usize = 1 << 20;
/// The large bodies prepared together have at most this size in sum, or are one.
const LARGE_MIB: usize = 32;
static LARGE_WORK: Semaphore = Semaphore::const_new(LARGE_MIB);

/// A body that takes longer than this must arrive at the minimum rate on average.
const FREE_TIME: Duration = Duration::from_secs(60);
const MIN_BYTES_PER_SECOND: f64 = 4096.0;

/// Work on bodies up to this size runs inline; larger work runs on the blocking pool.
pub const INLINE_BYTES: usize = 4 << 10;

/// Bytes of bodies in memory.
struct BodyMemory {
    held: AtomicUsize,
    most: usize,
}

impl BodyMemory {
    const fn new(most: usize) -> BodyMemory {
        BodyMemory {
            held: AtomicUsize::new(0),
            most,
        }
    }
}

/// Bytes counted in a [`BodyMemory`] until they are dropped.
struct CountedBytes {
    memory: &'static BodyMemory,
    bytes: BytesMut,
    counted: usize,
}

impl CountedBytes {
    fn new(memory: &'static BodyMemory) -> CountedBytes {
        CountedBytes {
            memory,
            bytes: BytesMut::new(),
            counted: 0,
        }
    }

    /// Appends a part, or fails if all bodies together would take too much memory.
    fn push(&mut self, part: &[u8]) -> Result<(), ApiError> {
        let held = self.memory.held.fetch_add(part.len(), Ordering::Relaxed) + part.len();
        self.counted += part.len();
        if held > self.memory.most && held > self.counted {
            return Err(ApiError::unavailable(
                "too many large request bodies arrive at once; try again later",
            ));
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.memory.held.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body of at most `limit_bytes`.
///
/// Memory grows with the bytes that arrive, at most twofold. Fails with
/// [`ApiError::BodyTimeout`] if no part arrives within the read timeout, or if the whole body
/// arrives below the minimum rate.
pub async fn read(body: Body, limit_bytes: usize) -> Result<Bytes, ApiError> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut parts = body.into_data_stream();
    let mut collected = CountedBytes::new(&ALL_BODIES);
    let mut too_large = announced > limit_bytes;
    if !too_large {
        let first = announced.min(FIRST_RESERVE_BYTES);
        collected.bytes.reserve(first);
    }
    let begun = Instant::now();
    while !too_large {
        match parts.try_next().await {
            Ok(Some(part)) if collected.counted + part.len() <= limit_bytes => {
                collected.push(&part)?;
                if is_too_slow(collected.counted, begun.elapsed()) {
                    let received_bytes = collected.counted;
                    return Err(ApiError::BodyTimeout { received_bytes });
                }
            }
            Ok(Some(_)) => too_large = true,
            Ok(None) => return Ok(Bytes::from_owner(collected)),
            Err(error) if is_timeout(&error) => {
                let received_bytes = collected.counted;
                return Err(ApiError::BodyTimeout { received_bytes });
            }
            Err(error) => {
                return Err(ApiError::invalid(format!(
                    "the request body could not be read: {error}"
                )));
            }
        }
    }
    drop(collected);
    let discard = async {
        let mut left = DISCARD_BYTES;
        while let Some(Ok(part)) = parts.next().await {
            match left.checked_sub(part.len()) {
                Some(rest) => left = rest,
                None => break,
            }
        }
    };
    // The answer is the same whether or not the rest was read in time.
    let _ = tokio::time::timeout(DISCARD_TIME, discard).await;
    Err(ApiError::TooLarge { limit_bytes })
}

fn is_too_slow(received_bytes: usize, elapsed: Duration) -> bool {
    elapsed > FREE_TIME && (received_bytes as f64) < MIN_BYTES_PER_SECOND * elapsed.as_secs_f64()
}

/// Whether the read timeout ended the body.
fn is_timeout(error: &(dyn std::error::Error + 'static)) -> bool {
    error.is::<TimeoutError>() || error.source().is_some_and(is_timeout)
}

/// Runs `work` inline for small inputs, on the blocking pool for large ones. Very large ones wait
/// for each other. If the client leaves, waiting work is dropped and the flag of running work is
/// set.
pub async fn run_sized<T, W>(size_bytes: usize, work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: FnOnce(&CancelFlag) -> Result<T, ApiError> + Send + 'static,
{
    if size_bytes <= INLINE_BYTES {
        return work(&CancelFlag::default());
    }
    let permit = large_work(size_bytes).await;
    run_cancellable(move |cancel| {
        // Held until the work ends, even if its client leaves.
        let _permit = permit;
        work(cancel)
    })
    .await
}

/// The share of the large work of a body of this size.
async fn large_work(size_bytes: usize) -> Option<SemaphorePermit<'static>> {
    if size_bytes <= LARGE_BYTES {
        return None;
    }
    let mib = (size_bytes >> 20).min(LARGE_MIB);
    let permits = u32::try_from(mib).unwrap_or(u32::MAX);
    // The semaphore is never closed.
    LARGE_WORK.acquire_many(permits).await.ok()
}

/// Runs `work` on the blocking pool.
pub async fn run_long<T, W>(work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: FnOnce() -> Result<T, ApiError> + Send + 'static,
{
    run_cancellable(move |_| work()).await
}

/// As [`run_long`], for work that looks at its flag: it is set if the client leaves.
pub async fn run_cancellable<T, W>(work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: FnOnce(&CancelFlag) -> Result<T, ApiError> + Send + 'static,
{
    let cancel = CancelFlag::default();
    let flag = cancel.clone();
    let mut running = ClientWork {
        task: tokio::task::spawn_blocking(move || work(&flag)),
        cancel,
    };
    match (&mut running.task).await {
        Ok(result) => result,
        Err(error) => Err(ApiError::internal(format!(
            "preparing the request did not finish: {error}"
        ))),
    }
}

/// Work that ends with its client: at once if it has not started, else when it sees its flag.
struct ClientWork<T> {
    task: JoinHandle<T>,
    cancel: CancelFlag,
}

impl<T> Drop for ClientWork<T> {
    fn drop(&mut self) {
        self.cancel.cancel();
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_that_take_too_much_memory_together_are_unavailable() {
        static SMALL: BodyMemory = BodyMemory::new(100);
        let body = |n_bytes: usize| {
            let mut body = CountedBytes::new(&SMALL);
            body.push(&vec![b' '; n_bytes]).map(|()| body)
        };
        let single = body(200).map(|_| ());
        assert_eq!(single, Ok(()), "a single body always fits");
        let mut held = vec![body(40).unwrap(), body(40).unwrap()];
        let error = body(40).map(|_| ());
        assert!(
            matches!(error, Err(ApiError::Unavailable { .. })),
            "{error:?}"
        );
        held.pop();
        assert!(body(40).is_ok());
        drop(held);
        assert_eq!(SMALL.held.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn body_at_the_limit_passes_and_one_byte_more_fails() {
        assert_eq!(read(Body::from("12345678"), 8).await.unwrap().len(), 8);
        let error = read(Body::from("123456789"), 8).await.unwrap_err();
        assert_eq!(error, ApiError::TooLarge { limit_bytes: 8 });
    }

    #[tokio::test]
    async fn running_work_learns_that_its_client_has_left() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (started_in, started) = tokio::sync::oneshot::channel();
        let work = run_sized(LARGE_BYTES, move |cancel| {
            started_in.send(()).unwrap();
            while !cancel.is_cancelled() {
                std::thread::sleep(Duration::from_millis(1));
            }
            sender.send(()).unwrap();
            Ok(())
        });
        tokio::select! {
            _ = work => unreachable!("the work ends with its client only"),
            begun = started => begun.unwrap(),
        }
        let ended =
            tokio::task::spawn_blocking(move || receiver.recv_timeout(Duration::from_secs(60)));
        assert!(ended.await.unwrap().is_ok());
    }

    #[test]
    fn slow_body_is_cut_off_after_the_free_time_only() {
        let minute = Duration::from_secs(60);
        assert!(!is_too_slow(1, minute));
        assert!(is_too_slow(1, minute * 2));
        assert!(is_too_slow(120 * 4095, minute * 2));
        assert!(!is_too_slow(120 * 4097, minute * 2));
    }

    #[tokio::test]
    async fn body_of_unknown_length_is_rejected_at_the_limit() {
        let parts = (0..4).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(b"1234")));
        let body = Body::from_stream(futures::stream::iter(parts));
        let error = read(body, 8).await.unwrap_err();
        assert_eq!(error, ApiError::TooLarge { limit_bytes: 8 });
    }
}
