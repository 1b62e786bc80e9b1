//! The summary that a compaction item carries.
//!
//! It is not encrypted: the client has the conversation anyway, and there is no store. A mark of
//! its format stands before it.

use crate::conversation::{Message, Role};
use crate::dialect::fields::Fields;
use crate::error::ChatError;

/// Marks a summary of this server, in the first version of its format.
const MARK: &str = "hearth-summary-1:";

/// The `encrypted_content` of an item with this summary.
pub(super) fn sealed(summary: &str) -> String {
    format!("{MARK}{summary}")
}

/// Begins the message that stands for the conversation before it.
const SUMMARY_HEAD: &str = "Summary of the conversation before this message:\n\n";

/// Whether a message stands for the conversation before it.
pub(super) fn is_summary(text: &str) -> bool {
    text.starts_with(SUMMARY_HEAD)
}

/// The message that a compaction item stands for.
pub(super) fn message(item: &Fields<'_>) -> Result<Message, ChatError> {
    let key = "encrypted_content";
    let content = item.string(key)?;
    let content = content.ok_or_else(|| item.error(key, "is missing"))?;
    let summary = content.strip_prefix(MARK).ok_or_else(|| {
        let message = "was not written by this server, which cannot read it; send the \
            conversation itself";
        item.error(key, message)
    })?;
    // Clients can write what they like here, so it has no more weight than a user's words.
    Ok(Message::new(Role::User, format!("{SUMMARY_HEAD}{summary}")))
}
