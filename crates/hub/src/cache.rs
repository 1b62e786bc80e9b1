//! The cache on disk, in the layout of `huggingface_hub`.
//!
//! `models--owner--repo/blobs/HASH` holds contents, `snapshots/COMMIT/PATH` links to them,
//! `refs/REVISION` names the commit of a branch, and `.locks/models--owner--repo/HASH.lock` is held
//! while a blob is written.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::HubError;
use crate::choose::{ChosenFiles, choose};
use crate::digest::ContentId;
use crate::error::at;
use crate::name::is_safe_path;
use crate::partial::{temporary, write_whole};
use crate::{HubName, RepoId};

/// The deepest folder of a snapshot that is looked into.
const MAX_DEPTH: usize = 8;

/// The cache of one user.
#[derive(Debug, Clone)]
pub struct HubCache {
    pub(crate) root: PathBuf,
    /// The folder of files from other servers.
    pub(crate) downloads: PathBuf,
}

/// The files of a name that are in the cache.
#[derive(Debug)]
pub(crate) struct Cached {
    /// What is opened.
    pub(crate) path: PathBuf,
}

impl HubCache {
    /// The folder of the cache.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn repo(&self, repo: &RepoId) -> PathBuf {
        self.root.join(repo.folder())
    }

    pub(crate) fn blob(&self, repo: &RepoId, id: &ContentId) -> PathBuf {
        self.repo(repo).join("blobs").join(id.as_str())
    }

    pub(crate) fn lock(&self, repo: &RepoId, id: &ContentId) -> PathBuf {
        let folder = self.root.join(".locks").join(repo.folder());
        folder.join(format!("{}.lock", id.as_str()))
    }

    pub(crate) fn snapshot(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.repo(repo).join("snapshots").join(commit)
    }

    /// Links a path of a commit to its blob. `path` was checked by the caller.
    ///
    /// # Errors
    /// [`HubError::File`].
    pub(crate) fn link(
        &self,
        repo: &RepoId,
        commit: &str,
        path: &str,
        id: &ContentId,
    ) -> Result<PathBuf, HubError> {
        let link = self.snapshot(repo, commit).join(path);
        let folder = link.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(at(folder))?;
        let up = "../".repeat(2 + path.matches('/').count());
        let to = PathBuf::from(format!("{up}blobs/{}", id.as_str()));
        if fs::read_link(&link).is_ok_and(|found| found == to) {
            return Ok(link);
        }
        // Renamed into place, so that no other program sees the path without a file.
        let new = temporary(&link);
        std::os::unix::fs::symlink(&to, &new).map_err(at(&new))?;
        fs::rename(&new, &link).map_err(at(&link))?;
        Ok(link)
    }

    /// Notes the commit of a branch or tag.
    ///
    /// # Errors
    /// [`HubError::File`].
    pub(crate) fn set_ref(
        &self,
        repo: &RepoId,
        revision: &str,
        commit: &str,
    ) -> Result<(), HubError> {
        let path = self.repo(repo).join("refs").join(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|found| found == commit) {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(at(folder))?;
        write_whole(&path, commit.as_bytes())
    }

    /// The files of a name, from the newest commit that has all of them; no request is sent.
    pub(crate) fn find(&self, name: &HubName) -> Option<Cached> {
        self.snapshots(&name.repo, name.revision.as_deref())
            .into_iter()
            .find_map(|snapshot| {
                let paths = paths(&snapshot);
                match choose(name.repo.as_str(), &paths, &name.pick).ok()? {
                    ChosenFiles::Files(files) => {
                        let path = snapshot.join(files.first()?);
                        Some(Cached { path })
                    }
                    ChosenFiles::Folder(_) => Some(Cached { path: snapshot }),
                }
            })
    }

    /// The snapshots of a revision, or without one of `main` and then all others, newest first.
    pub(crate) fn snapshots(&self, repo: &RepoId, revision: Option<&str>) -> Vec<PathBuf> {
        let folder = self.repo(repo);
        let commit = |revision: &str| {
            let named = fs::read_to_string(folder.join("refs").join(revision)).ok();
            named.map(|commit| commit.trim().to_owned())
        };
        let is_commit = |text: &String| text.len() == 40 && ContentId::parse(text).is_some();
        if let Some(revision) = revision {
            let commit = commit(revision)
                .or(Some(revision.to_owned()))
                .filter(is_commit);
            let snapshot = commit.map(|commit| self.snapshot(repo, &commit));
            return snapshot.filter(|path| path.is_dir()).into_iter().collect();
        }
        let main = commit("main").filter(is_commit);
        let main = main.map(|commit| self.snapshot(repo, &commit));
        let mut all: Vec<(bool, SystemTime, PathBuf)> = entries(&folder.join("snapshots"))
            .into_iter()
            .filter_map(|path| {
                let modified = fs::metadata(&path).ok()?.modified().ok()?;
                Some((Some(&path) == main.as_ref(), modified, path))
            })
            .collect();
        all.sort_by(|a, b| (b.0, b.1, &b.2).cmp(&(a.0, a.1, &a.2)));
        all.into_iter().map(|(_, _, path)| path).collect()
    }
}

/// The files of a snapshot whose contents are there, as sorted paths with `/`.
pub(crate) fn paths(snapshot: &Path) -> Vec<String> {
    let mut found = Vec::new();
    collect(snapshot, "", MAX_DEPTH, &mut found);
    found.sort();
    found
}

fn collect(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) {
    for path in entries(folder) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let name = format!("{prefix}{name}");
        // A link whose blob was deleted has no metadata.
        match fs::metadata(&path) {
            Ok(meta) if meta.is_file() && is_safe_path(&name) => found.push(name),
            Ok(meta) if meta.is_dir() && depth > 0 => {
                collect(&path, &format!("{name}/"), depth - 1, found);
            }
            _ => {}
        }
    }
}

/// The entries of a folder; none if it cannot be read.
pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}
