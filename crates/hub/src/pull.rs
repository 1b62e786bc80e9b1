//! From a name to a file: in the cache, or downloaded into it.

use std::path::PathBuf;

use ring::digest::{SHA256, digest};

use crate::cache::HubCache;
use crate::choose::{ChosenFiles, choose, drafts, part_names};
use crate::client::{Client, origin};
use crate::digest::{ContentId, hex};
use crate::download::{self, Target, check_space, content_range, is_there};
use crate::name::is_safe_path;
use crate::partial::Partial;
use crate::repository::{self, RemoteFile, explain, file_url};
use crate::{HubError, HubName, HubSettings, ModelName, OnEvent};

/// What a pull brought.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// The file to open, or the folder of safetensors.
    pub path: PathBuf,
    /// Bytes of all its files.
    pub size_bytes: u64,
    /// Bytes that came over the network; 0 if all was there.
    pub downloaded_bytes: u64,
    /// Draft files of the same repository, as names to pull.
    pub drafts: Vec<String>,
}

/// A hub and a cache.
pub struct Hub {
    pub(crate) client: Client,
    cache: HubCache,
    is_offline: bool,
}

impl Hub {
    /// The hub of these settings. No request is sent yet.
    pub fn new(settings: &HubSettings) -> Hub {
        Hub {
            client: Client::new(settings),
            cache: HubCache {
                root: settings.cache.clone(),
                downloads: settings.downloads.clone(),
            },
            is_offline: settings.offline,
        }
    }

    /// The cache.
    pub fn cache(&self) -> &HubCache {
        &self.cache
    }

    /// Whether no request may leave the machine.
    pub fn is_offline(&self) -> bool {
        self.is_offline
    }

    /// Parses a name; see [`ModelName::parse`].
    ///
    /// # Errors
    /// [`HubError::NotAName`].
    pub fn parse(&self, word: &str) -> Result<ModelName, HubError> {
        ModelName::parse(word, &self.client.endpoint)
    }

    /// The file or folder of a name, if all of it is in the cache; no request is sent.
    pub fn find(&self, name: &ModelName) -> Option<PathBuf> {
        match name {
            ModelName::Hub(name) => Some(self.cache.find(name)?.path),
            ModelName::Url(url) => {
                let files = self.cache.url_files(url);
                let all = files.iter().all(|file| file.is_file());
                files.into_iter().next().filter(|_| all)
            }
        }
    }

    /// Brings the newest version of a name into the cache.
    ///
    /// # Errors
    /// Any [`HubError`]. After a cut, the same call continues where it ended.
    pub fn pull(&self, name: &ModelName, report: OnEvent<'_>) -> Result<Pulled, HubError> {
        if self.is_offline {
            let path = self.find(name).ok_or_else(|| HubError::Offline {
                name: name.to_string(),
                cache: self.cache.root.clone(),
            })?;
            return Ok(Pulled {
                path,
                size_bytes: 0,
                downloaded_bytes: 0,
                drafts: Vec::new(),
            });
        }
        match name {
            ModelName::Hub(name) => self.pull_hub(name, report),
            ModelName::Url(url) => self.pull_url(url, report),
        }
    }

    fn pull_hub(&self, name: &HubName, report: OnEvent<'_>) -> Result<Pulled, HubError> {
        let (client, cache, repo) = (&self.client, &self.cache, &name.repo);
        let listing = repository::list(client, name, report)?;
        let all: Vec<String> = listing.files.iter().map(|file| file.path.clone()).collect();
        let choice = choose(repo.as_str(), &all, &name.pick)?;
        let files: Vec<&RemoteFile> = listing
            .files
            .iter()
            .filter(|file| choice.files().contains(&file.path))
            .collect();
        let targets: Vec<Target<'_>> = files
            .iter()
            .map(|file| Target {
                file: &file.path,
                url: file_url(client, repo, &listing.commit, &file.path),
                size: file.size,
                id: Some(&file.id),
                tag: file.id.as_str(),
                blob: cache.blob(repo, &file.id),
                lock: cache.lock(repo, &file.id),
            })
            .collect();
        let downloaded_bytes = self
            .download_all(&targets, report)
            .map_err(|error| explain(client, name, error))?;
        for file in &files {
            cache.link(repo, &listing.commit, &file.path, &file.id)?;
        }
        cache.set_ref(repo, name.revision(), &listing.commit)?;
        let snapshot = cache.snapshot(repo, &listing.commit);
        let path = match &choice {
            ChosenFiles::Files(files) => files.first().map(|file| snapshot.join(file)),
            ChosenFiles::Folder(_) => None,
        };
        let pulled = drafts(&all)
            .into_iter()
            .filter(|draft| !choice.files().contains(draft));
        Ok(Pulled {
            path: path.unwrap_or(snapshot),
            size_bytes: files.iter().map(|file| file.size).sum(),
            downloaded_bytes,
            drafts: pulled.map(|draft| format!("{repo}:{draft}")).collect(),
        })
    }

