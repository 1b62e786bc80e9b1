//! What a word in place of a model file is, and how to get the file.
//!
//! Files are opened. A name is looked up in the cache before; a name that is not there, another web
//! address or a folder is answered with the way to a file.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use hub::ModelName;
use strsim::levenshtein;

use crate::config;

/// What may stand in place of a file that is not there, with none like it beside it.
const ELSE_NAME: &str =
    "; name a GGUF file that is there, or a model to pull, such as OWNER/REPO:QUANT";

/// A word that is not a model file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ModelPathError {
    /// The address of something else than a model.
    #[error(
        "{url} is a web address, but neither of a GGUF file nor of a Hugging Face repository; name one of those, \
         or download it with `curl -LO {url}` and name the file"
    )]
    WebAddress {
        /// The address as given.
        url: String,
    },
    /// The name of a model that is not in the cache.
    #[error(
        "{name}: no such file, and no such model in the cache; download it with `hearth pull {name}`"
    )]
    NotPulled {
        /// The name as given.
        name: String,
    },
    /// Safetensors, where a GGUF file is needed.
    #[error(
        "{path} {what}, not a plain file of GGUF, which models are opened from; download a GGUF file of this \
         model, or write one with llama.cpp: convert_hf_to_gguf.py {folder}",
        path = path.display(), folder = folder.display()
    )]
    Safetensors {
        /// The path as given.
        path: PathBuf,
        /// What it is.
        what: &'static str,
        /// The folder to convert.
        folder: PathBuf,
    },
    /// A folder without safetensors.
    #[error("{path} is a folder, not a plain file; {hint}", path = path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The files in it to name.
        hint: String,
    },
    /// A file that does not exist.
    #[error("{path}: {source}{hint}", path = path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
        /// The nearest file in the same folder, or what else to name.
        hint: String,
    },
}

/// Checks that a path may be a GGUF file. Its content and permissions are not checked.
///
/// # Errors
/// [`ModelPathError`] for anything else.
pub(crate) fn check_model(path: &Path) -> Result<(), ModelPathError> {
    let in_a_file = path.extension().is_some_and(|end| end == "safetensors");
    if path.is_dir() {
        return Err(folder(path));
    }
    check_exists(path)?;
    if in_a_file {
        return Err(ModelPathError::Safetensors {
            path: path.to_owned(),
            what: "is a safetensors file",
            folder: parent(path).to_owned(),
        });
    }
    Ok(())
}

/// Checks that a path may be a draft model: a GGUF file, a safetensors file or a folder.
///
/// # Errors
/// [`ModelPathError`] for anything else.
pub(crate) fn check_draft(path: &Path) -> Result<(), ModelPathError> {
    check_exists(path)
}

fn check_exists(path: &Path) -> Result<(), ModelPathError> {
    let source = match fs::metadata(path) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if let Some(word) = path.to_str() {
        if name_of(word).is_some() {
            return Err(ModelPathError::NotPulled {
                name: word.to_owned(),
            });
        }
        if is_address(word) {
            return Err(ModelPathError::WebAddress {
                url: word.to_owned(),
            });
        }
    }
    if source.kind() != ErrorKind::NotFound {
        // Opening the file reports it.
        return Ok(());
    }
    Err(ModelPathError::Missing {
        path: path.to_owned(),
        source,
        hint: nearest(path).map_or(ELSE_NAME.to_owned(), |near| {
            format!("; did you mean {near}?")
        }),
    })
}

/// Whether a single word is a model somewhere else, rather than a prompt.
pub(crate) fn is_remote(word: &str) -> bool {
    match name_of(word) {
        Some(ModelName::Url(_)) => true,
        // `and/or` is a prompt; models have their sizes in their names.
        Some(ModelName::Hub(_)) => {
            word.contains(|c: char| c.is_ascii_digit()) || is_gguf_name(word)
        }
        None => is_address(word),
    }
}

/// The name of a model that a word is, if it cannot be a path: no file is there, and what stands
/// before its slash is no folder.
pub(crate) fn name_of(word: &str) -> Option<ModelName> {
    let folder = word.split('/').next().map(Path::new);
    if Path::new(word).exists() || folder.is_some_and(Path::is_dir) {
        return None;
    }
    config::hub::name(word)
}

fn is_address(word: &str) -> bool {
    let is_web = word.starts_with("https://") || word.starts_with("http://");
    is_web && !word.contains(char::is_whitespace)
}

