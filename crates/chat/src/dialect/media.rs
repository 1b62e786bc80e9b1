//! Images and other media, which this model does not read.

use super::fields::Fields;
use crate::error::ChatError;

/// Whether a content part of any dialect holds something other than text.
pub(crate) fn is_media(kind: &str) -> bool {
    matches!(
        kind,
        "image"
            | "image_url"
            | "input_image"
            | "audio"
            | "input_audio"
            | "audio_url"
            | "video"
            | "video_url"
            | "file"
            | "input_file"
    )
}

/// Refuses a media part. Clients look for the words about the image, and then send the
/// conversation without it.
pub(crate) fn refuse_media(part: &Fields<'_>, kind: &str) -> ChatError {
    let words = if kind.contains("image") {
        "Could not process image: "
    } else {
        ""
    };
    ChatError::field(
        part.own_path(),
        format!("{words}unsupported content part '{kind}'; this model reads text only"),
    )
}

/// What stands for a media part in a tool's result. Nobody can take it back, and a refusal would
/// end the session.
pub(crate) fn media_placeholder(kind: &str) -> String {
    let what = kind.strip_prefix("input_").unwrap_or(kind);
    let what = what.strip_suffix("_url").unwrap_or(what);
    format!("[{what} left out: this model reads text only]")
}
