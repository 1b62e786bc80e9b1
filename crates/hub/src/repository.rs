//! The hub's description of a repository: its commit, its files and their hashes.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use strsim::levenshtein;
use ureq::http::HeaderMap;

use crate::client::{Client, plain};
use crate::digest::ContentId;
use crate::name::is_safe_path;
use crate::{HubError, HubName, OnEvent, RepoId};

/// Characters of a part of an address that stand for themselves.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');
/// The most pages of a list of files.
const MAX_PAGES: usize = 200;
/// The most names of a suggestion.
const SUGGESTED: usize = 3;

/// A commit of a repository.
#[derive(Debug)]
pub(crate) struct Listing {
    /// Forty hexadecimal digits.
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
}

/// A file of a commit.
#[derive(Debug, Clone)]
pub(crate) struct RemoteFile {
    /// Its path in the repository.
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) id: ContentId,
}

/// Asks the hub for the files of a name's revision.
///
/// # Errors
/// [`HubError::RepoNotFound`], [`HubError::RevisionNotFound`], [`HubError::Gated`], or those of
/// the request.
pub(crate) fn list(
    client: &Client,
    name: &HubName,
    report: OnEvent<'_>,
) -> Result<Listing, HubError> {
    let base = format!("{}/api/models/{}", client.endpoint, name.repo);
    let url = format!("{base}/revision/{}", encoded(name.revision()));
    let (info, _) = client
        .json(&url, report)
        .map_err(|error| explain(client, name, error))?;
    let commit = info.get("sha").and_then(Value::as_str).unwrap_or_default();
    if commit.len() != 40 || ContentId::parse(commit).is_none() {
        return Err(HubError::Protocol {
            url: plain(&url),
            detail: "it names no commit".to_owned(),
        });
    }
    let mut files = Vec::new();
    let mut next = Some(format!("{base}/tree/{commit}?recursive=true"));
    for _ in 0..MAX_PAGES {
        let Some(url) = next.take() else { break };
        let (page, headers) = client
            .json(&url, report)
            .map_err(|error| explain(client, name, error))?;
        let entries = page.as_array().ok_or_else(|| HubError::Protocol {
            url: plain(&url),
            detail: "it is no list of files".to_owned(),
        })?;
        files.extend(entries.iter().filter_map(remote_file));
        next = next_page(&headers);
    }
    Ok(Listing {
        commit: commit.to_owned(),
        files,
    })
}

/// The address of a file of a commit.
pub(crate) fn file_url(client: &Client, repo: &RepoId, commit: &str, path: &str) -> String {
    let path: Vec<String> = path.split('/').map(encoded).collect();
    format!(
        "{}/{repo}/resolve/{commit}/{}",
        client.endpoint,
        path.join("/")
    )
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

/// A file of a page; entries of other kinds, and paths that leave the folder, are dropped.
fn remote_file(entry: &Value) -> Option<RemoteFile> {
    let text = |value: &Value, key: &str| value.get(key)?.as_str().map(str::to_owned);
    let path = text(entry, "path").filter(|path| is_safe_path(path))?;
    if text(entry, "type")? != "file" {
        return None;
    }
    let (id, size) = match entry.get("lfs") {
        Some(lfs) if lfs.is_object() => (
            text(lfs, "oid").or_else(|| text(lfs, "sha256"))?,
            lfs.get("size"),
        ),
        _ => (text(entry, "oid")?, None),
    };
    Some(RemoteFile {
        path,
        size: size.or(entry.get("size"))?.as_u64()?,
        id: ContentId::parse(&id)?,
    })
}

/// The address of the next page, in the header `Link`.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get("link")?.to_str().ok()?;
    let next = links
        .split(',')
        .find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    Some(rest.split_once('>')?.0.to_owned())
}

/// Makes an error of a request about a repository exact.
pub(crate) fn explain(client: &Client, name: &HubName, error: HubError) -> HubError {
    let repo = name.repo.to_string();
    let no_repo = || HubError::RepoNotFound {
        repo: repo.clone(),
        endpoint: client.endpoint.clone(),
        hint: repo_hint(client, &name.repo),
    };
    match error {
        HubError::Refused { code, .. } if code == "GatedRepo" => HubError::Gated {
            repo: repo.clone(),
            endpoint: client.endpoint.clone(),
            detail: if client.has_token() {
                "; the token that was sent has no access yet"
            } else {
                "; no token was sent"
            },
        },
        HubError::NotFound { code, .. } if code == "RevisionNotFound" => {
            HubError::RevisionNotFound {
                repo,
                revision: name.revision().to_owned(),
                hint: revision_hint(client, &name.repo),
            }
        }
        // Without a token the hub hides which repositories exist.
        HubError::Refused {
            status: 401, code, ..
        } if code == "RepoNotFound" || !client.has_token() => no_repo(),
        HubError::NotFound { code, .. } if code != "EntryNotFound" => no_repo(),
        other => other,
    }
}

/// Similar repositories with GGUF files, and how a private one is read.
fn repo_hint(client: &Client, repo: &RepoId) -> String {
    let name = repo.as_str().split('/').nth(1).unwrap_or_default();
    let url = format!(
        "{}/api/models?search={}&filter=gguf&limit=20",
        client.endpoint,
        encoded(name.trim_end_matches("-GGUF"))
    );
    let found = single(client, &url);
    let ids = found.iter().flat_map(|value| value.as_array()).flatten();
    let mut ids: Vec<&str> = ids
        .filter_map(|model| model.get("id")?.as_str())
        .filter(|id| RepoId::parse(id).is_some())
        .collect();
    ids.sort_by_key(|id| levenshtein(id, repo.as_str()));
    let token = if client.has_token() {
        "; the token may not read it"
    } else {
        "; a private one needs HF_TOKEN"
    };
    match ids.as_slice() {
        [] => token.to_owned(),
        ids => format!("{token}; did you mean {}?", one_of(ids)),
    }
}

/// The branches and tags of a repository.
fn revision_hint(client: &Client, repo: &RepoId) -> String {
    let url = format!("{}/api/models/{repo}/refs", client.endpoint);
    let found = single(client, &url).unwrap_or_default();
    let names = ["branches", "tags"].iter().flat_map(|kind| {
        let list = found.get(kind).and_then(Value::as_array);
        list.into_iter()
            .flatten()
            .filter_map(|one| one.get("name")?.as_str())
    });
    let names: Vec<&str> = names.filter(|name| is_safe_path(name)).collect();
    match names.as_slice() {
        [] => String::new(),
        names => format!("; it has {}", one_of(names)),
    }
}

/// The answer of one attempt, for a hint only.
fn single(client: &Client, url: &str) -> Option<Value> {
    let answer = client.open(url, None).ok()?;
    serde_json::from_reader(answer.reader()).ok()
}

fn one_of(names: &[&str]) -> String {
    let shown: Vec<&str> = names.iter().take(SUGGESTED).copied().collect();
    shown.join(" or ")
}