fn is_gguf_name(word: &str) -> bool {
    word.to_ascii_lowercase().contains("gguf")
}

/// The error for a folder in place of a model.
fn folder(path: &Path) -> ModelPathError {
    let names = names(path);
    if names.iter().any(|name| name.ends_with(".safetensors")) {
        return ModelPathError::Safetensors {
            path: path.to_owned(),
            what: "is a folder of safetensors",
            folder: path.to_owned(),
        };
    }
    let files: Vec<String> = names
        .into_iter()
        .filter(|name| is_gguf_name(name))
        .take(5)
        .map(|name| path.join(name).display().to_string())
        .collect();
    let hint = match files.as_slice() {
        [] => "it holds no GGUF file".to_owned(),
        [one] => format!("name the file {one}"),
        several => format!("name one of its files: {}", several.join(", ")),
    };
    ModelPathError::Folder {
        path: path.to_owned(),
        hint,
    }
}

/// The GGUF file of the same folder whose name is nearest, if one is near.
fn nearest(path: &Path) -> Option<String> {
    let folder = parent(path);
    let wanted = path.file_name()?.to_str()?.to_lowercase();
    let distance = |name: &String| levenshtein(&wanted, &name.to_lowercase());
    let names = names(folder);
    let near = names
        .iter()
        .filter(|name| is_gguf_name(name) && distance(name) * 3 <= wanted.chars().count())
        .min_by_key(|name| distance(name))?;
    let near = if path.parent() == Some(Path::new("")) {
        PathBuf::from(near)
    } else {
        folder.join(near)
    };
    Some(near.display().to_string())
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// The names in a folder, sorted; none if it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(word: &str, parts: &[&str]) {
        let error = check_model(Path::new(word)).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{word}: {part} in {error}");
        }
    }

    #[test]
    fn names_that_are_not_in_the_cache_are_answered_with_the_command() {
        for word in [
            "unsloth/Qwen3.5-27B-GGUF",
            "no-one/Qwen3-0.6B:Q8_0",
            "hf:no-one/Qwen3-0.6B",
            "hf.co/no-one/Qwen3-0.6B",
            "https://huggingface.co/a/b/blob/main/c.gguf?download=true",
            "https://huggingface.co/a/b-GGUF/tree/main",
            "http://example.org/m.gguf",
        ] {
            check(word, &[&format!("`hearth pull {word}`")]);
            assert!(is_remote(word), "{word}");
        }
        let draft = check_draft(Path::new("z-lab/Qwen3.5-9B-DFlash")).unwrap_err();
        assert!(matches!(draft, ModelPathError::NotPulled { .. }), "{draft}");
        for prompt in ["and/or", "What is 1/2?", "a/b/c", "Hello", "/etc/x1"] {
            assert!(!is_remote(prompt), "{prompt}");
        }
    }

    #[test]
    fn other_web_addresses_are_answered_with_what_can_be_named() {
        check(
            "https://example.org/page",
            &[
                "neither of a GGUF file",
                "curl -LO https://example.org/page",
            ],
        );
        assert!(is_remote("https://example.org/page"));
    }

    #[test]
    fn folders_are_named_with_the_file_to_use() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        check(&at(""), &["is a folder", "no GGUF file"]);
        fs::write(at("a.gguf"), "").unwrap();
        check(&at(""), &["is a folder", "a.gguf"]);
        fs::write(at("model.safetensors"), "").unwrap();
        check(
            &at(""),
            &["is a folder of safetensors", "convert_hf_to_gguf.py"],
        );
        check(
            &at("model.safetensors"),
            &["is a safetensors file", "GGUF", "convert_hf_to_gguf.py"],
        );
        // A draft may be safetensors.
        check_draft(Path::new(&at("model.safetensors"))).unwrap();
        check_draft(dir.path()).unwrap();
    }

    #[test]
    fn missing_files_are_named_with_the_nearest_file() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        fs::write(at("Qwen3-8B-Q4_K_M.gguf"), "").unwrap();
        check(
            &at("Qwen3-8B-Q4_KM.gguf"),
            &["No such file", "did you mean", "Qwen3-8B-Q4_K_M.gguf?"],
        );
        let far = check_model(Path::new(&at("llama.gguf"))).unwrap_err();
        assert!(!far.to_string().contains("did you mean"), "{far}");
        assert!(far.to_string().contains("OWNER/REPO:QUANT"), "{far}");
        check_model(Path::new(&at("Qwen3-8B-Q4_K_M.gguf"))).unwrap();
    }
}
