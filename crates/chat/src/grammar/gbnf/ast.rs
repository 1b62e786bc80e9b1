//! A GBNF grammar as data.

/// A grammar whose references are resolved.
#[derive(Debug)]
pub(super) struct GbnfGrammar {
    /// Bodies of the rules.
    pub(super) rules: Vec<Alternatives>,
    /// Index of the rule of a whole text.
    pub(super) root: usize,
}

/// Sequences, of which one matches.
pub(super) type Alternatives = Vec<Vec<Term>>;

/// An item and how often it is repeated.
#[derive(Debug, PartialEq)]
pub(super) struct Term {
    pub(super) item: Item,
    pub(super) at_least: u32,
    /// `None` is no limit.
    pub(super) at_most: Option<u32>,
}

/// What a term repeats.
#[derive(Debug, PartialEq)]
pub(super) enum Item {
    Text(String),
    /// One character inside these ranges, or outside them.
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// A rule, by its index.
    Rule(usize),
    /// One token, or any other one.
    Token {
        id: u32,
        negated: bool,
    },
    Group(Alternatives),
}

impl Item {
    /// The rules and tokens of an item, groups included.
    pub(super) fn visit(&self, seen: &mut impl FnMut(&Item)) {
        match self {
            Item::Group(alternatives) => {
                for term in alternatives.iter().flatten() {
                    term.item.visit(seen);
                }
            }
            item => seen(item),
        }
    }
}
