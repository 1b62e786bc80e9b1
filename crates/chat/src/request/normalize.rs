//! Normalises messages for templates that were trained on a stricter order.

use crate::conversation::{Message, Role};
use crate::error::ChatError;

/// What to do with a system message after the first turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LateSystem {
    /// Turn it into a user message in place, after a marker line. The start of the prompt, and so
    /// the cached prefix, stays the same.
    #[default]
    User,
    /// Append it to the first system message.
    Hoist,
    /// Refuse the request.
    Refuse,
}

/// The first line of a late system message that became a user message.
pub const LATE_SYSTEM_MARKER: &str = "[System message]";

/// A line that one client adds to its system text; it differs in every request, for billing.
const BILLING_PREFIX: &str = "x-anthropic-billing-header:";

/// Brings messages into an order that templates accept.
///
/// Billing lines are removed from system text; leading system messages are merged; later ones are
/// handled by `late_system`; tool results without a user message get an empty one.
pub(crate) fn normalise(
    messages: &[Message],
    late_system: LateSystem,
) -> Result<Vec<Message>, ChatError> {
    let mut front: Option<Message> = None;
    let mut rest: Vec<Message> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        if message.role != Role::System {
            rest.push(message.clone());
            continue;
        }
        let text = without_billing_lines(&message.content);
        if text.trim().is_empty() && text != message.content {
            continue;
        }
        if rest.is_empty() || late_system == LateSystem::Hoist {
            append_system(&mut front, message, text);
        } else if late_system == LateSystem::Refuse {
            return Err(ChatError::field(
                format!("messages[{index}].role"),
                "a system message must stand at the beginning",
            ));
        } else {
            rest.push(Message::new(
                Role::User,
                format!("{LATE_SYSTEM_MARKER}\n{text}"),
            ));
        }
    }
    let has_user = rest.iter().any(|message| message.role == Role::User);
    let has_result = rest.iter().any(|message| message.role == Role::Tool);
    let mut normalised: Vec<Message> = front.into_iter().collect();
    if has_result && !has_user {
        normalised.push(Message::new(Role::User, ""));
    }
    normalised.append(&mut rest);
    if normalised.is_empty() {
        // Only billing lines: the template decides about an empty system message.
        normalised.push(Message::new(Role::System, ""));
    }
    Ok(normalised)
}

fn append_system(front: &mut Option<Message>, message: &Message, text: String) {
    match front {
        None => {
            let mut system = message.clone();
            system.content = text;
            *front = Some(system);
        }
        Some(system) if system.content.is_empty() => system.content = text,
        Some(system) if !text.is_empty() => {
            system.content.push_str("\n\n");
            system.content.push_str(&text);
        }
        Some(_) => {}
    }
}

/// Whether a block of system text is only for billing.
pub(crate) fn is_billing(text: &str) -> bool {
    text.trim_start().starts_with(BILLING_PREFIX)
}

/// System text without billing lines, which differ in every request.
fn without_billing_lines(text: &str) -> String {
    if !text.contains(BILLING_PREFIX) {
        return text.to_owned();
    }
    let kept: Vec<&str> = text.split('\n').filter(|line| !is_billing(line)).collect();
    kept.join("\n")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn said(role: Role, text: &str) -> Message {
        Message::new(role, text)
    }

    fn check(messages: &[Message], late_system: LateSystem, expected: &[(Role, &str)]) {
        let normalised = normalise(messages, late_system).unwrap();
        let got: Vec<(Role, &str)> = normalised
            .iter()
            .map(|message| (message.role, message.content.as_str()))
            .collect();
        assert_eq!(got, expected);
    }

    #[test]
    fn leading_system_messages_are_merged() {
        check(
            &[
                said(Role::System, "a"),
                said(Role::System, "b"),
                said(Role::User, "hi"),
            ],
            LateSystem::User,
            &[(Role::System, "a\n\nb"), (Role::User, "hi")],
        );
    }

    #[test]
    fn late_system_message_becomes_a_user_message_in_place() {
        check(
            &[
                said(Role::System, "a"),
                said(Role::User, "hi"),
                said(Role::System, "note"),
            ],
            LateSystem::User,
            &[
                (Role::System, "a"),
                (Role::User, "hi"),
                (Role::User, "[System message]\nnote"),
            ],
        );
    }

    #[test]
    fn late_system_message_is_hoisted_by_policy() {
        check(
            &[said(Role::User, "hi"), said(Role::System, "note")],
            LateSystem::Hoist,
            &[(Role::System, "note"), (Role::User, "hi")],
        );
    }

    #[test]
    fn late_system_message_is_refused_by_policy() {
        let err = normalise(
            &[said(Role::User, "hi"), said(Role::System, "note")],
            LateSystem::Refuse,
        )
        .unwrap_err();
        assert_eq!(err.param.as_deref(), Some("messages[1].role"));
    }

    #[test]
    fn billing_lines_are_removed_from_system_text_only() {
        let line = "x-anthropic-billing-header: cc_version=1; cch=77;";
        check(
            &[
                said(Role::System, line),
                said(Role::System, &format!("keep\n  {line}\nthis")),
                said(Role::User, line),
            ],
            LateSystem::User,
            &[(Role::System, "keep\nthis"), (Role::User, line)],
        );
    }

    #[test]
    fn tool_results_without_user_get_an_empty_user_message() {
        check(
            &[
                said(Role::System, "s"),
                said(Role::Assistant, ""),
                said(Role::Tool, "42"),
            ],
            LateSystem::User,
            &[
                (Role::System, "s"),
                (Role::User, ""),
                (Role::Assistant, ""),
                (Role::Tool, "42"),
            ],
        );
    }

    proptest! {
        #[test]
        fn system_message_is_first_or_absent(
            roles in prop::collection::vec(0usize..4, 1..12),
            hoist in any::<bool>(),
        ) {
            let all = [Role::System, Role::User, Role::Assistant, Role::Tool];
            let messages: Vec<Message> = roles
                .iter()
                .enumerate()
                .map(|(index, role)| said(all[*role], &format!("m{index}")))
                .collect();
            let mode = if hoist { LateSystem::Hoist } else { LateSystem::User };
            let normalised = normalise(&messages, mode).unwrap();
            prop_assert!(!normalised.is_empty());
            prop_assert!(normalised.iter().skip(1).all(|message| message.role != Role::System));
            for index in 0..roles.len() {
                let word = format!("m{index}");
                let kept = normalised
                    .iter()
                    .any(|message| message.content.split_whitespace().any(|part| part == word));
                prop_assert!(kept, "{} is lost", word);
            }
        }
    }
}
