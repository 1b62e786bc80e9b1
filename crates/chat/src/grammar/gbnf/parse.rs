//! Reads GBNF.

use std::collections::HashMap;

use super::ast::{Alternatives, GbnfGrammar, Item, Term};

/// Most rules of a grammar, which the matcher follows by recursion.
const MAX_RULES: usize = 1_000;
/// Deepest groups, as in the matcher.
const MAX_NESTING: usize = 24;
/// Highest count of a repetition, as in llama.cpp.
const MAX_REPEATS: u32 = 2_000;

/// Whether a letter belongs to a rule's name.
pub(super) fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '-' || letter == '_'
}

/// The grammar of `text`. The error names the line and the column.
pub(super) fn grammar(text: &str) -> Result<GbnfGrammar, String> {
    let mut parser = Parser {
        text,
        at: 0,
        nesting: 0,
        names: HashMap::new(),
        rules: Vec::new(),
    };
    parser.space(true);
    while parser.at < text.len() {
        parser.rule()?;
    }
    let root = parser.names.get("root").copied();
    let mut rules = Vec::with_capacity(parser.rules.len());
    for (name, rule) in parser.rules.iter_mut().enumerate() {
        let Some(body) = rule.body.take() else {
            let at = rule.first_use;
            let name = parser.names.iter().find(|(_, index)| **index == name);
            let name = name.map_or("", |(name, _)| name);
            return Err(place(text, at, &format!("the rule {name} is not defined")));
        };
        rules.push(body);
    }
    match root {
        Some(root) => Ok(GbnfGrammar { rules, root }),
        None => Err("the rule root is missing; it is the whole text".to_owned()),
    }
}

fn place(text: &str, at: usize, what: &str) -> String {
    let before = &text[..at];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    format!("line {line}, column {column}: {what}")
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    nesting: usize,
    names: HashMap<&'a str, usize>,
    rules: Vec<RuleSlot>,
}

