//! The response header that says what of a request a reply is not held to.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

/// Notes in plain ASCII, joined by semicolons.
const NOTE: HeaderName = HeaderName::from_static("x-hearth-note");
/// Longer notes are cut.
const MAX_BYTES: usize = 1_024;

/// The response with a header of these notes, if there are any.
pub(super) fn with_notes(mut response: Response, notes: &[String]) -> Response {
    let text: String = notes
        .join("; ")
        .chars()
        .map(|letter| {
            if matches!(letter, ' '..='~') {
                letter
            } else {
                '?'
            }
        })
        .take(MAX_BYTES)
        .collect();
    if !text.is_empty()
        && let Ok(value) = HeaderValue::from_str(&text)
    {
        response.headers_mut().insert(NOTE, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::*;

    #[test]
    fn notes_become_one_header_in_ascii() {
        let noted = |notes: &[&str]| {
            let notes: Vec<String> = notes.iter().map(|note| (*note).to_owned()).collect();
            let response = with_notes(().into_response(), &notes);
            let value = response.headers().get("x-hearth-note").cloned();
            value.map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(noted(&[]), None);
        assert_eq!(noted(&["a\nb", "\u{e9}"]).as_deref(), Some("a?b; ?"));
        assert_eq!(noted(&["x".repeat(9_999).as_str()]).unwrap().len(), 1_024);
    }
}
