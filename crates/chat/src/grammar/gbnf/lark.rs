//! Writes a GBNF grammar in Lark's notation.

use std::fmt::Write;

use super::ast::{Alternatives, GbnfGrammar, Item, Term};

/// The grammar in Lark's notation, with the rule `start`.
pub(super) fn written(grammar: &GbnfGrammar) -> String {
    let mut writer = Writer {
        is_regular: regular_rules(grammar),
        text: String::new(),
        runs: String::new(),
        n_runs: 0,
    };
    let start = writer.name(grammar.root);
    let _ = writeln!(writer.text, "start: {start}");
    for (rule, body) in grammar.rules.iter().enumerate() {
        let name = writer.name(rule);
        let body = if writer.is_regular[rule] {
            writer.regular(body)
        } else {
            writer.recursive(body)
        };
        // Writing to a string does not fail.
        let _ = writeln!(writer.text, "{name}: {body}");
    }
    let runs = std::mem::take(&mut writer.runs);
    writer.text.push_str(&runs);
    writer.text
}

/// Which rules are regular: they have no tokens and do not lead back to themselves.
fn regular_rules(grammar: &GbnfGrammar) -> Vec<bool> {
    let n = grammar.rules.len();
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); n];
    let mut waits_for = vec![0_usize; n];
    for (rule, body) in grammar.rules.iter().enumerate() {
        for term in body.iter().flatten() {
            term.item.visit(&mut |item| match item {
                Item::Rule(used) => {
                    users[*used].push(rule);
                    waits_for[rule] += 1;
                }
                // Never regular: it waits for what does not come.
                Item::Token { .. } => waits_for[rule] += 1,
                _ => {}
            });
        }
    }
    let mut is_regular = vec![false; n];
    let mut ready: Vec<usize> = (0..n).filter(|rule| waits_for[*rule] == 0).collect();
    while let Some(rule) = ready.pop() {
        is_regular[rule] = true;
        for user in &users[rule] {
            waits_for[*user] -= 1;
            if waits_for[*user] == 0 {
                ready.push(*user);
            }
        }
    }
    is_regular
}

struct Writer {
    is_regular: Vec<bool>,
    /// The rules so far.
    text: String,
    /// Terminals of the runs inside recursive rules.
    runs: String,
    n_runs: usize,
}

impl Writer {
    /// Terminals begin with a capital letter.
    fn name(&self, rule: usize) -> String {
        let letter = if self.is_regular[rule] { 'R' } else { 'r' };
        format!("{letter}{rule}")
    }

    fn is_regular(&self, term: &Term) -> bool {
        let mut is_regular = true;
        term.item.visit(&mut |item| match item {
            Item::Rule(rule) => is_regular &= self.is_regular[*rule],
            Item::Token { .. } => is_regular = false,
            _ => {}
        });
        is_regular
    }

    /// An expression of terminals.
    fn regular(&self, alternatives: &Alternatives) -> String {
        let sequences = alternatives
            .iter()
            .map(|terms| self.regular_sequence(terms));
        sequences.collect::<Vec<_>>().join(" | ")
    }

    fn regular_sequence(&self, terms: &[Term]) -> String {
        let terms = terms.iter().map(|term| {
            let item = match &term.item {
                Item::Text(text) => literal(text),
                Item::Class { negated, ranges } => class(*negated, ranges),
                Item::Rule(rule) => self.name(*rule),
                Item::Group(alternatives) => format!("({})", self.regular(alternatives)),
                Item::Token { .. } => String::new(),
            };
            repeated(&item, term)
        });
        joined(terms.collect())
    }

    /// An expression of rules, in which each run of regular terms is a terminal.
    fn recursive(&mut self, alternatives: &Alternatives) -> String {
        let sequences = alternatives.iter().map(|terms| {
            let mut parts = Vec::new();
            let mut rest = terms.as_slice();
            while let Some(first) = rest.first() {
                let run = rest.iter().take_while(|term| self.is_regular(term)).count();
                if run > 0 {
                    let terminal = self.regular_sequence(&rest[..run]);
                    let name = format!("T{}", self.n_runs);
                    self.n_runs += 1;
                    let _ = writeln!(self.runs, "{name}: {terminal}");
                    parts.push(name);
                    rest = &rest[run..];
                    continue;
                }
                let item = match &first.item {
                    Item::Rule(rule) => self.name(*rule),
                    Item::Token { id, negated } => {
                        let sign = if *negated { "^" } else { "" };
                        format!("<[{sign}{id}]>")
                    }
                    Item::Group(inner) => format!("({})", self.recursive(inner)),
                    Item::Text(_) | Item::Class { .. } => String::new(),
                };
                parts.push(repeated(&item, first));
                rest = &rest[1..];
            }
            joined(parts)
        });
        sequences.collect::<Vec<_>>().join(" | ")
    }
}

fn joined(parts: Vec<String>) -> String {
    if parts.is_empty() {
        "\"\"".to_owned()
    } else {
        parts.join(" ")
    }
}

fn repeated(item: &str, term: &Term) -> String {
    match (term.at_least, term.at_most) {
        (1, Some(1)) => item.to_owned(),
        (_, Some(0)) => "\"\"".to_owned(),
        (0, None) => format!("{item}*"),
        (1, None) => format!("{item}+"),
        (0, Some(1)) => format!("{item}?"),
        // A name before a brace would be a template.
        (least, None) => format!("({item}){{{least},}}"),
        (least, Some(most)) => format!("({item}){{{least},{most}}}"),
    }
}

fn literal(text: &str) -> String {
    super::super::literal(text).replace('\u{7f}', "\\u007f")
}

/// A class of characters as a regular expression; line breaks count as any character.
fn class(negated: bool, ranges: &[(char, char)]) -> String {
    let mut out = String::from(if negated { "/[^" } else { "/[" });
    for (first, last) in ranges {
        let _ = write!(out, "\\x{{{:X}}}", u32::from(*first));
        if last > first {
            let _ = write!(out, "-\\x{{{:X}}}", u32::from(*last));
        }
    }
    out.push_str("]/");
    out
}
