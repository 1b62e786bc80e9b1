//! Which files of a repository a name means.

use strsim::levenshtein;

use crate::name::is_gguf;
use crate::{HubError, Pick};

/// What the names of draft files begin with, as llama.cpp and their makers publish them.
pub const DRAFT_PREFIXES: [&str; 4] = ["mtp-", "eagle3-", "dflash-", "dspark-"];
/// Types that are taken if none is named, in this order.
const PREFERRED: [&str; 2] = ["Q4_K_M", "Q8_0"];
/// The most names of a suggestion.
const SUGGESTED: usize = 12;

/// The files of a choice: the parts of one model in order, or a folder of safetensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChosenFiles {
    /// GGUF files; the first is opened.
    Files(Vec<String>),
    /// Files of a draft in safetensors; their folder is opened.
    Folder(Vec<String>),
}

impl ChosenFiles {
    /// All files.
    pub(crate) fn files(&self) -> &[String] {
        match self {
            ChosenFiles::Files(files) | ChosenFiles::Folder(files) => files,
        }
    }
}

/// Chooses among the paths of a repository.
///
/// # Errors
/// [`HubError::FileNotFound`], [`HubError::QuantNotFound`], [`HubError::NoModel`] or
/// [`HubError::MissingPart`], with what the repository has.
pub(crate) fn choose(place: &str, paths: &[String], pick: &Pick) -> Result<ChosenFiles, HubError> {
    let models: Vec<&String> = paths.iter().filter(|path| is_model(path)).collect();
    let first = match pick {
        Pick::File(wanted) => Some(file(place, paths, wanted)?),
        Pick::Quant(quant) => {
            let found = of_quant(&models, quant);
            if found.is_none() && !models.is_empty() {
                return Err(HubError::QuantNotFound {
                    repo: place.to_owned(),
                    quant: quant.clone(),
                    available: quants(&models),
                });
            }
            found
        }
        Pick::Default => PREFERRED
            .iter()
            .find_map(|quant| of_quant(&models, quant))
            .or_else(|| models.iter().copied().find(|path| is_first_part(path))),
    };
    match first {
        Some(first) => Ok(ChosenFiles::Files(parts(place, paths, first)?)),
        None => folder(place, paths),
    }
}

/// The quantisation in a file's name, such as `Q4_K_M` or `UD-Q4_K_XL`, in capitals.
pub fn quant_of(path: &str) -> Option<String> {
    let name = file_name(path);
    let stem = name.get(..name.len().checked_sub(5)?)?;
    let stem = split_part(name).map_or(stem, |part| part.prefix);
    let upper = stem.to_ascii_uppercase();
    let mut words = upper.rsplit(['-', '.']);
    let last = words.next()?;
    let digits = last.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    let kind = &last[..last.len() - digits.len()];
    let known = ["Q", "IQ", "TQ", "BF", "F", "FP", "MXFP", "NVFP"].contains(&kind);
    if !known || !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    match words.next() {
        Some("UD") => Some(format!("UD-{last}")),
        _ => Some(last.to_owned()),
    }
}

/// Whether a path is a GGUF file that runs alone.
fn is_model(path: &str) -> bool {
    let name = file_name(path).to_ascii_lowercase();
    is_gguf(&name)
        && !name.contains("mmproj")
        && !name.contains("imatrix")
        && !DRAFT_PREFIXES.iter().any(|prefix| name.contains(prefix))
}

/// The draft files of a repository.
pub(crate) fn drafts(paths: &[String]) -> Vec<String> {
    let is_draft = |path: &&String| {
        let name = file_name(path).to_ascii_lowercase();
        is_gguf(&name) && DRAFT_PREFIXES.iter().any(|prefix| name.contains(prefix))
    };
    paths.iter().filter(is_draft).cloned().collect()
}

/// The first file of a quantisation; `Q4_K` does not mean `Q4_K_M`.
fn of_quant<'a>(models: &[&'a String], quant: &str) -> Option<&'a String> {
    let quant = quant.to_ascii_uppercase();
    let exact = |path: &&&String| quant_of(path).as_deref() == Some(&quant);
    let within = |path: &&&String| {
        let upper = file_name(path).to_ascii_uppercase();
        upper.match_indices(&quant).any(|(at, found)| {
            let before = upper[..at].chars().next_back();
            let after = upper[at + found.len()..].chars().next();
            let ends = |c: Option<char>| c.is_none_or(|c| "-.".contains(c));
            ends(before) && ends(after)
        })
    };
    let firsts = || models.iter().filter(|path| is_first_part(path));
    firsts()
        .find(exact)
        .or_else(|| firsts().find(within))
        .copied()
}

