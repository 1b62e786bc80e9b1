//! Which bytes of a rendered prompt are message contents that may be shortened.

use std::ops::Range;

use chat::conversation::{Message, Role};
use compress::SegmentLimits;
use compress::segment;

/// Contents below this many bytes stay whole.
const MIN_BYTES: usize = 256;
/// The last user message stays whole up to this many tokens.
pub(super) const QUERY_TOKENS: usize = 512;
/// Of a longer one, the last sentences up to this many tokens stay whole.
pub(super) const QUESTION_TOKENS: usize = 64;

/// A content that may be shortened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FoundContent {
    /// The message.
    pub(super) message: usize,
    /// The part of its content that may be shortened; what stands around it stays.
    pub(super) bytes: Range<usize>,
    /// Where this part stands in the rendered prompt.
    pub(super) in_prompt: Range<usize>,
}

/// The contents of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PromptContents {
    /// Those that may be shortened, in order.
    pub(super) found: Vec<FoundContent>,
    /// Where the query stands in the prompt: the last user message, or its question.
    pub(super) query: Range<usize>,
    /// The byte of the prompt at whose end the scorer's tail lies.
    pub(super) tail_end: usize,
}

/// Finds contents in a prompt whose tokens begin at `starts`. A content that the template changed
/// is not found and stays whole, as do system messages.
pub(super) fn find(prompt: &str, starts: &[usize], messages: &[Message]) -> PromptContents {
    let last_user = messages.iter().rposition(|m| m.role == Role::User);
    let mut found = Vec::new();
    let mut query = 0..prompt.len();
    let mut cursor = 0;
    for (message, of) in messages.iter().enumerate() {
        let text = of.content.trim();
        let is_query = Some(message) == last_user;
        if text.len() < MIN_BYTES && !is_query {
            continue;
        }
        // A short query may resemble other text; it is the last of its kind.
        let at = match prompt.get(cursor..) {
            Some(rest) if is_query => rest.rfind(text),
            Some(rest) => rest.find(text),
            None => None,
        };
        let Some(at) = at.map(|at| cursor + at) else {
            continue;
        };
        let lead = of.content.len() - of.content.trim_start().len();
        let mut in_prompt = at..at + text.len();
        cursor = in_prompt.end;
        if is_query {
            query = in_prompt.clone();
            let inner = query_body(text, at, starts);
            query.start = in_prompt.start + inner;
            in_prompt.end = query.start;
        }
        if of.role != Role::System && in_prompt.len() >= MIN_BYTES {
            found.push(FoundContent {
                message,
                bytes: lead..lead + in_prompt.len(),
                in_prompt,
            });
        }
    }
    let after_query = found
        .iter()
        .any(|content| content.in_prompt.start >= query.end);
    PromptContents {
        tail_end: if after_query { prompt.len() } else { query.end },
        found,
        query,
    }
}

/// Whether a content may be shortened at all.
pub(super) fn is_long(content: &str) -> bool {
    content.trim().len() >= MIN_BYTES
}

/// Bytes of a query before its question; 0 if all of it stays. `text` begins at byte `at` of the
/// prompt.
pub(super) fn query_body(text: &str, at: usize, starts: &[usize]) -> usize {
    let tokens = |bytes: Range<usize>| {
        let before = |byte: usize| starts.partition_point(|start| *start < at + byte);
        before(bytes.end) - before(bytes.start)
    };
    if tokens(0..text.len()) <= QUERY_TOKENS {
        return 0;
    }
    last_segments(text, QUESTION_TOKENS, tokens)
}

/// First byte of the last sentences of a text of up to `most` tokens in sum, at least one of them.
/// The text's tokens begin at `starts`.
pub(super) fn tail_start(text: &str, starts: &[usize], most: usize) -> usize {
    last_segments(text, most, |bytes| {
        let before = |byte: usize| starts.partition_point(|start| *start < byte);
        before(bytes.end) - before(bytes.start)
    })
}

fn last_segments(text: &str, most: usize, tokens: impl Fn(Range<usize>) -> usize) -> usize {
    let segments = segment::split(text, SegmentLimits::default());
    let mut begin = text.len();
    for segment in segments.iter().rev() {
        if begin < text.len() && tokens(segment.start..text.len()) > most {
            break;
        }
        begin = segment.start;
    }
    begin
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(messages: &[Message]) -> String {
        let turn = |m: &Message| format!("<{}>{}</>\n", m.role.name(), m.content.trim());
        messages.iter().map(turn).collect()
    }

    /// A token per four bytes.
    fn find(messages: &[Message]) -> (String, PromptContents) {
        let text = prompt(messages);
        let starts: Vec<usize> = (0..text.len()).step_by(4).collect();
        let contents = super::find(&text, &starts, messages);
        (text, contents)
    }

    fn long(word: &str, n: usize) -> String {
        (0..n)
            .map(|i| format!("{word} number {i} has a sentence. "))
            .collect()
    }

    #[test]
    fn long_contents_of_all_but_system_and_query_are_found() {
        let messages = [
            Message::new(Role::System, long("System", 30)),
            Message::new(Role::User, format!("\n{}", long("Past", 30))),
            Message::new(Role::Assistant, "Short."),
            Message::new(Role::Tool, long("Tool", 30)),
            Message::new(Role::User, "Which one?"),
        ];
        let (text, contents) = find(&messages);
        let of = |content: &FoundContent| content.message;
        assert_eq!(contents.found.iter().map(of).collect::<Vec<_>>(), [1, 3]);
        for content in &contents.found {
            let own = &messages[content.message].content[content.bytes.clone()];
            assert_eq!(own, &text[content.in_prompt.clone()]);
            assert_eq!(own, messages[content.message].content.trim());
        }
        assert_eq!(&text[contents.query.clone()], "Which one?");
        assert_eq!(contents.tail_end, contents.query.end);
    }

    #[test]
    fn a_long_last_message_keeps_its_question() {
        let body = long("Page", 200);
        let messages = [Message::new(
            Role::User,
            format!("{body}What does page 7 say?"),
        )];
        let (text, contents) = find(&messages);
        let query = &text[contents.query.clone()];
        assert!(
            query.ends_with("has a sentence. What does page 7 say?"),
            "{query}"
        );
        assert!(query.len() <= 4 * (QUESTION_TOKENS + 1), "{query}");
        let own = &contents.found[0];
        assert_eq!(own.bytes.end + query.len(), messages[0].content.len());
        assert_eq!(own.in_prompt.end, contents.query.start);
    }

    #[test]
    fn tool_results_behind_the_query_move_the_tail_to_the_end() {
        let messages = [
            Message::new(Role::User, "Which one?"),
            Message::new(Role::Tool, long("Tool", 30)),
        ];
        let (text, contents) = find(&messages);
        assert_eq!(contents.found.len(), 1);
        assert_eq!(contents.tail_end, text.len());
    }

    #[test]
    fn contents_that_the_template_changes_stay_whole() {
        let messages = [Message::new(Role::User, long("Page", 200))];
        let text = prompt(&messages).to_uppercase();
        let contents = super::find(&text, &[0], &messages);
        assert_eq!(contents.found, []);
        assert_eq!(contents.query, 0..text.len());
    }
}
