//! Names of models: `owner/repo`, `owner/repo:QUANT`, `hf://owner/repo/FILE.gguf`, addresses.

use std::fmt;

use crate::HubError;

/// Hosts of the hub, whose addresses mean the same as names.
const HUB_HOSTS: [&str; 3] = ["huggingface.co", "hf.co", "www.huggingface.co"];
/// The longest owner or repository name, as the hub has it.
const MAX_PART: usize = 96;

/// A model somewhere else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelName {
    /// A repository of the hub.
    Hub(HubName),
    /// The address of a GGUF file on another server.
    Url(String),
}

/// Files of a repository of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    /// The repository.
    pub repo: RepoId,
    /// A branch, a tag or a commit; `None` means `main`.
    pub revision: Option<String>,
    /// Which of its files.
    pub pick: Pick,
}

/// A repository as `owner/name`, with characters that are safe in a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepoId(String);

/// Which files of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pick {
    /// Q4_K_M, else Q8_0, else the first.
    Default,
    /// The file of a quantisation, such as `Q4_K_M`, in any case.
    Quant(String),
    /// A file, by its path in the repository or its last part.
    File(String),
}

impl RepoId {
    /// The repository `owner/name`; `None` if the hub allows no such name.
    pub fn parse(text: &str) -> Option<RepoId> {
        let (owner, name) = text.split_once('/')?;
        (is_part(owner) && is_part(name)).then(|| RepoId(text.to_owned()))
    }

    /// `owner/name`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its folder in the cache, `models--owner--name`.
    pub fn folder(&self) -> String {
        format!("models--{}", self.0.replace('/', "--"))
    }

    /// The repository of a folder in the cache.
    pub(crate) fn of_folder(folder: &str) -> Option<RepoId> {
        RepoId::parse(&folder.strip_prefix("models--")?.replacen("--", "/", 1))
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_part(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.len() <= MAX_PART
        && text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && !text.ends_with(['-', '.'])
        && text.chars().all(is_plain)
        && !text.contains("--")
        && !text.contains("..")
}

/// Whether a path of a repository stays inside the folder that it is joined to, and can be shown on
/// a terminal.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let is_safe = |part: &str| !matches!(part, "" | "." | "..");
    path.split('/').all(is_safe) && !path.contains(|c: char| c == '\\' || c.is_control())
}

impl HubName {
    /// The branch, tag or commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.repo.as_str())?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        match &self.pick {
            Pick::Default => Ok(()),
            Pick::Quant(text) | Pick::File(text) => write!(f, ":{text}"),
        }
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelName::Hub(name) => name.fmt(f),
            ModelName::Url(url) => f.write_str(url),
        }
    }
}

impl ModelName {
    /// Parses a word of a command line. `endpoint` is the hub's address, whose pages are names too.
    ///
    /// # Errors
    /// [`HubError::NotAName`] for anything else, such as a path or a sentence.
    pub fn parse(word: &str, endpoint: &str) -> Result<ModelName, HubError> {
        let wrong = || HubError::NotAName {
            word: word.to_owned(),
        };
        if word.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(wrong());
        }
        let at_endpoint = word
            .strip_prefix(endpoint)
            .and_then(|rest| rest.strip_prefix('/'));
        if let Some(page) = at_endpoint {
            return hub_page(page).map(ModelName::Hub).ok_or_else(wrong);
        }
        if let Some(address) = ["https://", "http://"]
            .iter()
            .find_map(|scheme| word.strip_prefix(scheme))
        {
            let (host, path) = address.split_once('/').ok_or_else(wrong)?;
            if HUB_HOSTS.contains(&host) {
                return hub_page(path).map(ModelName::Hub).ok_or_else(wrong);
            }
            let file = path.split(['?', '#']).next().unwrap_or(path);
            return if is_gguf(file) && !host.is_empty() {
                Ok(ModelName::Url(word.to_owned()))
            } else {
                Err(wrong())
            };
        }
        let at_host = HUB_HOSTS.iter().find_map(|host| {
            word.strip_prefix(host)
                .and_then(|rest| rest.strip_prefix('/'))
        });
        if let Some(page) = at_host {
            return hub_page(page).map(ModelName::Hub).ok_or_else(wrong);
        }
        let named = word.strip_prefix("hf://").or(word.strip_prefix("hf:"));
        let name = match named {
            Some(name) => hub_name(name.trim_matches('/')),
            // A bare path such as `models/a.gguf` is a file that does not exist.
            None => hub_name(word).filter(|name| {
                let path = name.repo.as_str().to_ascii_lowercase();
                let is_file = path.ends_with(".gguf") || path.ends_with(".safetensors");
                !is_file
                    && word
                        .split(':')
                        .next()
                        .is_some_and(|n| n.split('/').count() == 2)
            }),
        };
        name.map(ModelName::Hub).ok_or_else(wrong)
    }
}

