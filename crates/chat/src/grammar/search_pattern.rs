//! Patterns of JSON schemas as expressions that match a whole text.
//!
//! A schema's `pattern` matches anywhere in a text; a terminal of a grammar matches all of it.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::print::Printer;
use regex_syntax::hir::{Hir, HirKind, Look};

use super::pattern_literal;

/// Matches any text.
pub(super) const ANY_TEXT: &str = "(?s:.*)";

/// What stands at one side of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Any text up to that end of the whole.
    AnyText,
    /// The end of the whole.
    End,
    /// Another part.
    Part,
}

/// The body of a `/…/` terminal of the texts that contain a match; `None` if the pattern needs
/// look-around, back references, or an anchor inside.
pub(super) fn search_terminal(pattern: &str) -> Option<String> {
    let mut parser = ParserBuilder::new().build();
    let pattern = parser.parse(&with_ascii_classes(pattern)).ok()?;
    let whole = search(&pattern, Side::AnyText, Side::AnyText)?;
    Some(pattern_literal(&whole))
}

/// The digit and word classes of ECMA 262, which are those of ASCII.
fn with_ascii_classes(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut letters = pattern.chars();
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            out.push(letter);
            continue;
        }
        match letters.next() {
            Some('d') => out.push_str("[0-9]"),
            Some('D') => out.push_str("[^0-9]"),
            Some('w') => out.push_str("[0-9A-Za-z_]"),
            Some('W') => out.push_str("[^0-9A-Za-z_]"),
            Some(other) => out.extend(['\\', other]),
            None => out.push('\\'),
        }
    }
    out
}

fn search(part: &Hir, before: Side, after: Side) -> Option<String> {
    let open = if before == Side::AnyText {
        ANY_TEXT
    } else {
        ""
    };
    let close = if after == Side::AnyText { ANY_TEXT } else { "" };
    match part.kind() {
        HirKind::Look(Look::Start) if before != Side::Part => Some(close.to_owned()),
        HirKind::Look(Look::End) if after != Side::Part => Some(open.to_owned()),
        HirKind::Capture(capture) => search(&capture.sub, before, after),
        HirKind::Alternation(parts) => {
            let parts: Option<Vec<String>> = parts
                .iter()
                .map(|part| search(part, before, after))
                .collect();
            Some(format!("(?:{})", parts?.join("|")))
        }
        HirKind::Concat(parts) => concatenation(parts, before, after),
        _ if part.properties().look_set().is_empty() => {
            Some(format!("{open}(?:{}){close}", printed(part)?))
        }
        _ => None,
    }
}

/// The parts in a row; anchors at the ends say what stands beside them.
fn concatenation(parts: &[Hir], mut before: Side, mut after: Side) -> Option<String> {
    let mut parts = parts;
    while let [first, rest @ ..] = parts
        && before != Side::Part
        && *first.kind() == HirKind::Look(Look::Start)
    {
        (parts, before) = (rest, Side::End);
    }
    while let [rest @ .., last] = parts
        && after != Side::Part
        && *last.kind() == HirKind::Look(Look::End)
    {
        (parts, after) = (rest, Side::End);
    }
    match parts {
        [] if before == Side::AnyText || after == Side::AnyText => Some(ANY_TEXT.to_owned()),
        [] => Some(String::new()),
        [only] => search(only, before, after),
        [first, middle @ .., last] => {
            let mut out = search(first, before, Side::Part)?;
            for part in middle {
                out.push_str(&search(part, Side::Part, Side::Part)?);
            }
            out.push_str(&search(last, Side::Part, after)?);
            Some(out)
        }
    }
}

fn printed(part: &Hir) -> Option<String> {
    let mut out = String::new();
    Printer::new().print(part, &mut out).ok()?;
    Some(out)
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    #[test]
    fn terminal_matches_the_texts_that_contain_a_match() {
        let texts = [
            "", "a", "b", "ab", "xab", "abx", "a\nb", "7", "x7y", "a/b", "٣", "^a", "a$",
        ];
        for pattern in [
            "",
            "a",
            "^a",
            "b$",
            "^ab$",
            "^a|b$",
            "(^a|b)$",
            "^(a|b)+$",
            "(^|x)a",
            "a(x|$)",
            "a.b",
            "^\\d$",
            "\\w\\d",
            "[\\d/]",
            "^[^\\W]+$",
            "^$",
            "\\^a",
            "a\\$",
            "(?:^a$)|7",
            "a/b",
        ] {
            let terminal = search_terminal(pattern).unwrap();
            let whole = Regex::new(&format!("^(?:{terminal})$")).unwrap();
            let ascii = with_ascii_classes(pattern);
            let anywhere = Regex::new(&ascii).unwrap();
            for text in texts {
                let expected = anywhere.is_match(text);
                assert_eq!(
                    whole.is_match(text),
                    expected,
                    "{pattern} {terminal} {text:?}"
                );
            }
        }
    }

    #[test]
    fn pattern_with_look_around_or_inner_anchors_has_no_terminal() {
        for pattern in ["(?=a)b", "a^b", "a$b", "\\bword", "(a)\\1", "(", "(?:a^)*"] {
            assert_eq!(search_terminal(pattern), None, "{pattern}");
        }
    }
}
