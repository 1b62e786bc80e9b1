//! Spellings of llama-server, vLLM and ollama that the parser cannot take as they are: flags of
//! several letters behind one dash, and values that mean the default.

use std::ffi::OsString;

/// Short flags that the parser does not have, most of them of several letters, and their long form.
const SHORT: [(&str, &str); 47] = [
    ("-b", "--batch-size"),
    ("-s", "--seed"),
    ("-v", "--verbose"),
    ("-q", "--quantization"),
    ("-hf", "--hf-repo"),
    ("-hfr", "--hf-repo"),
    ("-hff", "--hf-file"),
    ("-hft", "--hf-token"),
    ("-hfd", "--draft"),
    ("-hfrd", "--draft"),
    ("-md", "--draft"),
    ("-mu", "--model-url"),
    ("-mm", "--mmproj"),
    ("-mmu", "--mmproj-url"),
    ("-ngl", "--gpu-layers"),
    ("-ngld", "--gpu-layers-draft"),
    ("-np", "--parallel"),
    ("-fa", "--flash-attn"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-ub", "--ubatch-size"),
    ("-tb", "--threads-batch"),
    ("-cb", "--cont-batching"),
    ("-nocb", "--no-cont-batching"),
    ("-sm", "--split-mode"),
    ("-ts", "--tensor-split"),
    ("-mg", "--main-gpu"),
    ("-dev", "--device"),
    ("-devd", "--device-draft"),
    ("-cd", "--ctx-size-draft"),
    ("-fit", "--fit"),
    ("-fitt", "--fit-target"),
    ("-sps", "--slot-prompt-similarity"),
    ("-nkvo", "--no-kv-offload"),
    ("-kvo", "--kv-offload"),
    ("-kvu", "--kv-unified"),
    ("-cram", "--cache-ram"),
    ("-ctxcp", "--ctx-checkpoints"),
    ("-ot", "--override-tensor"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-to", "--timeout"),
    ("-lv", "--log-verbosity"),
    ("-rea", "--reasoning"),
    ("-tp", "--tensor-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-dp", "--data-parallel-size"),
];

/// Switches that may be followed by a value; without one they are on.
const SWITCHES: [&str; 2] = ["--flash-attn", "--metrics"];
/// The values of [`SWITCHES`].
const SWITCH_VALUES: [&str; 9] = [
    "on", "off", "auto", "true", "false", "1", "0", "enabled", "disabled",
];

/// Flags with the value that means their default here; both words are left out.
const DEFAULTS: [(&str, &[&str]); 12] = [
    ("-c", &["0", "-1"]),
    ("--ctx-size", &["0"]),
    ("--max-model-len", &["-1", "auto"]),
    ("-t", &["-1"]),
    ("--threads", &["-1"]),
    ("--parallel", &["-1"]),
    ("-n", &["-1", "-2"]),
    ("--predict", &["-1", "-2"]),
    ("--n-predict", &["-1", "-2"]),
    ("--reasoning-budget", &["-1"]),
    ("--cache-ram", &["-1"]),
    ("--timeout", &["-1"]),
];

/// First words that mean `serve`, as llama-server has no commands.
const SERVE_FLAGS: [&str; 4] = ["-m", "--model", "-hf", "--hf-repo"];

/// Commands whose words are rewritten.
const COMMANDS: [&str; 5] = ["serve", "run", "inspect", "config", "doctor"];

/// Whether a word in place of a command is a flag that means `serve`.
pub(crate) fn means_serve(word: &OsString) -> bool {
    SERVE_FLAGS.iter().any(|flag| word == flag)
}

/// The words of a command line in the parser's form. Words behind `--` and words that are not
/// Unicode stay as they are.
pub(crate) fn rewritten(words: Vec<OsString>) -> Vec<OsString> {
    let command = words.get(1).and_then(|word| word.to_str());
    if !command.is_some_and(|command| COMMANDS.contains(&command)) {
        return words;
    }
    let mut rewritten = Vec::with_capacity(words.len());
    let mut rest = words.into_iter().peekable();
    while let Some(word) = rest.next() {
        if word == "--" {
            rewritten.push(word);
            break;
        }
        let Some(text) = word.to_str() else {
            rewritten.push(word);
            continue;
        };
        let (name, mut value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (text, None),
        };
        let short = SHORT.iter().find(|(short, _)| *short == name);
        let name = short.map_or(name, |(_, long)| long);
        let next = rest.peek().and_then(|next| next.to_str());
        let is_default = |value: &str| {
            let mut defaults = DEFAULTS.iter();
            defaults.any(|(flag, values)| *flag == name && values.contains(&value))
        };
        match (&value, next) {
            (Some(value), _) if is_default(value) => continue,
            (None, Some(next)) if is_default(next) => {
                rest.next();
                continue;
            }
            (None, Some(next)) if SWITCHES.contains(&name) && SWITCH_VALUES.contains(&next) => {
                value = Some(next.to_owned());
                rest.next();
            }
            (None, _) if SWITCHES.contains(&name) => value = Some("on".to_owned()),
            _ => {}
        }
        rewritten.push(match value {
            Some(value) => format!("{name}={value}").into(),
            None => name.into(),
        });
    }
    rewritten.extend(rest);
    rewritten
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: &str) {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert_eq!(rewritten(words(line)), words(expected), "{line}");
    }

    #[test]
    fn short_flags_of_several_letters_get_their_long_form() {
        check(
            "hearth serve -hf a/b -ngl 99 -np 4 -ctk=q8_0",
            "hearth serve --hf-repo a/b --gpu-layers 99 --parallel 4 --cache-type-k=q8_0",
        );
        check("hearth bench -hf a", "hearth bench -hf a");
        check("hearth run m -- -hf -fa", "hearth run m -- -hf -fa");
    }

    #[test]
    fn switches_take_their_value_only_if_it_is_one() {
        check(
            "hearth serve -fa m.gguf",
            "hearth serve --flash-attn=on m.gguf",
        );
        check(
            "hearth serve -fa auto m.gguf",
            "hearth serve --flash-attn=auto m.gguf",
        );
        check("hearth serve --metrics off", "hearth serve --metrics=off");
        check("hearth serve --metrics", "hearth serve --metrics=on");
    }

    #[test]
    fn values_that_mean_the_default_are_left_out() {
        check(
            "hearth serve -c 0 -np -1 m.gguf --ctx-size=0",
            "hearth serve m.gguf",
        );
        check("hearth serve -c 4096", "hearth serve -c 4096");
        check("hearth serve --max-ctx 0", "hearth serve --max-ctx 0");
    }
}
