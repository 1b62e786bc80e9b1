//! What the cache holds, and how it is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::cache::{HubCache, entries, paths};
use crate::choose::{ChosenFiles, choose, part_names};
use crate::error::at;
use crate::name::is_gguf;
use crate::{HubError, HubName, ModelName, Pick, RepoId, quant_of};

/// A model in the cache.
#[derive(Debug, Clone)]
pub struct CachedModel {
    /// The name that opens it.
    pub name: String,
    /// Its quantisation by its file name.
    pub quant: Option<String>,
    /// Bytes on disk, of all parts.
    pub size_bytes: u64,
    /// When its file was last read or written, as far as the file system notes it.
    pub used: Option<SystemTime>,
    /// The file, or the folder of safetensors.
    pub path: PathBuf,
}

/// What a removal deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// Files.
    pub files: usize,
    /// Bytes that are free again.
    pub bytes: u64,
}

impl HubCache {
    /// All models: GGUF files, and repositories of safetensors that have none. Sorted by name.
    pub fn list(&self) -> Vec<CachedModel> {
        let mut found = BTreeMap::new();
        for folder in entries(&self.root) {
            let name = folder.file_name().and_then(|name| name.to_str());
            let Some(repo) = name.and_then(RepoId::of_folder) else {
                continue;
            };
            for snapshot in self.snapshots(&repo, None) {
                for model in models(&repo, &snapshot) {
                    // The first is of the newest commit.
                    found.entry(model.name.clone()).or_insert(model);
                }
            }
        }
        for path in downloaded(&self.downloads) {
            let name = path.display().to_string();
            found.insert(name.clone(), described(name, vec![path]));
        }
        found.into_values().collect()
    }

    /// Removes the files of a name; without a quantisation or file, the whole repository with its
    /// incomplete files. Contents that another commit has too stay.
    ///
    /// # Errors
    /// [`HubError::NotCached`], or [`HubError::File`].
    pub fn remove(&self, name: &ModelName) -> Result<Removed, HubError> {
        let not_cached = || HubError::NotCached {
            name: name.to_string(),
            cache: self.root.clone(),
        };
        let removed = match name {
            ModelName::Hub(hub) if hub.pick == Pick::Default && hub.revision.is_none() => {
                let folder = self.repo(&hub.repo);
                let removed = measure(&folder);
                if folder.exists() {
                    fs::remove_dir_all(&folder).map_err(at(&folder))?;
                }
                removed
            }
            ModelName::Hub(hub) => self.remove_files(hub)?,
            ModelName::Url(url) => {
                let mut removed = Removed::default();
                for path in self.url_files(url) {
                    if let Ok(meta) = fs::metadata(&path) {
                        fs::remove_file(&path).map_err(at(&path))?;
                        removed.files += 1;
                        removed.bytes += meta.len();
                    }
                }
                removed
            }
        };
        if removed.files == 0 {
            return Err(not_cached());
        }
        Ok(removed)
    }

    fn remove_files(&self, name: &HubName) -> Result<Removed, HubError> {
        let mut blobs = BTreeSet::new();
        for snapshot in self.snapshots(&name.repo, name.revision.as_deref()) {
            let Ok(choice) = choose(name.repo.as_str(), &paths(&snapshot), &name.pick) else {
                continue;
            };
            for file in choice.files() {
                let link = snapshot.join(file);
                blobs.extend(fs::canonicalize(&link));
                fs::remove_file(&link).map_err(at(&link))?;
            }
        }
        for snapshot in self.snapshots(&name.repo, None) {
            for path in paths(&snapshot) {
                if let Ok(blob) = fs::canonicalize(snapshot.join(path)) {
                    blobs.remove(&blob);
                }
            }
        }
        let mut removed = Removed::default();
        for blob in blobs {
            if let Ok(meta) = fs::metadata(&blob) {
                fs::remove_file(&blob).map_err(at(&blob))?;
                removed.files += 1;
                removed.bytes += meta.len();
            }
        }
        Ok(removed)
    }
}

/// The models of a snapshot.
fn models(repo: &RepoId, snapshot: &Path) -> Vec<CachedModel> {
    let all = paths(snapshot);
    let firsts = all
        .iter()
        .filter(|path| is_gguf(path) && part_names(path).first() == Some(*path));
    let mut found: Vec<CachedModel> = firsts
        .filter(|path| part_names(path).iter().all(|part| all.contains(part)))
        .map(|path| {
            // The shortest name that means this file.
            let quant = quant_of(path).filter(|quant| {
                let pick = Pick::Quant(quant.clone());
                let chosen = choose(repo.as_str(), &all, &pick);
                chosen.is_ok_and(|choice| choice.files().first() == Some(path))
            });
            let name = format!("{repo}:{}", quant.as_deref().unwrap_or(path));
            let files = part_names(path)
                .iter()
                .map(|part| snapshot.join(part))
                .collect();
            let mut model = described(name, files);
            model.quant = quant_of(path);
            model
        })
        .collect();
    if found.is_empty()
        && let Ok(ChosenFiles::Folder(files)) = choose(repo.as_str(), &all, &Pick::Default)
    {
        let files = files.iter().map(|file| snapshot.join(file)).collect();
        let mut model = described(repo.to_string(), files);
        model.path = snapshot.to_owned();
        found.push(model);
    }
    found
}

fn described(name: String, files: Vec<PathBuf>) -> CachedModel {
    let metas: Vec<fs::Metadata> = files.iter().filter_map(|f| fs::metadata(f).ok()).collect();
    let used = metas.iter().filter_map(|meta| {
        let read = meta.accessed().ok();
        read.max(meta.modified().ok())
    });
    CachedModel {
        quant: quant_of(&name),
        name,
        size_bytes: metas.iter().map(fs::Metadata::len).sum(),
        used: used.max(),
        path: files.into_iter().next().unwrap_or_default(),
    }
}

/// GGUF files from other servers.
fn downloaded(folder: &Path) -> Vec<PathBuf> {
    let hosts = entries(folder);
    let files = hosts
        .iter()
        .flat_map(|host| entries(host))
        .flat_map(|file| entries(&file));
    files
        .filter(|path| path.to_str().is_some_and(is_gguf))
        .collect()
}

/// Files and bytes of a folder's blobs.
fn measure(folder: &Path) -> Removed {
    let mut removed = Removed::default();
    for path in entries(&folder.join("blobs")) {
        if let Ok(meta) = fs::metadata(&path) {
            removed.files += 1;
            removed.bytes += meta.len();
        }
    }
    removed
}
