//! The requests of a load, and what each of them measured.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::commands::http_client::HttpClient;
use crate::progress::TaskProgress;

const PATH: &str = "/v1/chat/completions";
/// Words of prompts; most are one token in most vocabularies.
const WORDS: [&str; 32] = [
    "the", "river", "a", "stone", "and", "house", "of", "light", "in", "old", "tree", "with",
    "small", "road", "to", "water", "under", "night", "from", "green", "hill", "over", "long",
    "day", "by", "open", "door", "at", "white", "bird", "near", "field",
];

/// How requests arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Arrivals {
    /// So many at a time: a new one begins when one has ended.
    AtATime(usize),
    /// At random times, so many in a second on average.
    Rate(f64),
}

impl Arrivals {
    pub(super) fn name(self) -> String {
        match self {
            Arrivals::AtATime(n) => format!("{n} at a time"),
            Arrivals::Rate(rate) => format!("{rate} requests a second"),
        }
    }
}

/// What one request measured.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    /// From the request to the first text.
    pub(super) first_token: Duration,
    /// Milliseconds between parts of the reply, each of one token or more.
    pub(super) gaps_ms: Vec<f64>,
    /// From the request to the last part.
    pub(super) total: Duration,
    /// Tokens of the reply, as the server counts them, else its parts.
    pub(super) tokens: usize,
    /// Tokens of the prompt, as the server counts them, or 0.
    pub(super) prompt_tokens: usize,
}

impl Sample {
    /// Mean milliseconds from one token to the next.
    pub(super) fn ms_per_token(&self) -> Option<f64> {
        let after_first = (self.total.saturating_sub(self.first_token)).as_secs_f64() * 1e3;
        (self.tokens > 1).then(|| after_first / (self.tokens - 1) as f64)
    }
}

/// How one request ended.
pub(super) enum Outcome {
    Done(Sample),
    Failed(String),
}

/// What a load measured.
pub(super) struct Measured {
    pub(super) samples: Vec<Sample>,
    pub(super) failures: Vec<String>,
    pub(super) took: Duration,
}

/// Requests to one server.
pub(super) struct LoadTest {
    pub(super) client: HttpClient,
    pub(super) model: String,
    pub(super) requests: usize,
    pub(super) prompt_tokens: usize,
    pub(super) tokens: usize,
    pub(super) seed: u64,
}

impl LoadTest {
    /// Sends all requests and waits for their replies.
    pub(super) fn run(&self, arrivals: Arrivals) -> Measured {
        let progress = TaskProgress::counting(arrivals.name());
        let outcomes = Mutex::new((Vec::with_capacity(self.requests), progress));
        let keep = |outcome| {
            // A thread that panicked ends the scope, and with it the run.
            if let Ok(mut all) = outcomes.lock() {
                let (outcomes, progress) = &mut *all;
                outcomes.push(outcome);
                progress.set(outcomes.len() as u64, self.requests as u64);
            }
        };
        let begun = Instant::now();
        let next = AtomicUsize::new(0);
        let (next, keep) = (&next, &keep);
        // The scope ends when all its threads have ended.
        thread::scope(|scope| match arrivals {
            Arrivals::AtATime(n) => {
                for _ in 0..n {
                    scope.spawn(move || {
                        while let index = next.fetch_add(1, Ordering::Relaxed)
                            && index < self.requests
                        {
                            keep(self.one(index));
                        }
                    });
                }
            }
            Arrivals::Rate(rate) => {
                let mut random = SplitMix(self.seed);
                let mut at = Duration::ZERO;
                for index in 0..self.requests {
                    thread::sleep(at.saturating_sub(begun.elapsed()));
                    scope.spawn(move || keep(self.one(index)));
                    // Times between arrivals of a Poisson process.
                    at += Duration::from_secs_f64(-(1.0 - random.unit()).ln() / rate);
                }
            }
        });
        let took = begun.elapsed();
        let (mut samples, mut failures) = (Vec::new(), Vec::new());
        let outcomes = outcomes.into_inner().map(|(outcomes, _)| outcomes);
        for outcome in outcomes.unwrap_or_default() {
            match outcome {
                Outcome::Done(sample) => samples.push(sample),
                Outcome::Failed(error) => failures.push(error),
            }
        }
        Measured {
            samples,
            failures,
            took,
        }
    }

