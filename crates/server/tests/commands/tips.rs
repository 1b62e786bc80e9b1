//! Tests of the flags that texts for users name: each exists, is shown in the help, and belongs to
//! the command that prints the text.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use server::cli::Cli;

/// Files whose texts name the flags of other programs.
const OF_OTHERS: [&str; 4] = [
    "server/src/cli/spellings.rs",
    "server/src/commands/connect/clients.rs",
    "server/src/commands/connect/starts.rs",
    "cuda/src/compile/build.rs",
];
/// Flags that the parser adds by itself.
const IMPLIED: [&str; 2] = ["help", "version"];
/// Beginnings of the predecessor's flags, in the table of what is refused.
const REFUSED_FAMILIES: [&str; 2] = ["ds4-", "target-shard-ipc-"];

/// The long names that the help of a command and its subcommands shows.
fn shown(command: &Command) -> BTreeSet<String> {
    let own = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .filter_map(|arg| arg.get_long().map(str::to_owned));
    let mut names: BTreeSet<String> = own.collect();
    for inner in command.get_subcommands() {
        names.extend(shown(inner));
    }
    names
}

/// The flags that a text names.
fn flags(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("--") {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '-') {
            continue;
        }
        let name: String = text[at + 2..]
            .chars()
            .take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '-')
            .collect();
        if name.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.push(name);
        }
    }
    found
}

/// Whether this is the inside of `#[cfg(test)]`.
fn is_test_mark(group: &Group) -> bool {
    group.delimiter() == Delimiter::Bracket
        && ["[cfg (test)]", "[cfg(test)]"].contains(&&*group.to_string())
}

/// The string literals of a source, without those of its tests; doc comments are literals too.
fn texts(stream: TokenStream, with_docs: bool, into: &mut Vec<String>) {
    let mut is_test = false;
    let mut is_doc = false;
    for token in stream {
        match token {
            TokenTree::Group(group) if is_test_mark(&group) => is_test = true,
            TokenTree::Group(group) if is_test && group.delimiter() == Delimiter::Brace => {
                is_test = false;
            }
            TokenTree::Group(group) => texts(group.stream(), with_docs, into),
            TokenTree::Ident(word) => is_doc = word == "doc",
            TokenTree::Punct(mark) if mark.as_char() == ';' => is_test = false,
            TokenTree::Punct(_) => {}
            TokenTree::Literal(literal) => {
                if (with_docs || !is_doc)
                    && let Ok(text) = syn::parse_str::<syn::LitStr>(&literal.to_string())
                {
                    into.push(text.value());
                }
            }
        }
    }
}

/// The Rust files below a folder, without test modules.
fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && name != "tests" {
            sources(&path, into);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            into.push(path);
        }
    }
}

/// The command whose folder or file this is, and whose flags its texts may name.
fn command_of<'a>(root: &'a Command, file: &str) -> Option<&'a Command> {
    let name = file.strip_prefix("server/src/commands/")?;
    let name = name.split(['/', '.']).next()?;
    root.find_subcommand(name)
}

/// The flags of the command that a text names, as in `hearth serve`.
fn named_command(root: &Command, text: &str) -> BTreeSet<String> {
    let after = text.split("hearth ").nth(1).unwrap_or_default();
    let name = after.split_whitespace().next().unwrap_or_default();
    root.find_subcommand(name).map(shown).unwrap_or_default()
}

#[test]
fn texts_name_flags_that_exist_and_are_shown() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let root = Cli::command();
    let all = shown(&root);
    let global: BTreeSet<String> = root
        .get_arguments()
        .filter_map(|arg| arg.get_long().map(str::to_owned))
        .collect();
    let mut wrong = Vec::new();
    let mut n_named = 0;
    for one in [
        "server", "cuda", "cpu", "model", "chat", "decode", "gguf", "contract",
    ] {
        let mut files = Vec::new();
        sources(&crates.join(one).join("src"), &mut files);
        for path in files {
            let file = path.strip_prefix(crates).unwrap().to_str().unwrap();
            if OF_OTHERS.contains(&file) {
                continue;
            }
            let stream: TokenStream = fs::read_to_string(&path).unwrap().parse().unwrap();
            let mut found = Vec::new();
            texts(stream, file.starts_with("server/src/cli/"), &mut found);
            let own = command_of(&root, file).map(shown);
            for text in found {
                for flag in flags(&text) {
                    n_named += 1;
                    let here = own.as_ref().unwrap_or(&all);
                    let is_known = here.contains(&flag)
                        || global.contains(&flag)
                        || named_command(&root, &text).contains(&flag)
                        || IMPLIED.contains(&&*flag)
                        || REFUSED_FAMILIES.contains(&&*flag);
                    if !is_known {
                        wrong.push(format!("{file}: --{flag} in {text:?}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(n_named > 100, "{n_named}");
}

#[test]
fn flags_are_found_in_texts() {
    let text = "use --max-ctx 5, `--kv-type`, or (--port=3); not a -- b, a--b or ---x";
    assert_eq!(flags(text), ["max-ctx", "kv-type", "port"]);
    let hidden = Command::new("x")
        .arg(clap::Arg::new("a").long("seen"))
        .arg(clap::Arg::new("b").long("unseen").hide(true));
    assert_eq!(shown(&hidden), BTreeSet::from(["seen".to_owned()]));
    let source = "const A: &str = \"--one\"; /// --two\nfn f() { g(\"--three\") }\n\
        #[cfg(test)] mod tests { const B: &str = \"--four\"; }";
    let mut found = Vec::new();
    texts(source.parse().unwrap(), false, &mut found);
    assert_eq!(found, ["--one", "--three"]);
}
