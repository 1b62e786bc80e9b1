//! Tests of the help texts.

use crate::process::hearth;

const COMMANDS: [&str; 18] = [
    "launch",
    "completions",
    "man",
    "imatrix",
    "serve",
    "config",
    "doctor",
    "run",
    "pull",
    "list",
    "rm",
    "ps",
    "stop",
    "inspect",
    "quantize",
    "synth",
    "eval",
    "tokenize",
];

#[test]
fn every_command_has_help_with_an_example() {
    let all = hearth(&["--help"]);
    assert_eq!(all.code, Some(0));
    for name in COMMANDS {
        assert!(
            all.out.contains(&format!("\n  {name} ")),
            "{name} is not listed"
        );
        let help = hearth(&[name, "--help"]);
        assert_eq!(help.code, Some(0), "{}", help.err);
        let example = help.out.split_once("Example").expect(name).1;
        assert!(
            example.contains(&format!("hearth {name} ")),
            "{name}: {example}"
        );
        assert_eq!(help.err, "");
    }
}

#[test]
fn every_flag_of_serve_has_its_environment_variable() {
    let help = hearth(&["serve", "--help"]).out;
    // Flags of one run, and flags whose variable has another name.
    let without = ["--help", "--version", "--dry-run", "--model", "--no-color"];
    let flags: Vec<&str> = help
        .lines()
        .filter(|line| line.trim_start().starts_with('-'))
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with("--")))
        .filter(|flag| !without.contains(flag))
        .collect();
    assert!(flags.len() > 25, "{flags:?}");
    for flag in flags {
        let variable = format!("HEARTH_{}", flag[2..].to_uppercase().replace('-', "_"));
        assert!(
            help.contains(&format!("[env: {variable}")),
            "{flag} lacks {variable}"
        );
    }
}

#[test]
fn missing_command_prints_help_and_exits_with_usage_error() {
    let nothing: [&str; 0] = [];
    let done = hearth(&nothing);
    assert_eq!(done.code, Some(2));
    assert!(done.err.contains("Usage: hearth"), "{}", done.err);
    let version = hearth(&["--version"]).out;
    let start = format!("hearth {} (debug build, ", env!("CARGO_PKG_VERSION"));
    assert!(version.starts_with(&start), "{version}");
}
