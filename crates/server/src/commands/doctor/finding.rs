//! What a check found: what, where, and what to do.

use std::fmt::Write as _;

use serde_json::{Value, json};

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Severity {
    /// As it should be.
    Ok,
    /// A fact to know.
    Note,
    /// It works, but slowly, insecurely, or not as most people want.
    Warning,
    /// It stops serving.
    Problem,
}

impl Severity {
    fn name(self) -> &'static str {
        match self {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Problem => "problem",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    /// The subject of the check.
    pub(super) check: &'static str,
    pub(super) severity: Severity,
    /// What was found.
    pub(super) what: String,
    /// The file, folder, address or flag; empty where `what` names it.
    pub(super) place: String,
    /// What to do; empty if there is nothing to do.
    pub(super) action: String,
}

impl Finding {
    pub(super) fn new(check: &'static str, severity: Severity, what: impl Into<String>) -> Finding {
        Finding {
            check,
            severity,
            what: what.into(),
            place: String::new(),
            action: String::new(),
        }
    }

    pub(super) fn at(mut self, place: impl Into<String>) -> Finding {
        self.place = place.into();
        self
    }

    pub(super) fn action(mut self, action: impl Into<String>) -> Finding {
        self.action = action.into();
        self
    }

    /// The finding in lines for people.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{:8} {:8} {}\n",
            self.severity.name(),
            self.check,
            self.what.replace('\n', "\n                    ")
        );
        for (name, value) in [("where", &self.place), ("do", &self.action)] {
            if !value.is_empty() {
                let _ = writeln!(text, "{:18}{name}: {value}", "");
            }
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        json!({
            "check": self.check,
            "severity": self.severity.name(),
            "what": self.what,
            "where": text(&self.place),
            "do": text(&self.action),
        })
    }
}