/// The file of a path or of its last part, in any case.
fn file<'a>(place: &str, paths: &'a [String], wanted: &str) -> Result<&'a String, HubError> {
    let by_path = paths.iter().find(|path| path.eq_ignore_ascii_case(wanted));
    let by_name = || {
        paths
            .iter()
            .find(|path| file_name(path).eq_ignore_ascii_case(wanted))
    };
    by_path.or_else(by_name).ok_or_else(|| {
        let mut near: Vec<&str> = paths
            .iter()
            .filter(|path| is_gguf(path))
            .map(String::as_str)
            .collect();
        near.sort_by_key(|path| levenshtein(&path.to_lowercase(), &wanted.to_lowercase()));
        near.truncate(3);
        let hint = match near.as_slice() {
            [] => "; it has no GGUF files".to_owned(),
            near => format!("; did you mean {}?", near.join(" or ")),
        };
        HubError::FileNotFound {
            place: place.to_owned(),
            file: wanted.to_owned(),
            hint,
        }
    })
}

/// All parts of the model that `path` is a part of, in order.
fn parts(place: &str, paths: &[String], path: &str) -> Result<Vec<String>, HubError> {
    let names = part_names(path);
    match names.iter().find(|name| !paths.contains(name)) {
        None => Ok(names),
        Some(missing) => Err(HubError::MissingPart {
            place: place.to_owned(),
            file: path.to_owned(),
            missing: missing.clone(),
        }),
    }
}

/// The names of all parts of the model that `path` is a part of, in order.
pub(crate) fn part_names(path: &str) -> Vec<String> {
    let Some(part) = split_part(path) else {
        return vec![path.to_owned()];
    };
    let name = |index| {
        let SplitPart {
            prefix,
            count,
            ending,
            ..
        } = part;
        format!("{prefix}-{index:05}-of-{count:05}{ending}")
    };
    (1..=part.count).map(name).collect()
}

/// A part of a split model.
struct SplitPart<'a> {
    prefix: &'a str,
    index: u32,
    count: u32,
    ending: &'a str,
}

/// Reads `PREFIX-00001-of-00003.gguf`.
fn split_part(path: &str) -> Option<SplitPart<'_>> {
    let stem_end = path.len().checked_sub(5)?;
    let (stem, ending) = (path.get(..stem_end)?, path.get(stem_end..)?);
    let numbers = stem.get(stem.len().checked_sub(15)?..)?;
    let (index, count) = numbers.strip_prefix('-')?.split_once("-of-")?;
    let number = |text: &str| (text.len() == 5).then(|| text.parse::<u32>().ok())?;
    let (index, count) = (number(index)?, number(count)?);
    (is_gguf(ending) && (1..=count).contains(&index)).then(|| SplitPart {
        prefix: &stem[..stem.len() - 15],
        index,
        count,
        ending,
    })
}

fn is_first_part(path: &str) -> bool {
    split_part(path).is_none_or(|part| part.index == 1)
}

/// A repository without GGUF files: a draft in safetensors, or an error.
fn folder(place: &str, paths: &[String]) -> Result<ChosenFiles, HubError> {
    let no_model = |what: &str| HubError::NoModel {
        repo: place.to_owned(),
        what: what.to_owned(),
    };
    let files: Vec<String> = paths
        .iter()
        .filter(|path| {
            let is_weights =
                path.ends_with(".safetensors") || path.ends_with(".safetensors.index.json");
            !path.contains('/') && (is_weights || *path == "config.json")
        })
        .cloned()
        .collect();
    let has = |ending: &str| files.iter().any(|path| path.ends_with(ending));
    if has(".safetensors") && has("config.json") {
        return Ok(ChosenFiles::Folder(files));
    }
    Err(no_model(
        "it has no GGUF files; they are mostly in a repository of their own, whose name ends with -GGUF",
    ))
}