/// A rule that is defined or used so far.
struct RuleSlot {
    body: Option<Alternatives>,
    first_use: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let letter = self.peek()?;
        self.at += letter.len_utf8();
        Some(letter)
    }

    fn eats(&mut self, text: &str) -> bool {
        let is_next = self.text[self.at..].starts_with(text);
        if is_next {
            self.at += text.len();
        }
        is_next
    }

    fn error<T>(&self, what: &str) -> Result<T, String> {
        Err(place(self.text, self.at, what))
    }

    /// Skips blanks and comments, and line breaks if `lines`.
    fn space(&mut self, lines: bool) {
        while let Some(letter) = self.peek() {
            match letter {
                ' ' | '\t' => {}
                '\r' | '\n' if lines => {}
                '#' => {
                    let rest = &self.text[self.at..];
                    self.at += rest.find(['\r', '\n']).unwrap_or(rest.len());
                    continue;
                }
                _ => return,
            }
            self.at += 1;
        }
    }

    fn name(&mut self) -> Result<&'a str, String> {
        let rest = &self.text[self.at..];
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        if end == 0 {
            return self.error("a rule's name must stand here");
        }
        self.at += end;
        Ok(&rest[..end])
    }

    /// Index of the rule of this name, which may be defined later.
    fn index(&mut self, name: &'a str, first_use: usize) -> Result<usize, String> {
        if let Some(index) = self.names.get(name) {
            return Ok(*index);
        }
        if self.rules.len() == MAX_RULES {
            return self.error(&format!("there are more than {MAX_RULES} rules"));
        }
        self.rules.push(RuleSlot {
            body: None,
            first_use,
        });
        self.names.insert(name, self.rules.len() - 1);
        Ok(self.rules.len() - 1)
    }

    fn rule(&mut self) -> Result<(), String> {
        let begin = self.at;
        let name = self.name()?;
        let index = self.index(name, begin)?;
        self.space(true);
        if !self.eats("::=") {
            return self.error("::= must stand between a rule's name and its body");
        }
        self.space(true);
        let body = self.alternatives()?;
        // As in llama.cpp, the last definition of a name counts.
        self.rules[index].body = Some(body);
        match self.peek() {
            None | Some('\r' | '\n') => {}
            Some(')') => return self.error("no group is open that ) could close"),
            Some(_) => return self.error("the rule must go on with a term or end with its line"),
        }
        self.space(true);
        Ok(())
    }

    fn alternatives(&mut self) -> Result<Alternatives, String> {
        let mut alternatives = vec![self.sequence()?];
        while self.continues() {
            self.space(true);
            alternatives.push(self.sequence()?);
        }
        Ok(alternatives)
    }

    /// Whether `|` is next, on this line or at the start of the next.
    fn continues(&mut self) -> bool {
        let before = self.at;
        self.space(true);
        let is_next = self.eats("|");
        if !is_next && self.nesting == 0 {
            self.at = before;
        }
        is_next
    }

    fn sequence(&mut self) -> Result<Vec<Term>, String> {
        let mut terms: Vec<Term> = Vec::new();
        loop {
            let begin = self.at;
            let item = match self.peek() {
                Some('"') => Item::Text(self.literal()?),
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    let ranges = vec![('\0', char::MAX)];
                    Item::Class {
                        negated: false,
                        ranges,
                    }
                }
                Some('(') => Item::Group(self.group()?),
                Some('<' | '!') => self.token()?,
                Some('*' | '+' | '?' | '{') => {
                    let (at_least, at_most) = self.repeats()?;
                    let Some(before) = terms.pop() else {
                        self.at = begin;
                        return self.error("nothing stands before this that could be repeated");
                    };
                    terms.push(repeated(before, at_least, at_most));
                    self.space(self.nesting > 0);
                    continue;
                }
                Some(letter) if is_word(letter) => {
                    let name = self.name()?;
                    Item::Rule(self.index(name, begin)?)
                }
                _ => return Ok(terms),
            };
            terms.push(once(item));
            self.space(self.nesting > 0);
        }
    }

    fn group(&mut self) -> Result<Alternatives, String> {
        if self.nesting == MAX_NESTING {
            return self.error(&format!("groups are nested deeper than {MAX_NESTING}"));
        }
        let begin = self.at;
        self.at += 1;
        self.nesting += 1;
        self.space(true);
        let alternatives = self.alternatives()?;
        self.nesting -= 1;
        if !self.eats(")") {
            if self.at == self.text.len() {
                self.at = begin;
                return self.error("this group has no end");
            }
            return self.error("a term, | or ) must stand here");
        }
        Ok(alternatives)
    }

    fn literal(&mut self) -> Result<String, String> {
        let begin = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                None => {
                    self.at = begin;
                    return self.error("this text has no end");
                }
                Some('"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(_) => text.push(self.letter()?),
            }
        }
    }

    fn class(&mut self) -> Result<Item, String> {
        let begin = self.at;
        self.at += 1;
        let negated = self.eats("^");
        let mut ranges = Vec::new();
        while !self.eats("]") {
            if self.peek().is_none() {
                self.at = begin;
                return self.error("this class of characters has no end");
            }
            let at = self.at;
            let first = self.letter()?;
            let is_range = self.peek() == Some('-') && !self.text[self.at..].starts_with("-]");
            let last = if is_range {
                self.at += 1;
                self.letter()?
            } else {
                first
            };
            if last < first {
                self.at = at;
                return self.error("the range ends before it begins");
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() {
            self.at = begin;
            return self.error("this class has no characters");
        }
        Ok(Item::Class { negated, ranges })
    }

    /// A character or an escape.
    fn letter(&mut self) -> Result<char, String> {
        let begin = self.at;
        let letter = self.take();
        if letter != Some('\\') {
            return match letter {
                Some(letter) => Ok(letter),
                None => self.error("the grammar ends inside a text"),
            };
        }
        let digits = match self.take() {
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some('t') => return Ok('\t'),
            Some('r') => return Ok('\r'),
            Some('n') => return Ok('\n'),
            Some(letter @ ('\\' | '"' | '[' | ']' | '-')) => return Ok(letter),
            _ => {
                self.at = begin;
                return self.error("this escape is unknown");
            }
        };
        let hex = self.text.get(self.at..self.at + digits);
        let is_hex = |hex: &&str| hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        let code = hex.filter(is_hex).map(|hex| u32::from_str_radix(hex, 16));
        let Some(Ok(code)) = code else {
            self.at = begin;
            return self.error(&format!("this escape needs {digits} hexadecimal digits"));
        };
        let Some(letter) = char::from_u32(code) else {
            self.at = begin;
            return self.error("this escape is no character, such as half of a surrogate pair");
        };
        self.at += digits;
        Ok(letter)
    }

    /// `<[17]>`, or `!<[17]>` for any other token.
    fn token(&mut self) -> Result<Item, String> {
        let begin = self.at;
        let negated = self.eats("!");
        let rest = &self.text[self.at..];
        let inner = rest.strip_prefix("<[").and_then(|rest| {
            let end = rest.find("]>")?;
            rest[..end].parse::<u32>().ok().map(|id| (id, end))
        });
        match inner {
            Some((id, length)) => {
                self.at += length + 4;
                Ok(Item::Token { id, negated })
            }
            None => {
                self.at = begin;
                self.error("a token must be named by its id, as <[17]>, or !<[17]> for all others")
            }
        }
    }

    /// `*`, `+`, `?`, `{m}`, `{m,}` or `{m,n}`.
    fn repeats(&mut self) -> Result<(u32, Option<u32>), String> {
        match self.take() {
            Some('*') => return Ok((0, None)),
            Some('+') => return Ok((1, None)),
            Some('?') => return Ok((0, Some(1))),
            _ => {}
        }
        self.space(self.nesting > 0);
        let at_least = self.count()?;
        let at_most = if self.eats(",") {
            self.space(self.nesting > 0);
            if self.peek() == Some('}') {
                None
            } else {
                Some(self.count()?)
            }
        } else {
            Some(at_least)
        };
        if !self.eats("}") {
            return self.error("a count, a comma or } must stand here");
        }
        if at_most.is_some_and(|most| most < at_least) {
            return self.error("the second count of this repetition is below the first");
        }
        Ok((at_least, at_most))
    }

    fn count(&mut self) -> Result<u32, String> {
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !c.is_ascii_digit());
        let digits = &rest[..end.unwrap_or(rest.len())];
        match digits.parse::<u32>() {
            Ok(count) if count <= MAX_REPEATS => {
                self.at += digits.len();
                self.space(self.nesting > 0);
                Ok(count)
            }
            _ => self.error(&format!("a count up to {MAX_REPEATS} must stand here")),
        }
    }
}

fn once(item: Item) -> Term {
    Term {
        item,
        at_least: 1,
        at_most: Some(1),
    }
}

/// A term repeated; a repetition of a repetition is one of a group.
fn repeated(before: Term, at_least: u32, at_most: Option<u32>) -> Term {
    let is_single = before.at_least == 1 && before.at_most == Some(1);
    let item = if is_single {
        before.item
    } else {
        Item::Group(vec![vec![before]])
    };
    Term {
        item,
        at_least,
        at_most,
    }
}
