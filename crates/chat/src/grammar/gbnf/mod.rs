//! Grammars in llama.cpp's GBNF, translated to Lark's notation.
//!
//! A rule that does not refer to itself becomes a terminal, which the matcher reads as one regular
//! expression. In the other rules, each run of terms without such a rule becomes one. A terminal
//! ends where no further character fits it, so a text that would need an earlier end is left out.

mod ast;
mod lark;
mod parse;

/// Whether a grammar is in GBNF: its first statement is a name and `::=`.
pub(crate) fn is_gbnf(text: &str) -> bool {
    let lines = text.lines().map(str::trim_start);
    let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let Some(first) = lines.next() else {
        return false;
    };
    let after = first.trim_start_matches(|c: char| parse::is_word(c));
    let is_begun = after.len() < first.len();
    // The sign may stand on the next line.
    let sign = match after.trim_start() {
        "" => lines.next().unwrap_or_default(),
        sign => sign,
    };
    is_begun && sign.starts_with("::=")
}

/// The grammar in Lark's notation. The error names the line and the column.
pub(crate) fn to_lark(text: &str) -> Result<String, String> {
    parse::grammar(text).map(|grammar| lark::written(&grammar))
}

#[cfg(test)]
mod tests;
