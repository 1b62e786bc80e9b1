//! Request bodies: read up to a limit, then parsed.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};

use crate::error::ApiError;

/// How long, and how much of, an overlong body is read away before the refusal is sent. Closing the
/// connection while the client still writes would make it lose the refusal.
const DISCARD_TIME: Duration = Duration::from_secs(20);
const DISCARD_BYTES: usize = 1 << 30;

/// Work on texts up to this size is done in place; longer texts go to the blocking pool.
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
    // Whether the rest was read in time or not, the answer is the same.
    let _ = tokio::time::timeout(DISCARD_TIME, discard).await;
    Err(ApiError::TooLarge { limit_bytes })
}

/// Runs `work` in place when it is about little text, and on the blocking pool when it is about much.
pub async fn run_sized<T, W>(size_bytes: usize, work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: FnOnce() -> Result<T, ApiError> + Send + 'static,
{
    match size_bytes <= INLINE_BYTES {
        true => work(),
        false => run_long(work).await,
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
    async fn a_body_of_the_limit_passes_and_one_more_byte_does_not() {
        assert_eq!(read(Body::from("12345678"), 8).await.unwrap().len(), 8);
        let error = read(Body::from("123456789"), 8).await.unwrap_err();
        assert_eq!(error, ApiError::TooLarge { limit_bytes: 8 });
    }

    #[tokio::test]
    async fn a_body_of_unknown_length_is_cut_off_at_the_limit() {
        let parts = (0..4).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(b"1234")));
        let body = Body::from_stream(futures::stream::iter(parts));
        let error = read(body, 8).await.unwrap_err();
        assert_eq!(error, ApiError::TooLarge { limit_bytes: 8 });
    }
}