    fn pull_url(&self, url: &str, report: OnEvent<'_>) -> Result<Pulled, HubError> {
        let paths = self.cache.url_files(url);
        let urls = part_urls(url);
        let mut described = Vec::new();
        for url in &urls {
            described.push(
                self.client
                    .retrying(report, || describe(&self.client, url))?,
            );
        }
        let names: Vec<String> = urls.iter().map(|url| file_of(url)).collect();
        let mut targets = Vec::new();
        for (index, blob) in paths.iter().enumerate() {
            let (size, id, tag) = &described[index];
            targets.push(Target {
                file: &names[index],
                url: urls[index].clone(),
                size: *size,
                id: id.as_ref(),
                tag,
                blob: blob.clone(),
                lock: blob.with_extension("lock"),
            });
        }
        let downloaded_bytes = self.download_all(&targets, report)?;
        Ok(Pulled {
            path: paths.into_iter().next().unwrap_or_default(),
            size_bytes: targets.iter().map(|target| target.size).sum(),
            downloaded_bytes,
            drafts: Vec::new(),
        })
    }

    /// Downloads all files, after a look at the disk.
    fn download_all(&self, targets: &[Target<'_>], report: OnEvent<'_>) -> Result<u64, HubError> {
        let missing = targets.iter().filter(|target| !is_there(target));
        let needed = missing.map(|target| {
            let there = Partial::bytes_of(&target.blob, target.size, target.tag);
            target.size - there.min(target.size)
        });
        let needed: u64 = needed.sum();
        if needed > 0 {
            // All files of a name go to one folder, which may not exist yet.
            let blob = targets
                .first()
                .map_or(&self.cache.root, |target| &target.blob);
            let folder = blob.ancestors().skip(1).find(|folder| folder.is_dir());
            check_space(&self.client, folder.unwrap_or(&self.cache.root), needed)?;
        }
        let mut downloaded = 0;
        for target in targets {
            downloaded += download::download(&self.client, target, report)?;
        }
        Ok(downloaded)
    }
}

impl HubCache {
    /// Where the parts of a file from another server are: a folder for each address, so that two
    /// files of the same name do not meet.
    pub(crate) fn url_files(&self, url: &str) -> Vec<PathBuf> {
        let host = origin(url).unwrap_or_default();
        let host = host
            .split("://")
            .nth(1)
            .unwrap_or_default()
            .replace(':', "_");
        let first = part_urls(url).swap_remove(0);
        let short = hex(&digest(&SHA256, first.as_bytes()).as_ref()[..6]);
        let folder = self.downloads.join(host).join(short);
        part_urls(url)
            .iter()
            .map(|url| folder.join(file_of(url)))
            .collect()
    }
}

/// Size, hash if it is a mirror of the hub, and `ETag` of a file of another server.
pub(crate) fn describe(
    client: &Client,
    url: &str,
) -> Result<(u64, Option<ContentId>, String), HubError> {
    let answer = client.open(url, Some((0, 1)))?;
    let number = |name: &str| answer.header(name).and_then(|text| text.parse().ok());
    let size = match answer.status {
        206 => content_range(answer.header("content-range").unwrap_or_default())
            .and_then(|(_, total)| total),
        _ => number("content-length"),
    };
    let size = number("x-linked-size").or(size);
    let id = answer.header("x-linked-etag").and_then(ContentId::parse);
    let tag = answer.header("etag").unwrap_or_default().to_owned();
    match size {
        Some(size) => Ok((size, id, tag)),
        None => Err(HubError::Protocol {
            url: crate::client::plain(url),
            detail: "the size of the file is not given".to_owned(),
        }),
    }
}

/// The addresses of all parts of a file.
pub(crate) fn part_urls(url: &str) -> Vec<String> {
    let at = url.find(['?', '#']).unwrap_or(url.len());
    let (path, query) = url.split_at(at);
    let parts = part_names(path).into_iter();
    parts.map(|part| format!("{part}{query}")).collect()
}

/// The file name of an address.
pub(crate) fn file_of(url: &str) -> String {
    let path = url.split(['?', '#']).next().unwrap_or(url);
    let name = path.rsplit('/').next().unwrap_or_default();
    if is_safe_path(name) {
        name.to_owned()
    } else {
        "model.gguf".to_owned()
    }
}