/// `owner/repo[@revision][/path][:pick]`.
fn hub_name(text: &str) -> Option<HubName> {
    let (text, tag) = match text.split_once(':') {
        Some((text, tag)) => (text, Some(tag)),
        None => (text, None),
    };
    let mut parts = text.splitn(3, '/');
    let (owner, name, path) = (parts.next()?, parts.next()?, parts.next());
    let (name, revision) = match name.split_once('@') {
        Some((name, revision)) => (name, Some(revision)),
        None => (name, None),
    };
    let pick = match (tag, path) {
        (None, None) => Pick::Default,
        (Some(text), None) if is_gguf(text) => Pick::File(text.to_owned()),
        (Some(text), None) if !text.is_empty() && !text.contains('/') => {
            Pick::Quant(text.to_owned())
        }
        (None, Some(path)) if is_gguf(path) => Pick::File(path.to_owned()),
        _ => return None,
    };
    if matches!(&pick, Pick::File(path) if !is_safe_path(path)) {
        return None;
    }
    if revision.is_some_and(|revision| !is_safe_path(revision)) {
        return None;
    }
    Some(HubName {
        repo: RepoId::parse(&format!("{owner}/{name}"))?,
        revision: revision.map(str::to_owned),
        pick,
    })
}

/// The path of a page of the hub: of a repository, a folder or a file.
fn hub_page(path: &str) -> Option<HubName> {
    let path = path.split(['?', '#']).next().unwrap_or(path);
    let path = path.trim_end_matches('/');
    let mut parts = path.splitn(5, '/');
    let (owner, name) = (parts.next()?, parts.next()?);
    match parts.next() {
        None => hub_name(path),
        Some("blob" | "resolve") => {
            let revision = parts.next()?;
            let file = decode(parts.next()?)?;
            let mut found = hub_name(&format!("{owner}/{name}/{file}"))?;
            found.revision =
                (revision != "main" && is_safe_path(revision)).then(|| revision.to_owned());
            Some(found)
        }
        Some("tree") => {
            let mut found = hub_name(&format!("{owner}/{name}"))?;
            let revision = parts.next()?;
            found.revision = (revision != "main").then(|| revision.to_owned());
            Some(found)
        }
        Some(_) => None,
    }
}

fn decode(text: &str) -> Option<String> {
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
    decoded.ok().map(|text| text.into_owned())
}

/// Whether a name ends as a GGUF file.
pub(crate) fn is_gguf(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with(".gguf")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: &str = "http://127.0.0.1:9";

    fn shown(word: &str) -> Option<String> {
        let name = ModelName::parse(word, ENDPOINT).ok()?;
        Some(format!("{name}"))
    }

    #[test]
    fn names_and_hub_addresses_parse_to_the_same_name() {
        for (word, name) in [
            ("a/b-GGUF", "a/b-GGUF"),
            ("a/b:Q4_K_M", "a/b:Q4_K_M"),
            ("a/b@v1:q8_0", "a/b@v1:q8_0"),
            ("a/b:x/c.gguf", "a/b:x/c.gguf"),
            ("hf://a/b", "a/b"),
            ("hf:a/b:Q8_0", "a/b:Q8_0"),
            ("hf://a/b/x/c.gguf", "a/b:x/c.gguf"),
            ("hf.co/a/b:Q8_0", "a/b:Q8_0"),
            ("huggingface.co/a/b", "a/b"),
            ("https://huggingface.co/a/b", "a/b"),
            ("https://huggingface.co/a/b/tree/main", "a/b"),
            ("https://hf.co/a/b/blob/main/c%20d.gguf?x=1", "a/b:c d.gguf"),
            (
                "https://huggingface.co/a/b/resolve/v2/c.gguf",
                "a/b@v2:c.gguf",
            ),
            ("http://127.0.0.1:9/a/b/resolve/main/c.gguf", "a/b:c.gguf"),
            (
                "https://example.org/m.gguf?x",
                "https://example.org/m.gguf?x",
            ),
        ] {
            assert_eq!(shown(word).as_deref(), Some(name), "{word}");
        }
    }

    #[test]
    fn paths_sentences_and_other_addresses_are_no_names() {
        for word in [
            "model.gguf",
            "dir/model.gguf",
            "a/b/c",
            "a/b/c.gguf",
            "./a/b",
            "/a/b",
            "../b",
            "Why is it so?",
            "a/b:",
            "a/b:../c.gguf",
            "a/../c",
            "a/b--c",
            "hf://a/b/../c.gguf",
            "a/b@../../x",
            "https://example.org/page",
            "https://huggingface.co/a/b/discussions/1",
            "a",
            "",
        ] {
            assert_eq!(shown(word), None, "{word}");
        }
    }

    #[test]
    fn paths_that_leave_their_folder_or_control_the_terminal_are_refused() {
        for path in ["a.gguf", "x/y z/a.gguf", "..a/b"] {
            assert!(is_safe_path(path), "{path}");
        }
        for path in [
            "", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "a\\b", "a\0", "a\x1b[2J",
        ] {
            assert!(!is_safe_path(path), "{path:?}");
        }
    }

    #[test]
    fn folder_of_a_repository_reads_back() {
        let repo = RepoId::parse("some-one/Model_1.5-GGUF").unwrap();
        assert_eq!(repo.folder(), "models--some-one--Model_1.5-GGUF");
        assert_eq!(RepoId::of_folder(&repo.folder()), Some(repo));
        assert_eq!(RepoId::of_folder("datasets--a--b"), None);
    }
}
