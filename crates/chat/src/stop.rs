//! Stop strings, matched across token boundaries.

/// Passes text on up to the first stop string.
///
/// Only the longest suffix that may become a stop string is held back. The stop string that
/// completes first wins; of several that complete together, the longest. So the result is
/// independent of how the text is split into tokens.
#[derive(Debug, Clone)]
pub struct StopStringMatcher {
    stops: Vec<String>,
    /// Text held back.
    pending: String,
    matched: Option<usize>,
}

impl StopStringMatcher {
    /// A matcher at the start of a text. Empty strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>) -> StopStringMatcher {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        StopStringMatcher {
            stops,
            pending: String::new(),
            matched: None,
        }
    }

    /// Text that can be emitted now; none after a match.
    pub fn push(&mut self, text: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        if self.stops.is_empty() {
            return text.to_owned();
        }
        self.pending.push_str(text);
        if let Some((start, which)) = find_earliest_match(&self.pending, &self.stops) {
            self.matched = Some(which);
            self.pending.truncate(start);
            return std::mem::take(&mut self.pending);
        }
        let keep_from = self.pending.len() - partial_match_len(&self.pending, &self.stops);
        let kept = self.pending.split_off(keep_from);
        std::mem::replace(&mut self.pending, kept)
    }

    /// The stop string that matched.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|which| self.stops[which].as_str())
    }

    /// Remaining text, if the text ended without a match.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }
}

/// Start and index of the word that completes first in `text`.
pub(crate) fn find_earliest_match<S: AsRef<str>>(
    text: &str,
    words: &[S],
) -> Option<(usize, usize)> {
    let found = words.iter().enumerate().filter_map(|(which, word)| {
        let start = text.find(word.as_ref())?;
        Some((start + word.as_ref().len(), start, which))
    });
    found.min().map(|(_, start, which)| (start, which))
}

/// Byte length of the longest suffix of `text` that is a proper prefix of one of `words`.
pub(crate) fn partial_match_len<S: AsRef<str>>(text: &str, words: &[S]) -> usize {
    words
        .iter()
        .map(|word| {
            let word = word.as_ref();
            word.char_indices()
                .map(|(end, _)| end)
                .filter(|end| *end > 0)
                .rev()
                .find(|end| text.ends_with(&word[..*end]))
                .unwrap_or(0)
        })
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(parts: &[&str], stops: &[&str]) -> (String, Option<String>) {
        let mut matcher = StopStringMatcher::new(stops.iter().map(|stop| (*stop).to_owned()));
        let mut out = String::new();
        for part in parts {
            out.push_str(&matcher.push(part));
        }
        out.push_str(&matcher.finish());
        (out, matcher.matched().map(str::to_owned))
    }

    fn check(parts: &[&str], stops: &[&str], text: &str, matched: Option<&str>) {
        assert_eq!(
            run(parts, stops),
            (text.to_owned(), matched.map(str::to_owned))
        );
    }

    #[test]
    fn stop_string_across_tokens_is_found_and_hidden() {
        check(
            &["one ", "ST", "O", "P two"],
            &["STOP"],
            "one ",
            Some("STOP"),
        );
    }

    #[test]
    fn partial_stop_string_is_released() {
        check(&["ab", "ab", "ac"], &["abac"], "ab", Some("abac"));
        check(&["aba", "d"], &["abac"], "abad", None);
    }

    #[test]
    fn earliest_complete_stop_string_wins() {
        check(&["x one two"], &["two", "one"], "x ", Some("one"));
        check(&["abc"], &["abc", "b"], "a", Some("b"));
        check(&["abc"], &["bc", "abc"], "", Some("abc"));
    }

    #[test]
    fn no_text_follows_a_stop_string() {
        check(&["a.", "b", "c"], &["."], "a", Some("."));
    }

    #[test]
    fn only_a_possible_match_is_held_back() {
        let mut matcher = StopStringMatcher::new(["\n\n\n".to_owned()]);
        assert_eq!(matcher.push("line\n\n"), "line");
        assert_eq!(matcher.push("next"), "\n\nnext");
    }

    proptest! {
        #[test]
        fn stop_match_ignores_chunking(
            text in "[ab\u{e9}]{0,24}",
            stops in prop::collection::vec("[ab\u{e9}]{1,4}", 0..3),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let whole = run(&[&text], &stops);
            let chars: Vec<char> = text.chars().collect();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(chars.len() + 1)).collect();
            at.sort_unstable();
            at.insert(0, 0);
            at.push(chars.len());
            let parts: Vec<String> =
                at.windows(2).map(|pair| chars[pair[0]..pair[1]].iter().collect()).collect();
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&parts, &stops), whole.clone());
            prop_assert!(text.starts_with(&whole.0));
            if whole.1.is_none() {
                prop_assert_eq!(&whole.0, &text);
            }
        }
    }
}