/// The quantisations of files, as a list for a sentence.
fn quants(models: &[&String]) -> String {
    let mut found: Vec<String> = models
        .iter()
        .map(|path| quant_of(path).unwrap_or_else(|| file_name(path).to_owned()))
        .collect();
    found.sort();
    found.dedup();
    let more = found.len().saturating_sub(SUGGESTED);
    found.truncate(SUGGESTED);
    match more {
        0 => found.join(", "),
        more => format!("{} and {more} more", found.join(", ")),
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    const USUAL: [&str; 9] = [
        "README.md",
        "imatrix.gguf",
        "M-BF16-00001-of-00002.gguf",
        "M-BF16-00002-of-00002.gguf",
        "M-Q4_K_M.gguf",
        "M-Q4_K_S.gguf",
        "M-UD-Q4_K_XL.gguf",
        "mmproj-F16.gguf",
        "mtp-M-Q8_0.gguf",
    ];

    fn check(pick: Pick, expected: &[&str]) {
        let found = choose("a/b", &paths(&USUAL), &pick).unwrap();
        assert_eq!(found.files(), paths(expected), "{pick:?}");
    }

    #[test]
    fn quantisation_names_one_file_and_all_its_parts() {
        let quant = |text: &str| Pick::Quant(text.to_owned());
        check(Pick::Default, &["M-Q4_K_M.gguf"]);
        check(quant("q4_k_s"), &["M-Q4_K_S.gguf"]);
        check(quant("UD-Q4_K_XL"), &["M-UD-Q4_K_XL.gguf"]);
        check(quant("Q4_K_XL"), &["M-UD-Q4_K_XL.gguf"]);
        let both = ["M-BF16-00001-of-00002.gguf", "M-BF16-00002-of-00002.gguf"];
        check(quant("bf16"), &both);
        check(Pick::File("m-bf16-00002-of-00002.gguf".to_owned()), &both);
        check(
            Pick::File("mtp-M-Q8_0.gguf".to_owned()),
            &["mtp-M-Q8_0.gguf"],
        );
    }

    #[test]
    fn missing_quantisations_and_files_are_answered_with_those_that_exist() {
        let all = paths(&USUAL);
        // A projector, a draft and a longer type do not count.
        for wanted in ["F16", "Q8_0", "Q4_K"] {
            let error = choose("a/b", &all, &Pick::Quant(wanted.to_owned())).unwrap_err();
            let HubError::QuantNotFound { available, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(available, "BF16, Q4_K_M, Q4_K_S, UD-Q4_K_XL");
        }
        let error = choose("a/b", &all, &Pick::File("M-Q4_KM.gguf".to_owned())).unwrap_err();
        assert!(matches!(error, HubError::FileNotFound { .. }), "{error}");
        assert!(
            error.to_string().contains("did you mean M-Q4_K_M.gguf"),
            "{error}"
        );
        let torn = paths(&["M-BF16-00001-of-00002.gguf"]);
        let error = choose("a/b", &torn, &Pick::Default).unwrap_err();
        assert!(matches!(error, HubError::MissingPart { .. }), "{error}");
        let error = choose("a/b", &paths(&["README.md"]), &Pick::Default).unwrap_err();
        assert!(matches!(error, HubError::NoModel { .. }), "{error}");
    }

    #[test]
    fn repository_of_a_draft_is_taken_as_a_folder() {
        let all = paths(&[
            "config.json",
            "model.safetensors",
            "README.md",
            "x/a.safetensors",
        ]);
        let found = choose("a/b", &all, &Pick::Default).unwrap();
        let files = paths(&["config.json", "model.safetensors"]);
        assert_eq!(found, ChosenFiles::Folder(files));
    }

    #[test]
    fn quantisations_are_read_from_names() {
        for (name, quant) in [
            ("M-Q4_K_M.gguf", Some("Q4_K_M")),
            ("x/M.q8_0.gguf", Some("Q8_0")),
            ("M-UD-IQ2_XXS-00001-of-00003.gguf", Some("UD-IQ2_XXS")),
            ("Qwen3-8B.gguf", None),
            ("model.gguf", None),
            (".gguf", None),
            ("x", None),
        ] {
            assert_eq!(quant_of(name).as_deref(), quant, "{name}");
        }
    }
}
