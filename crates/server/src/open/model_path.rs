//! What a word in place of a model file is, and how to get the file.
//!
//! Only files are opened. A web address, the name of a repository or a folder is answered with the
//! way to a file.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use strsim::levenshtein;

/// A word that is not a model file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ModelPathError {
    /// The address of a file or page.
    #[error(
        "{url} is a web address, and models are opened from files; download one: {command}; then name that file"
    )]
    WebAddress {
        /// The address as given.
        url: String,
        /// The command that downloads the file.
        command: String,
    },
    /// The name of a repository.
    #[error(
        "{name}: no such file; it looks like a Hugging Face repository, and models are opened from files; \
         download one: {command}; then name that file"
    )]
    Repository {
        /// The name as given.
        name: String,
        /// The command that downloads the files.
        command: String,
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
        /// The nearest file in the same folder, or nothing.
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
    check_exists(path, Kind::Model)?;
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
    check_exists(path, Kind::Draft)
}

/// What a file is for.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// A GGUF file.
    Model,
    /// A GGUF file or a folder of safetensors.
    Draft,
}

fn check_exists(path: &Path, kind: Kind) -> Result<(), ModelPathError> {
    let source = match fs::metadata(path) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if let Some(remote) = path.to_str().and_then(|word| remote(word, kind)) {
        return Err(remote);
    }
    if source.kind() != ErrorKind::NotFound {
        // Opening the file reports it.
        return Ok(());
    }
    Err(ModelPathError::Missing {
        path: path.to_owned(),
        source,
        hint: nearest(path).map_or(String::new(), |near| format!("; did you mean {near}?")),
    })
}

/// Whether a single word is a model somewhere else, rather than a prompt.
pub(crate) fn is_remote(word: &str) -> bool {
    match remote(word, Kind::Model) {
        Some(ModelPathError::WebAddress { .. }) => true,
        // `and/or` is a prompt; models have their sizes in their names.
        Some(_) => word.contains(|c: char| c.is_ascii_digit()) || is_gguf_name(word),
        None => false,
    }
}

/// Web addresses and repository names.
fn remote(word: &str, kind: Kind) -> Option<ModelPathError> {
    if word.contains(char::is_whitespace) {
        return None;
    }
    let address = word
        .strip_prefix("https://")
        .or_else(|| word.strip_prefix("http://"));
    let at_hub = |rest: &'_ str| {
        ["huggingface.co/", "hf.co/"]
            .iter()
            .find_map(|host| rest.strip_prefix(host))
            .map(str::to_owned)
    };
    let hub_path = at_hub(address.unwrap_or(word));
    if let Some(address) = address {
        let command = match hub_path.as_deref().map(|path| path.split_once("/blob/")) {
            // The page of a file, whose content is at another address.
            Some(Some((repository, file))) => {
                format!(
                    "`curl -LO https://huggingface.co/{repository}/resolve/{}`",
                    file.split('?').next().unwrap_or(file)
                )
            }
            Some(None) if !address.contains("/resolve/") => hub_command(hub_path.as_deref()?, kind),
            _ => format!("`curl -LO {word}`"),
        };
        return Some(ModelPathError::WebAddress {
            url: word.to_owned(),
            command,
        });
    }
    let name = hub_path.unwrap_or_else(|| {
        let bare = word
            .strip_prefix("hf:")
            .map(|name| name.trim_start_matches('/'));
        bare.unwrap_or(word).to_owned()
    });
    is_repository(&name).then(|| ModelPathError::Repository {
        command: hub_command(&name, kind),
        name: word.to_owned(),
    })
}

/// The command that downloads the files of a repository, given as `owner/name` with an optional
/// `:type`.
fn hub_command(name: &str, kind: Kind) -> String {
    let name = name.trim_end_matches('/');
    let (name, wanted) = name.split_once(':').unwrap_or((name, "Q4_K_M"));
    let repository: Vec<&str> = name.split('/').take(2).collect();
    let repository = repository.join("/");
    let files = match kind {
        Kind::Model => format!("--include '*{wanted}*.gguf' --local-dir ."),
        Kind::Draft => "--local-dir draft".to_owned(),
    };
    let elsewhere = match kind {
        Kind::Model if !is_gguf_name(&repository) => {
            "; GGUF files are mostly in a repository of their own, whose name ends with -GGUF"
        }
        _ => "",
    };
    format!("`hf download {repository} {files}` (`pip install huggingface_hub` has it{elsewhere})")
}

/// Whether a word has the form `owner/name` or `owner/name:type`, and names no file.
fn is_repository(word: &str) -> bool {
    let (name, _) = word.split_once(':').unwrap_or((word, ""));
    let mut parts = name.split('/');
    let (Some(owner), Some(model), None) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let is_word = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let has_ending = Path::new(model).extension().is_some_and(|end| {
        end.eq_ignore_ascii_case("gguf") || end.eq_ignore_ascii_case("safetensors")
    });
    is_word(owner) && is_word(model) && !has_ending && !Path::new(owner).is_dir()
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
    fn repository_names_are_answered_with_a_download_command() {
        let usual = ["Hugging Face repository", "hf download"];
        for word in [
            "unsloth/Qwen3.5-27B-GGUF",
            "Qwen/Qwen3-0.6B",
            "hf:Qwen/Qwen3-0.6B",
            "hf.co/Qwen/Qwen3-0.6B",
            "huggingface.co/Qwen/Qwen3-0.6B",
        ] {
            check(word, &usual);
            assert!(is_remote(word), "{word}");
        }
        check("Qwen/Qwen3-0.6B", &["ends with -GGUF"]);
        let draft = check_draft(Path::new("z-lab/Qwen3.5-9B-DFlash")).unwrap_err();
        let draft = draft.to_string();
        assert!(draft.contains("DFlash --local-dir draft`"), "{draft}");
        check(
            "unsloth/Qwen3-8B-GGUF:Q8_0",
            &["hf download unsloth/Qwen3-8B-GGUF --include '*Q8_0*.gguf'"],
        );
        for prompt in ["and/or", "What is 1/2?", "a/b/c", "Hello", "/etc/x1"] {
            assert!(!is_remote(prompt), "{prompt}");
        }
    }

    #[test]
    fn web_addresses_are_answered_with_the_address_of_the_content() {
        check(
            "https://huggingface.co/a/b/blob/main/c.gguf?download=true",
            &["curl -LO https://huggingface.co/a/b/resolve/main/c.gguf`;"],
        );
        check(
            "https://huggingface.co/a/b/resolve/main/c.gguf",
            &["curl -LO https://huggingface.co/a/b/resolve/main/c.gguf`;"],
        );
        check(
            "https://huggingface.co/a/b-GGUF",
            &["is a web address", "hf download a/b-GGUF --include"],
        );
        check(
            "https://huggingface.co/a/b-GGUF/tree/main",
            &["hf download a/b-GGUF --include"],
        );
        check(
            "http://example.org/m.gguf",
            &["curl -LO http://example.org/m.gguf"],
        );
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
        check_model(Path::new(&at("Qwen3-8B-Q4_K_M.gguf"))).unwrap();
    }
}
