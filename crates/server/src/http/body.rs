//! Request bodies: read up to a limit, then parsed.

use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use tower_http::timeout::TimeoutError;

use crate::error::ApiError;

/// Limits of discarding an oversized body before the error is sent: closing the connection while
/// the client still writes would lose the error.
const DISCARD_TIME: Duration = Duration::from_secs(20);
const DISCARD_BYTES: usize = 1 << 30;

/// Memory reserved before anything arrived: a client may announce a long body and send none.
const FIRST_RESERVE_BYTES: usize = 64 << 10;

/// A body that takes longer than this must arrive at the minimum rate on average.
const FREE_TIME: Duration = Duration::from_secs(60);
const MIN_BYTES_PER_SECOND: f64 = 4096.0;

/// Work on bodies up to this size runs inline; larger work runs on the blocking pool.
pub const INLINE_BYTES: usize = 4 << 10;

/// Reads a body of at most `limit_bytes`.
///
/// Memory grows with the bytes that arrive, at most twofold. Fails with
/// [`ApiError::BodyTimeout`] if no part arrives within the read timeout, or if the whole body
/// arrives below the minimum rate.
pub async fn read(body: Body, limit_bytes: usize) -> Result<Bytes, ApiError> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut parts = body.into_data_stream();
    let mut collected = BytesMut::new();
    let mut too_large = announced > limit_bytes;
    if !too_large {
        collected.reserve(announced.min(FIRST_RESERVE_BYTES));
    }
    let begun = Instant::now();
    while !too_large {
        match parts.try_next().await {
            Ok(Some(part)) if collected.len() + part.len() <= limit_bytes => {
                collected.extend_from_slice(&part);
                if is_too_slow(collected.len(), begun.elapsed()) {
                    let received_bytes = collected.len();
                    return Err(ApiError::BodyTimeout { received_bytes });
                }
            }
            Ok(Some(_)) => too_large = true,
            Ok(None) => return Ok(collected.freeze()),
            Err(error) if is_timeout(&error) => {
                let received_bytes = collected.len();
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

/// Runs `work` inline for small inputs, on the blocking pool for large ones.
pub async fn run_sized<T, W>(size_bytes: usize, work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: FnOnce() -> Result<T, ApiError> + Send + 'static,
{
    if size_bytes <= INLINE_BYTES {
        work()
    } else {
        run_long(work).await
    }
}

/// Runs `work` on the blocking pool.
pub async fn run_long<T, W>(work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: FnOnce() -> Result<T, ApiError> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(ApiError::internal(format!(
            "preparing the request did not finish: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn body_at_the_limit_passes_and_one_byte_more_fails() {
        assert_eq!(read(Body::from("12345678"), 8).await.unwrap().len(), 8);
        let error = read(Body::from("123456789"), 8).await.unwrap_err();
        assert_eq!(error, ApiError::TooLarge { limit_bytes: 8 });
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
