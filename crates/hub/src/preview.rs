//! The beginning of a model's files, to look at a header before any download.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use crate::choose::{ChosenFiles, choose};
use crate::client::Client;
use crate::error::at;
use crate::pull::{Hub, describe, file_of, part_urls};
use crate::repository::{self, explain, file_url};
use crate::{HubError, ModelName, OnEvent};

/// A file somewhere else.
struct RemotePart {
    /// Its name without folders.
    name: String,
    url: String,
    size: u64,
}

impl Hub {
    /// Writes the first `head_bytes` of each file of a name into `folder`, followed by a hole up to
    /// the file's size. Returns the first file.
    ///
    /// # Errors
    /// Any [`HubError`] of requests; [`HubError::NoModel`] for a folder of safetensors.
    pub fn preview(
        &self,
        name: &ModelName,
        head_bytes: u64,
        folder: &Path,
        report: OnEvent<'_>,
    ) -> Result<PathBuf, HubError> {
        let mut first = None;
        for part in self.parts(name, report)? {
            let path = folder.join(&part.name);
            let read = || read_head(&self.client, &part, head_bytes);
            let head = self.client.retrying(report, read);
            let head = head.map_err(|error| match name {
                ModelName::Hub(name) => explain(&self.client, name, error),
                ModelName::Url(_) => error,
            })?;
            let mut file = File::create(&path).map_err(at(&path))?;
            file.write_all(&head).map_err(at(&path))?;
            file.set_len(part.size).map_err(at(&path))?;
            first.get_or_insert(path);
        }
        first.ok_or_else(|| HubError::NotCached {
            name: name.to_string(),
            cache: self.cache().root().to_owned(),
        })
    }

    /// The files of a name, in order.
    fn parts(&self, name: &ModelName, report: OnEvent<'_>) -> Result<Vec<RemotePart>, HubError> {
        let client = &self.client;
        let name = match name {
            ModelName::Hub(name) => name,
            ModelName::Url(url) => {
                let part = |url: String| {
                    let (size, _, _) = client.retrying(report, || describe(client, &url))?;
                    Ok(RemotePart {
                        name: file_of(&url),
                        url,
                        size,
                    })
                };
                return part_urls(url).into_iter().map(part).collect();
            }
        };
        let listing = repository::list(client, name, report)?;
        let paths: Vec<String> = listing.files.iter().map(|file| file.path.clone()).collect();
        let ChosenFiles::Files(files) = choose(name.repo.as_str(), &paths, &name.pick)? else {
            return Err(HubError::NoModel {
                repo: name.repo.to_string(),
                what: "it has safetensors, whose header is in another file; pull it first"
                    .to_owned(),
            });
        };
        let part = |path: &String| {
            let file = listing.files.iter().find(|file| file.path == *path)?;
            Some(RemotePart {
                name: file_of(path),
                url: file_url(client, &name.repo, &listing.commit, path),
                size: file.size,
            })
        };
        Ok(files.iter().filter_map(part).collect())
    }
}

/// The first bytes of a file; a server without ranges is left after them.
fn read_head(client: &Client, part: &RemotePart, head_bytes: u64) -> Result<Vec<u8>, HubError> {
    let end = head_bytes.min(part.size);
    if end == 0 {
        return Ok(Vec::new());
    }
    let answer = client.open(&part.url, Some((0, end)))?;
    let url = answer.url.clone();
    let mut head = Vec::new();
    let read = answer.reader().take(end).read_to_end(&mut head);
    read.map_err(|error| client.broken(&url, &error))?;
    Ok(head)
}
