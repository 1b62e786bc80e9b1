//! Pulls from a hub on loopback, with faults.

#![allow(clippy::unwrap_used, reason = "all of this crate is a test")]

mod cache;
mod faults;
mod names;
mod test_hub;
mod urls;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use hub::{Hub, HubError, HubSettings, PullEvent, Pulled, Tuning};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;
use test_hub::TestHub;

const REPO: &str = "maker/Model-GGUF";

/// A test hub with an empty cache.
struct HubRig {
    hub: TestHub,
    dir: TempDir,
    settings: HubSettings,
}

impl HubRig {
    fn new() -> HubRig {
        let hub = TestHub::start();
        let dir = tempfile::tempdir().unwrap();
        let settings = HubSettings {
            endpoint: hub.endpoint(),
            cache: dir.path().join("hub"),
            downloads: dir.path().join("models"),
            token: None,
            offline: false,
            proxy: false,
            tuning: Tuning {
                segment_bytes: 200_000,
                record_bytes: 100_000,
                backoff: Duration::from_millis(1),
                read_timeout: Duration::from_secs(20),
                ..Tuning::default()
            },
        };
        HubRig { hub, dir, settings }
    }

    fn pull(&self, name: &str) -> Result<Pulled, HubError> {
        self.pull_with(name, &|_| {})
    }

    fn pull_with(
        &self,
        name: &str,
        report: &(dyn Fn(PullEvent<'_>) + Sync),
    ) -> Result<Pulled, HubError> {
        let hub = Hub::new(&self.settings);
        hub.pull(&hub.parse(name)?, report)
    }

    /// Pulls, and returns the events as text without the frequent ones.
    fn events(&self, name: &str) -> (Result<Pulled, HubError>, Vec<String>) {
        let events = Mutex::new(Vec::new());
        let result = self.pull_with(name, &|event| match event {
            PullEvent::Progress { .. } | PullEvent::Checking { .. } => {}
            other => events.lock().unwrap().push(format!("{other:?}")),
        });
        (result, events.into_inner().unwrap())
    }

    /// All files of the cache that are neither links nor locks, relative to it.
    fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        walk(&self.settings.cache, &mut found);
        found.sort();
        let root = format!("{}/", self.settings.cache.display());
        found.iter().map(|path| path.replace(&root, "")).collect()
    }
}

fn walk(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && entry.file_name() != ".locks" {
            walk(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path().display().to_string());
        }
    }
}

fn random_bytes(seed: u64, n: usize) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut bytes = vec![0; n];
    rng.fill(&mut bytes[..]);
    bytes
}
