//! Request bodies: read up to a limit, then parsed.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};

use crate::error::ApiError;

/// Limits of discarding an oversized body before the error is sent: closing the connection while
/// the client still writes would lose the error.
const DISCARD_TIME: Duration = Duration::from_secs(20);
const DISCARD_BYTES: usize = 1 << 30;

/// Work on bodies up to this size runs inline; larger work runs on the blocking pool.
pub const INLINE_BYTES: usize = 4 << 10;

/// Reads a body of at most `limit_bytes`.
pub async fn read(body: Body, limit_bytes: usize) -> Result<Bytes, ApiError> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut parts = body.into_data_stream();
    let mut collected = BytesMut::new();
    let mut too_large = announced > limit_bytes;
    if !too_large {
        collected.reserve(announced);
    }
    while !too_large {
        match parts.try_next().await {
            Ok(Some(part)) if collected.len() + part.len() <= limit_bytes => {
                collected.extend_from_slice(&part);
            }
            Ok(Some(_)) => too_large = true,
            Ok(None) => return Ok(collected.freeze()),
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

    #[tokio::test]
    async fn body_of_unknown_length_is_rejected_at_the_limit() {
        let parts = (0..4).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(b"1234")));
        let body = Body::from_stream(futures::stream::iter(parts));
        let error = read(body, 8).await.unwrap_err();
        assert_eq!(error, ApiError::TooLarge { limit_bytes: 8 });
    }
}
