//! Script file format.

use std::time::Duration;

use contract::ReasoningTags;
use serde::Deserialize;

/// Reply if no line matches.
const NOTHING_FITS: &str = "No line of the script fits this prompt.";

/// Parsed script.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Script {
    lines: Vec<ScriptLine>,
    /// Duration of each runner call.
    pub step: Duration,
}

/// Error of a script, with its line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {detail}")]
pub struct ScriptError {
    /// Line number from 1.
    pub line: usize,
    /// Detail.
    pub detail: String,
}

#[derive(Debug, Clone, PartialEq)]
struct ScriptLine {
    number: usize,
    rule: Rule,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(default)]
    when: Texts,
    #[serde(default)]
    last: Texts,
    #[serde(default)]
    unless: Texts,
    #[serde(default)]
    unless_last: Texts,
    think: Option<String>,
    say: Option<String>,
    step_ms: Option<u64>,
}

/// One string or a list of them.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(from = "OneOrMore")]
struct Texts(Vec<String>);

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl From<OneOrMore> for Texts {
    fn from(texts: OneOrMore) -> Texts {
        match texts {
            OneOrMore::One(text) => Texts(vec![text]),
            OneOrMore::More(texts) => Texts(texts),
        }
    }
}

impl Texts {
    fn all_in(&self, text: &str) -> bool {
        self.0.iter().all(|part| text.contains(part))
    }

    fn any_in(&self, text: &str) -> bool {
        self.0.iter().any(|part| text.contains(part))
    }
}

impl Script {
    /// Reads the text of a script file.
    ///
    /// # Errors
    /// The first line that is not a JSON object with known keys, or has no reply.
    pub fn parse(text: &str) -> Result<Script, ScriptError> {
        let mut script = Script::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |detail: String| ScriptError {
                line: index + 1,
                detail,
            };
            let rule: Rule =
                serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
            match (&rule.say, rule.step_ms) {
                (None, Some(ms)) => script.step = Duration::from_millis(ms),
                (Some(_), None) => script.lines.push(ScriptLine {
                    number: index + 1,
                    rule,
                }),
                (Some(_), Some(_)) => {
                    return Err(wrong(
                        "step_ms is for all replies; give it a line of its own".to_owned(),
                    ));
                }
                (None, None) => return Err(wrong("say is missing".to_owned())),
            }
        }
        Ok(script)
    }

    /// Lines with a reply.
    pub fn replies(&self) -> usize {
        self.lines.len()
    }

    /// Reply to `prompt` and its line number. `ends` are the texts of end-of-turn tokens.
    pub(super) fn answer(
        &self,
        prompt: &str,
        ends: &[String],
        tags: &ReasoningTags,
    ) -> (String, Option<usize>) {
        let last = since_last_reply(prompt, ends);
        let fits = |rule: &Rule| {
            rule.when.all_in(prompt)
                && rule.last.all_in(last)
                && !rule.unless.any_in(prompt)
                && !rule.unless_last.any_in(last)
        };
        let Some(line) = self.lines.iter().find(|line| fits(&line.rule)) else {
            return (reply_text(prompt, None, NOTHING_FITS, tags), None);
        };
        let rule = &line.rule;
        let say = rule.say.as_deref().unwrap_or_default();
        (
            reply_text(prompt, rule.think.as_deref(), say, tags),
            Some(line.number),
        )
    }
}

/// Reply with reasoning, as a continuation of the prompt.
fn reply_text(prompt: &str, think: Option<&str>, say: &str, tags: &ReasoningTags) -> String {
    let (open, close) = (&tags.open, &tags.close);
    let prompt = prompt.trim_end();
    let think = think.unwrap_or_default();
    if prompt.ends_with(open.as_str()) {
        let gap = if think.is_empty() { "" } else { "\n" };
        return format!("{think}{gap}{close}\n\n{say}");
    }
    if think.is_empty() || prompt.ends_with(close.as_str()) {
        return say.to_owned();
    }
    format!("{open}\n{think}\n{close}\n\n{say}")
}