    /// Sends the request with this index, whose prompt no other request begins with.
    pub(super) fn one(&self, index: usize) -> Outcome {
        let body = json!({
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt(index)}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let mut reply = ReplyParts::default();
        let sent = self
            .client
            .post_stream(PATH, &body, |line, at| reply.line(line, at));
        match sent {
            Err(error) => Outcome::Failed(error.to_string()),
            Ok((200, _)) => reply.outcome(),
            Ok((status, body)) => {
                let body: String = body.chars().take(200).collect();
                Outcome::Failed(format!("status {status}: {body}"))
            }
        }
    }

    fn prompt(&self, index: usize) -> String {
        let mut random = SplitMix(self.seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut text = format!("{:x}{index:x}", random.next());
        for _ in 0..self.prompt_tokens.saturating_sub(12) {
            text.push(' ');
            text.push_str(WORDS[random.next() as usize % WORDS.len()]);
        }
        text
    }
}

/// A stream that is read.
#[derive(Debug, Default)]
struct ReplyParts {
    /// Times of the parts since the request.
    at: Vec<Duration>,
    tokens: Option<usize>,
    prompt_tokens: usize,
    error: Option<String>,
}

impl ReplyParts {
    fn line(&mut self, line: &str, at: Duration) {
        let Some(data) = line.strip_prefix("data: ") else {
            return;
        };
        let event: Value = serde_json::from_str(data.trim()).unwrap_or_default();
        let delta = &event["choices"][0]["delta"];
        let texts = ["content", "reasoning_content", "reasoning"];
        let has_text = |key: &&str| delta[*key].as_str().is_some_and(|text| !text.is_empty());
        if texts.iter().any(has_text) || delta["tool_calls"].is_array() {
            self.at.push(at);
        }
        let count = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let usage = &event["usage"];
        self.tokens = count(&usage["completion_tokens"]).or(self.tokens);
        self.prompt_tokens = count(&usage["prompt_tokens"]).unwrap_or(self.prompt_tokens);
        if !event["error"].is_null() {
            self.error = Some(event["error"].to_string());
        }
    }

    fn outcome(self) -> Outcome {
        let (Some(first), Some(last)) = (self.at.first(), self.at.last()) else {
            let empty = || "the reply has no text".to_owned();
            return Outcome::Failed(self.error.unwrap_or_else(empty));
        };
        if let Some(error) = self.error {
            return Outcome::Failed(error);
        }
        let gaps = self.at.windows(2).map(|pair| pair[1] - pair[0]);
        Outcome::Done(Sample {
            first_token: *first,
            gaps_ms: gaps.map(|gap| gap.as_secs_f64() * 1e3).collect(),
            total: *last,
            tokens: self.tokens.unwrap_or(self.at.len()),
            prompt_tokens: self.prompt_tokens,
        })
    }
}

/// Deterministic numbers (splitmix64).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_is_timed_by_the_parts_that_hold_text() {
        let mut reply = ReplyParts::default();
        let ms = Duration::from_millis;
        for (line, at) in [
            (
                r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
                1,
            ),
            (": keepalive", 2),
            (
                r#"data: {"choices":[{"delta":{"reasoning_content":"a"}}]}"#,
                10,
            ),
            (r#"data: {"choices":[{"delta":{"content":"b c"}}]}"#, 14),
            (
                r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
                30,
            ),
            (
                r#"data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}"#,
                31,
            ),
            ("data: [DONE]", 32),
        ] {
            reply.line(line, ms(at));
        }
        let Outcome::Done(sample) = reply.outcome() else {
            panic!("it has text");
        };
        assert_eq!((sample.first_token, sample.total), (ms(10), ms(14)));
        assert_eq!(sample.gaps_ms, [4.0]);
        assert_eq!((sample.tokens, sample.prompt_tokens), (3, 7));
        assert_eq!(sample.ms_per_token(), Some(2.0));
        let mut failed = ReplyParts::default();
        failed.line(r#"data: {"error":{"message":"no"}}"#, ms(1));
        assert!(matches!(failed.outcome(), Outcome::Failed(error) if error.contains("no")));
    }
}
