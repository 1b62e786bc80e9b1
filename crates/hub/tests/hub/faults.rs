//! Cuts, silence, status codes, changed bytes and full disks.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::*;
use crate::test_hub::{Access, TOKEN, sha256};

const FILE: &str = "Model-Q4_K_M.gguf";

fn rig_with_file(n: usize) -> (HubRig, Vec<u8>) {
    let rig = HubRig::new();
    let content = random_bytes(1, n);
    rig.hub.add(REPO, FILE, content.clone());
    (rig, content)
}

#[test]
fn pull_continues_after_two_hundred_cuts_at_random_bytes() {
    let (mut rig, content) = rig_with_file(6_000_000);
    let mut rng = StdRng::seed_from_u64(7);
    let cuts: Vec<usize> = (0..200).map(|_| rng.random_range(0..40_000)).collect();
    rig.hub.faults(|faults| faults.cuts = cuts.into());
    // At first each cut ends the program, as a lost network or a signal would; then it goes on.
    let mut runs = 0;
    let there = AtomicU64::new(0);
    let pulled = loop {
        runs += 1;
        rig.settings.tuning.attempts = if runs <= 60 { 1 } else { 3 };
        rig.settings.tuning.connections = 1 + runs % 4;
        let result = rig.pull_with(REPO, &|event| match event {
            PullEvent::Start { have_bytes, .. } => {
                assert!(
                    have_bytes >= there.load(Ordering::Relaxed),
                    "bytes were lost"
                );
            }
            PullEvent::Progress { done_bytes, .. } => {
                there.fetch_max(done_bytes, Ordering::Relaxed);
            }
            _ => {}
        });
        match result {
            Ok(pulled) => break pulled,
            Err(HubError::Unreachable { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    };
    rig.hub
        .faults(|faults| assert!(faults.cuts.is_empty(), "all cuts happened"));
    assert!(runs > 60, "{runs} runs");
    assert!(std::fs::read(&pulled.path).unwrap() == content);
    assert!(pulled.downloaded_bytes < content.len() as u64, "{pulled:?}");
    let blob = format!("models--maker--Model-GGUF/blobs/{}", sha256(&content));
    assert!(rig.files().contains(&blob), "{:?}", rig.files());
    assert!(!rig.files().iter().any(|file| file.contains("incomplete")));
}

#[test]
fn server_without_ranges_is_read_to_its_end() {
    let (rig, content) = rig_with_file(700_000);
    rig.hub.faults(|faults| {
        faults.no_ranges = true;
        faults.cuts = [100_000, 350_000, 10].into();
    });
    let pulled = rig.pull(REPO).unwrap();
    assert!(std::fs::read(&pulled.path).unwrap() == content);
    let requests = rig.hub.take_seen();
    let at_content = requests.iter().filter(|seen| seen.at_content).count();
    assert_eq!(at_content, 4, "one connection, and one more after each cut");
}

#[test]
fn changed_bytes_are_refused_and_deleted() {
    let (rig, content) = rig_with_file(300_000);
    rig.hub.faults(|faults| faults.corrupt = true);
    let error = rig.pull(REPO).unwrap_err();
    let HubError::WrongHash {
        expected, found, ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(*expected, sha256(&content));
    assert_ne!(expected, found);
    assert_eq!(rig.files(), Vec::<String>::new());
    rig.hub.faults(|faults| faults.corrupt = false);
    rig.pull(REPO).unwrap();
}

#[test]
fn damaged_incomplete_file_is_downloaded_again() {
    let (mut rig, content) = rig_with_file(300_000);
    rig.settings.tuning.attempts = 1;
    rig.settings.tuning.connections = 1;
    rig.hub.faults(|faults| faults.cuts = [150_000].into());
    rig.pull(REPO).unwrap_err();
    let incomplete = rig
        .files()
        .into_iter()
        .find(|file| file.ends_with(".incomplete"));
    let path = rig.settings.cache.join(incomplete.unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[10] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let pulled = rig.pull(REPO).unwrap();
    assert!(std::fs::read(&pulled.path).unwrap() == content);
}

#[test]
fn second_pull_waits_for_the_first_and_downloads_nothing() {
    let (rig, content) = rig_with_file(500_000);
    let (begun, has_begun) = mpsc::channel();
    let (waiting, is_waiting) = mpsc::channel();
    let (first, second) = std::thread::scope(|scope| {
        let rig = &rig;
        let first = scope.spawn(move || {
            let both = Mutex::new((begun, is_waiting));
            rig.pull_with(REPO, &|event| {
                if matches!(event, PullEvent::Start { .. }) {
                    // It holds the lock until the second pull has reported that it waits.
                    let both = both.lock().unwrap();
                    both.0.send(()).unwrap();
                    both.1.recv_timeout(Duration::from_secs(60)).unwrap();
                }
            })
        });
        has_begun.recv().unwrap();
        let waiting = Mutex::new(waiting);
        let second = rig.pull_with(REPO, &|event| {
            if matches!(event, PullEvent::Waiting { .. }) {
                waiting.lock().unwrap().send(()).unwrap();
            }
        });
        (first.join().unwrap(), second)
    });
    assert_eq!(first.unwrap().downloaded_bytes, content.len() as u64);
    let second = second.unwrap();
    assert_eq!(second.downloaded_bytes, 0);
    assert!(std::fs::read(&second.path).unwrap() == content);
}

#[test]
fn silent_server_is_left_and_asked_again() {
    let (mut rig, content) = rig_with_file(300_000);
    rig.settings.tuning.read_timeout = Duration::from_secs(1);
    rig.hub.faults(|faults| faults.stalls = 2);
    let (pulled, events) = rig.events(REPO);
    assert!(std::fs::read(pulled.unwrap().path).unwrap() == content);
    let retries = events.iter().filter(|event| event.starts_with("Retrying"));
    assert!(retries.count() >= 2, "{events:?}");
}

#[test]
fn busy_server_is_asked_again_after_the_time_that_it_names() {
    let (rig, _) = rig_with_file(1000);
    let busy = || (429, vec![("retry-after", "1".to_owned())]);
    rig.hub.faults(|faults| {
        faults.interface_statuses.push_back(busy());
        faults.statuses.push_back(busy());
        faults.statuses.push_back((503, Vec::new()));
    });
    let start = Instant::now();
    rig.pull(REPO).unwrap();
    assert!(
        start.elapsed() >= Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn lasting_failures_end_with_the_status() {
    let (mut rig, _) = rig_with_file(1000);
    rig.settings.tuning.attempts = 3;
    rig.hub.faults(|faults| {
        faults.statuses = vec![(502, Vec::new()); 3].into();
    });
    let error = rig.pull(REPO).unwrap_err();
    assert!(
        matches!(error, HubError::Server { status: 502, .. }),
        "{error}"
    );
    // A wait beyond the limit is an error at once.
    let long = vec![("retry-after", "3600".to_owned())];
    rig.hub
        .faults(|faults| faults.statuses = [(429, long)].into());
    let error = rig.pull(REPO).unwrap_err();
    assert!(matches!(error, HubError::RateLimited { .. }), "{error}");
    assert!(error.to_string().contains("3600 s"), "{error}");
    rig.hub.faults(|faults| faults.loops = true);
    let error = rig.pull(REPO).unwrap_err();
    assert!(matches!(error, HubError::Protocol { .. }), "{error}");
}

#[test]
fn address_that_ran_out_is_asked_for_again() {
    let (mut rig, content) = rig_with_file(900_000);
    rig.settings.tuning.connections = 1;
    // The first range works, the second is refused once.
    rig.hub.faults(|faults| faults.cuts = [100_000].into());
    let refuse = Mutex::new(Some(()));
    let hub = &rig.hub;
    let pulled = rig.pull_with(REPO, &|event| {
        if matches!(event, PullEvent::Retrying { .. }) && refuse.lock().unwrap().take().is_some() {
            hub.faults(|faults| faults.statuses.push_back((403, Vec::new())));
        }
    });
    assert!(std::fs::read(pulled.unwrap().path).unwrap() == content);
    let resolved = hub.take_seen();
    let resolved = resolved
        .iter()
        .filter(|seen| seen.path.contains("/resolve/"));
    assert_eq!(resolved.count(), 2);
}

#[test]
fn token_goes_to_the_hub_only() {
    let (mut rig, _) = rig_with_file(500_000);
    rig.settings.token = Some(TOKEN.to_owned());
    rig.hub.protect(REPO, Access::Gated);
    rig.pull(REPO).unwrap();
    let requests = rig.hub.take_seen();
    assert!(requests.iter().any(|seen| seen.at_content));
    for seen in requests {
        assert_eq!(seen.authorization.is_some(), !seen.at_content, "{seen:?}");
    }
}

#[test]
fn gated_and_private_repositories_are_named_as_such() {
    let (mut rig, _) = rig_with_file(1000);
    rig.hub.protect(REPO, Access::Gated);
    let error = rig.pull(REPO).unwrap_err();
    assert!(matches!(error, HubError::Gated { .. }), "{error}");
    assert!(error.to_string().contains("no token was sent"), "{error}");
    rig.settings.token = Some("hf_another".to_owned());
    let error = rig.pull(REPO).unwrap_err();
    assert!(error.to_string().contains("has no access yet"), "{error}");
    rig.settings.token = None;
    rig.hub.protect(REPO, Access::Private);
    let error = rig.pull(REPO).unwrap_err();
    assert!(matches!(error, HubError::RepoNotFound { .. }), "{error}");
    assert!(error.to_string().contains("HF_TOKEN"), "{error}");
    rig.settings.token = Some(TOKEN.to_owned());
    rig.pull(REPO).unwrap();
}

#[test]
fn full_disk_is_noticed_before_the_download() {
    let (mut rig, _) = rig_with_file(500_000);
    rig.settings.tuning.free_space = |_| Ok(499_999);
    let error = rig.pull(REPO).unwrap_err();
    let HubError::DiskFull { needed_bytes, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(needed_bytes, 500_000);
    assert!(!rig.hub.take_seen().iter().any(|seen| seen.at_content));
}

#[test]
fn full_disk_is_noticed_during_the_download_and_bytes_stay() {
    static FREE: AtomicU64 = AtomicU64::new(1 << 30);
    fn free(_: &Path) -> io::Result<u64> {
        Ok(FREE.load(Ordering::Relaxed))
    }
    let (mut rig, content) = rig_with_file(900_000);
    rig.settings.tuning.free_space = free;
    let error = rig.pull_with(REPO, &|event| {
        if matches!(
            event,
            PullEvent::Progress {
                done_bytes: 150_000..,
                ..
            }
        ) {
            FREE.store(1000, Ordering::Relaxed);
        }
    });
    let error = error.unwrap_err();
    let HubError::DiskFull {
        needed_bytes,
        free_bytes: 1000,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert!(needed_bytes < 900_000, "{needed_bytes}");
    FREE.store(1 << 30, Ordering::Relaxed);
    let pulled = rig.pull(REPO).unwrap();
    assert!(pulled.downloaded_bytes < 900_000, "{pulled:?}");
    assert!(std::fs::read(&pulled.path).unwrap() == content);
}

#[test]
fn unreachable_hub_is_an_error_with_its_address() {
    let mut rig = HubRig::new();
    rig.settings.endpoint = "http://127.0.0.1:1".to_owned();
    rig.settings.tuning.attempts = 2;
    let error = rig.pull(REPO).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("http://127.0.0.1:1/"), "{error}");
}