/// Part of the prompt after the model's last reply; all of it if there is none.
///
/// A reply begins with the first line after the last end-of-turn token.
fn since_last_reply<'a>(prompt: &'a str, ends: &[String]) -> &'a str {
    let after = |text: &'a str, from: usize| -> Option<usize> {
        let found = ends.iter().filter(|end| !end.is_empty());
        let found = found.filter_map(|end| Some(text[from..].find(end)? + from + end.len()));
        found.min()
    };
    let last_end = ends.iter().filter(|end| !end.is_empty());
    let Some(last_end) = last_end
        .filter_map(|end| Some(prompt.rfind(end)? + end.len()))
        .max()
    else {
        return prompt;
    };
    let opening = prompt[last_end..].trim_start();
    let header = opening.lines().next().unwrap_or_default();
    let earlier = if header.is_empty() {
        None
    } else {
        prompt[..last_end].rfind(header)
    };
    match earlier.and_then(|at| after(prompt, at)) {
        Some(end) => &prompt[end..],
        None => prompt,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: &str = "<|im_end|>";

    fn answer(script: &str, prompt: &str) -> (String, Option<usize>) {
        let script = Script::parse(script).unwrap();
        script.answer(
            prompt,
            &["<|endoftext|>".to_owned(), END.to_owned()],
            &ReasoningTags::default(),
        )
    }

    fn prompt(turns: &[(&str, &str)], opening: &str) -> String {
        let turns = turns
            .iter()
            .map(|(role, text)| format!("<|im_start|>{role}\n{text}{END}\n"));
        turns.collect::<String>() + opening
    }

    const THINKS: &str = "<|im_start|>assistant\n<think>\n";
    const PLAIN: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";

    #[test]
    fn first_matching_script_line_is_the_reply() {
        let script = "# a comment\n\n{\"when\": [\"a\", \"b\"], \"say\": \"both\"}\n\
            {\"when\": \"b\", \"unless\": \"c\", \"say\": \"b\"}\n{\"say\": \"else\"}\n";
        assert_eq!(answer(script, "a b"), ("both".to_owned(), Some(3)));
        assert_eq!(answer(script, "x b"), ("b".to_owned(), Some(4)));
        assert_eq!(answer(script, "b c"), ("else".to_owned(), Some(5)));
        let (text, line) = answer("{\"when\": \"q\", \"say\": \"x\"}", "a");
        assert!(line.is_none() && text.contains("No line"), "{text}");
    }

    #[test]
    fn last_matches_only_after_the_last_reply() {
        let script = "{\"last\": \"tool_response\", \"say\": \"after\"}\n\
            {\"unless_last\": \"again\", \"say\": \"before\"}\n{\"say\": \"again\"}";
        let first = prompt(&[("system", "s"), ("user", "q")], PLAIN);
        assert_eq!(answer(script, &first).0, "before");
        let turns = [
            ("user", "q"),
            ("assistant", "call"),
            ("user", "<tool_response>r"),
            ("user", "more"),
        ];
        assert_eq!(answer(script, &prompt(&turns, PLAIN)).0, "after");
        let turns = [
            ("user", "<tool_response>"),
            ("assistant", "said"),
            ("user", "again"),
        ];
        assert_eq!(answer(script, &prompt(&turns, PLAIN)).0, "again");
    }

    #[test]
    fn scripted_reasoning_follows_the_prompt() {
        let script = "{\"think\": \"hm\", \"say\": \"yes\"}";
        let turns = [("user", "q")];
        for (opening, expected) in [
            (THINKS, "hm\n</think>\n\nyes"),
            (PLAIN, "yes"),
            ("<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nyes"),
        ] {
            assert_eq!(answer(script, &prompt(&turns, opening)).0, expected);
        }
        let silent = "{\"say\": \"yes\"}";
        assert_eq!(answer(silent, THINKS).0, "</think>\n\nyes");
    }

    #[test]
    fn invalid_script_line_is_named() {
        let check = |text: &str, line: usize, part: &str| {
            let error = Script::parse(text).unwrap_err();
            assert!(
                error.line == line && error.detail.contains(part),
                "{text}: {error}"
            );
        };
        check(
            "{\"say\": \"a\"}\n{\"sya\": \"b\"}",
            2,
            "unknown field `sya`",
        );
        check("{\"when\": \"a\"}", 1, "say is missing");
        check("\nhello", 2, "expected value");
        check("{\"say\": \"a\", \"step_ms\": 1}", 1, "a line of its own");
        let script = Script::parse("{\"step_ms\": 7}").unwrap();
        assert_eq!(
            (script.step, script.replies()),
            (Duration::from_millis(7), 0)
        );
    }
}
