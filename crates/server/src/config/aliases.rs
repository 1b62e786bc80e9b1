//! Old environment variables, of the predecessor and of version 0.1, as aliases of settings.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use super::Origin;
use super::file::Entry;

/// The effect of a variable.
#[derive(Debug, Clone, Copy)]
enum Meaning {
    /// Sets the argument with this id.
    Value(&'static str),
    /// If it is on, sets the argument with this id to this value.
    Switch(&'static str, &'static str),
    /// If it is off, sets the argument with this id to this value.
    Off(&'static str, &'static str),
    /// Is refused, with what to do instead.
    Refused(&'static str),
}

const NO_PAGING: &str =
    "the KV cache stays on the device; unset it, and use --max-ctx or --kv-type";
const NO_EXPERTS: &str = "all experts stay in memory and the model chooses among them; unset it";

/// Variables in order of rising precedence: the last one that sets an argument wins.
const ALIASES: [(&str, Meaning); 27] = [
    ("DFLASH_TARGET", Meaning::Value("model_flag")),
    ("DFLASH_DRAFT", Meaning::Value("draft")),
    ("DFLASH_MODEL_NAME", Meaning::Value("model_name")),
    ("DFLASH_MODEL_CARDS_DIR", Meaning::Value("model_cards_dir")),
    ("DFLASH27B_KV_TQ3", Meaning::Switch("kv_type", "tq3_0,q4_0")),
    ("DFLASH27B_KV_Q4", Meaning::Switch("kv_type", "q4_0")),
    ("DFLASH27B_KV_F16", Meaning::Switch("kv_type", "f16")),
    ("DFLASH27B_KV_K", Meaning::Value("cache_type_k")),
    ("DFLASH27B_KV_V", Meaning::Value("cache_type_v")),
    ("DFLASH27B_PREFILL_UBATCH", Meaning::Value("chunk")),
    ("DFLASH27B_DRAFT_SWA", Meaning::Value("draft_swa")),
    ("DFLASH_FP_ALPHA", Meaning::Value("prefill_alpha")),
    ("DFLASH_FP_USE_BSA", Meaning::Off("prefill_alpha", "0")),
    (
        "DFLASH_FP_PROFILE",
        Meaning::Switch("prefill_profile", "true"),
    ),
    ("DFLASH_KVFLASH", Meaning::Refused(NO_PAGING)),
    ("DFLASH_SPARK", Meaning::Refused(NO_EXPERTS)),
    ("HEARTH_TARGET_DEVICE", Meaning::Value("device")),
    ("HEARTH_TARGET_SPLIT_MODE", Meaning::Value("split_mode")),
    ("HEARTH_READ_AHEAD", Meaning::Value("prefix_warmup")),
    ("HEARTH_FA_WINDOW", Meaning::Value("attention_window")),
    (
        "HEARTH_FA_WINDOW_SINKS",
        Meaning::Value("attention_window_sinks"),
    ),
    (
        "HEARTH_FA_WINDOW_FORCE",
        Meaning::Switch("attention_window_force", "true"),
    ),
    (
        "HEARTH_PREFIX_CACHE_SLOTS",
        Meaning::Value("prefix_cache_entries"),
    ),
    (
        "HEARTH_DISK_PREFIX_CACHE_COMPRESS",
        Meaning::Switch("prefill_aged", "true"),
    ),
    ("HEARTH_LOOKUP", Meaning::Value("lookup_ngram")),
    ("HEARTH_SUMS", Meaning::Value("numerics")),
    ("HEARTH_EXACT", Meaning::Switch("batch_invariant", "true")),
];

/// A refused variable that is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RefusedVariable {
    /// Its name.
    pub(super) name: &'static str,
    /// What to do instead.
    pub(super) instead: &'static str,
}

/// The names of all aliases.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    ALIASES.iter().map(|(name, _)| *name)
}

/// The settings of this process's variables.
///
/// # Errors
/// If a refused variable is set.
pub(super) fn read() -> Result<Vec<Entry>, RefusedVariable> {
    read_from(|name| std::env::var(name).ok())
}

fn read_from(value_of: impl Fn(&str) -> Option<String>) -> Result<Vec<Entry>, RefusedVariable> {
    let mut entries: Vec<Entry> = Vec::new();
    for (name, meaning) in ALIASES {
        let Some(value) = value_of(name).filter(|value| !value.is_empty()) else {
            continue;
        };
        let off = matches!(&*value.to_lowercase(), "0" | "false" | "no" | "off");
        let (id, value) = match meaning {
            Meaning::Refused(instead) if !off => return Err(RefusedVariable { name, instead }),
            Meaning::Refused(_) => continue,
            Meaning::Switch(..) if off => continue,
            Meaning::Off(..) if !off => continue,
            Meaning::Switch(id, value) | Meaning::Off(id, value) => (id, value.to_owned()),
            Meaning::Value(id) => (id, value),
        };
        entries.retain(|entry| entry.id != id);
        entries.push(Entry {
            id: id.to_owned(),
            values: vec![value],
            origin: Origin::Environment,
            source: name.to_owned(),
        });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(set: &[(&str, &str)]) -> Result<Vec<(String, String)>, RefusedVariable> {
        let found = read_from(|name| {
            let mut set = set.iter();
            set.find(|(other, _)| *other == name)
                .map(|(_, value)| (*value).to_owned())
        })?;
        let pair = |entry: Entry| (entry.id, entry.values.join(","));
        Ok(found.into_iter().map(pair).collect())
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(a, b): &(&str, &str)| ((*a).to_owned(), (*b).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn cache_type_variables_set_the_type_and_the_last_one_wins() {
        assert_eq!(
            entries(&[("DFLASH27B_KV_TQ3", "1")]),
            Ok(pairs(&[("kv_type", "tq3_0,q4_0")]))
        );
        assert_eq!(
            entries(&[("DFLASH27B_KV_TQ3", "1"), ("DFLASH27B_KV_F16", "1")]),
            Ok(pairs(&[("kv_type", "f16")]))
        );
        assert_eq!(entries(&[("DFLASH27B_KV_TQ3", "0")]), Ok(Vec::new()));
        assert_eq!(
            entries(&[("DFLASH27B_KV_Q4", "1"), ("DFLASH27B_KV_V", "q8_0")]),
            Ok(pairs(&[("kv_type", "q4_0"), ("cache_type_v", "q8_0")]))
        );
    }

    #[test]
    fn unsupported_variables_are_refused_unless_off() {
        let refused = entries(&[("DFLASH_SPARK", "1")]).unwrap_err();
        assert_eq!(refused.name, "DFLASH_SPARK");
        assert_eq!(entries(&[("DFLASH_KVFLASH", "0")]), Ok(Vec::new()));
    }

    #[test]
    fn variables_of_compression_set_its_flags() {
        assert_eq!(
            entries(&[("DFLASH_FP_ALPHA", "0.85"), ("DFLASH_FP_PROFILE", "1")]),
            Ok(pairs(&[
                ("prefill_alpha", "0.85"),
                ("prefill_profile", "true")
            ]))
        );
        assert_eq!(entries(&[("DFLASH_FP_USE_BSA", "1")]), Ok(Vec::new()));
        assert_eq!(
            entries(&[("DFLASH_FP_USE_BSA", "0")]),
            Ok(pairs(&[("prefill_alpha", "0")]))
        );
    }
}
