use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use contract::snapshot::SequentialReader;

use super::*;

fn tokens(n: u32, salt: u32) -> Vec<TokenId> {
    (0..n).map(|i| TokenId(i * 3 + salt)).collect()
}

fn config(dir: &Path, budget: u64) -> StoreConfig {
    StoreConfig {
        dir: dir.to_path_buf(),
        budget,
        owner: [7; 16],
    }
}

/// Opens a store, puts states, and closes it so that all are written.
fn put(dir: &Path, budget: u64, states: &[(Vec<TokenId>, Vec<u8>)]) {
    let mut store = DiskStore::open(config(dir, budget)).unwrap();
    for (tokens, bytes) in states {
        store.put(tokens, Box::new(bytes.clone()));
    }
}

fn found(store: &mut DiskStore, prompt: &[TokenId], more_than: usize) -> Option<(usize, Vec<u8>)> {
    let found = store.find(prompt, more_than, prompt.len())?;
    let mut bytes = Vec::new();
    SequentialReader::new(&*found.source)
        .read_to_end(&mut bytes)
        .unwrap();
    Some((found.position, bytes))
}

fn whole_files(dir: &Path) -> Vec<PathBuf> {
    let owner = fs::read_dir(dir)
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .find(|p| p.is_dir())
        .unwrap();
    let mut paths: Vec<PathBuf> = fs::read_dir(owner)
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .collect();
    paths.sort();
    paths
}

#[test]
fn longest_stored_prefix_is_found_by_another_process() {
    let dir = tempfile::tempdir().unwrap();
    let short = (tokens(10, 0), vec![1; 100]);
    let long = (tokens(5000, 0), vec![2; 9000]);
    put(dir.path(), 1 << 20, &[short, long, (tokens(7, 1), vec![3])]);
    let mut store = DiskStore::open(config(dir.path(), 1 << 20)).unwrap();
    assert_eq!(
        found(&mut store, &tokens(6000, 0), 0),
        Some((5000, vec![2; 9000]))
    );
    assert_eq!(
        found(&mut store, &tokens(4000, 0), 0),
        Some((10, vec![1; 100]))
    );
    assert_eq!(found(&mut store, &tokens(4000, 0), 10), None);
    assert_eq!(store.longest_prefix_len(&tokens(5000, 0)), 5000);
    assert_eq!(store.longest_prefix_len(&tokens(9, 0)), 0);
    let mut other = DiskStore::open(StoreConfig {
        owner: [8; 16],
        ..config(dir.path(), 1 << 20)
    })
    .unwrap();
    assert_eq!(found(&mut other, &tokens(6000, 0), 0), None);
}

#[test]
fn queued_states_count_as_covered() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = DiskStore::open(config(dir.path(), 1 << 20)).unwrap();
    store.put(&tokens(50, 0), Box::new(vec![1; 10]));
    assert_eq!(store.longest_prefix_len(&tokens(60, 0)), 50);
}

#[test]
fn corrupt_header_bytes_and_wrong_lengths_are_detected() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), 1 << 20, &[(tokens(20, 0), vec![9; 50])]);
    let path = whole_files(dir.path()).remove(0);
    let sound = fs::read(&path).unwrap();
    assert_eq!(sound.len() as u64, file::size(20, 50));
    let check = |bytes: &[u8], what: String| {
        fs::write(&path, bytes).unwrap();
        let mut store = DiskStore::open(config(dir.path(), 1 << 20)).unwrap();
        assert_eq!(found(&mut store, &tokens(30, 0), 0), None, "{what}");
        assert!(!path.exists(), "{what}: a damaged file stays");
    };
    for at in 0..32 + 32 + 4 * 20 {
        let mut bytes = sound.clone();
        bytes[at] ^= 1 << (at % 8);
        check(&bytes, format!("byte {at}"));
    }
    for length in [0, 1, 31, 63, 64, 100, 4095, 4096, sound.len() - 1] {
        check(&sound[..length], format!("{length} bytes"));
    }
    let longer = [&sound[..], &[0]].concat();
    check(&longer, "a byte too many".to_owned());
}

#[test]
fn least_recently_used_files_are_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let budget = 3 * file::size(10, 1000);
    let state = |salt: u32| (tokens(10, salt), vec![salt as u8; 1000]);
    put(dir.path(), budget, &[state(0), state(1), state(2)]);
    {
        let mut store = DiskStore::open(config(dir.path(), budget)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(found(&mut store, &tokens(11, 0), 0).is_some());
        std::thread::sleep(std::time::Duration::from_millis(20));
        store.put(&state(3).0, Box::new(state(3).1));
    }
    let mut store = DiskStore::open(config(dir.path(), budget)).unwrap();
    let kept: Vec<bool> = (0..4)
        .map(|salt| found(&mut store, &tokens(11, salt), 0).is_some())
        .collect();
    assert_eq!(kept.iter().filter(|kept| **kept).count(), 3);
    assert!(kept[0] && kept[3], "{kept:?}");
    drop(store);
    put(dir.path(), budget, &[(tokens(9, 9), vec![0; 1 << 20])]);
    assert_eq!(
        whole_files(dir.path()).len(),
        3,
        "a state beyond the budget is not written"
    );
    // A smaller budget applies from the start.
    drop(DiskStore::open(config(dir.path(), budget / 3)).unwrap());
    assert_eq!(whole_files(dir.path()).len(), 1);
}

#[test]
fn shutdown_keeps_most_recently_used_states() {
    let dir = tempfile::tempdir().unwrap();
    let budget = 2 * file::size(10, 1000);
    let state = |salt: u32| (tokens(10, salt), vec![salt as u8; 1000]);
    // Two states exist, written in numeric order; each list names the most recently used first.
    for (by_use, expected) in [
        (&[2, 3, 4][..], [2, 3]),
        (&[2, 0, 3], [0, 2]),
        (&[0, 1, 2, 3], [0, 1]),
        (&[2, 0, 3, 1], [0, 2]),
        (&[4, 3, 2, 1, 0], [3, 4]),
    ] {
        let dir = dir.path().join(format!("{by_use:?}"));
        put(&dir, budget, &[state(0), state(1)]);
        // States used within the steps before the end would sort among them.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let mut store = DiskStore::open(config(&dir, budget)).unwrap();
        let all: Vec<_> = by_use.iter().map(|&salt| tokens(10, salt)).collect();
        store.begin_shutdown(&all);
        for &salt in by_use.iter().filter(|&&salt| salt > 1) {
            store.put(&state(salt).0, Box::new(state(salt).1));
        }
        drop(store);
        let mut store = DiskStore::open(config(&dir, budget)).unwrap();
        let kept = (0..5).filter(|&salt| found(&mut store, &tokens(11, salt), 0).is_some());
        assert_eq!(kept.collect::<Vec<_>>(), expected, "used {by_use:?}");
    }
}

#[test]
fn states_queued_at_shutdown_are_ordered_by_use() {
    let dir = tempfile::tempdir().unwrap();
    let size = file::size(10, 1 << 20);
    let state = |salt: u32| (tokens(10, salt), vec![salt as u8; 1 << 20]);
    let mut store = DiskStore::open(config(dir.path(), 2 * size)).unwrap();
    // These may be written, in progress or queued: the first was used last, the second is unwanted.
    for salt in [0, 1, 2] {
        store.put(&state(salt).0, Box::new(state(salt).1));
    }
    store.begin_shutdown(&[tokens(10, 0), tokens(10, 3), tokens(10, 2)]);
    store.put(&state(3).0, Box::new(state(3).1));
    if store.longest_prefix_len(&tokens(10, 0)) == 0 {
        store.put(&state(0).0, Box::new(state(0).1));
    }
    drop(store);
    let mut store = DiskStore::open(config(dir.path(), 2 * size)).unwrap();
    let kept = (0..4).filter(|&salt| found(&mut store, &tokens(11, salt), 0).is_some());
    assert_eq!(kept.collect::<Vec<_>>(), [0, 3]);
}

#[test]
fn orphaned_part_files_are_removed_and_locked_ones_stay() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), 1 << 20, &[(tokens(10, 0), vec![1; 10])]);
    let owner = whole_files(dir.path())[0].parent().unwrap().to_path_buf();
    fs::write(owner.join("1-1.part"), "left").unwrap();
    let alive = owner.join("2-2.part");
    let held = File::create(&alive).unwrap();
    held.lock().unwrap();
    drop(DiskStore::open(config(dir.path(), 1 << 20)).unwrap());
    assert!(!owner.join("1-1.part").exists() && alive.exists());
}

#[test]
fn two_processes_share_stored_files() {
    let dir = tempfile::tempdir().unwrap();
    let mut reader = DiskStore::open(config(dir.path(), 1 << 20)).unwrap();
    assert_eq!(found(&mut reader, &tokens(30, 0), 0), None);
    put(dir.path(), 1 << 20, &[(tokens(20, 0), vec![4; 10])]);
    assert_eq!(
        found(&mut reader, &tokens(30, 0), 0),
        Some((20, vec![4; 10]))
    );
    fs::remove_file(&whole_files(dir.path())[0]).unwrap();
    assert_eq!(found(&mut reader, &tokens(30, 0), 0), None);
}

#[test]
#[cfg(unix)]
fn unwritable_folder_disables_the_store_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = DiskStore::open(config(dir.path(), 1 << 20)).unwrap();
    let health = store.status();
    // A file replaces the owner's folder; it blocks even root.
    let owner = fs::read_dir(dir.path())
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .find(|p| p.is_dir())
        .unwrap();
    fs::remove_dir(&owner).unwrap();
    fs::write(&owner, "").unwrap();
    store.put(&tokens(10, 0), Box::new(vec![1; 10]));
    drop(store);
    assert!(health.failure().is_some());
}

#[test]
#[cfg(unix)]
fn stored_files_are_private_to_their_owner() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), 1 << 20, &[(tokens(10, 0), vec![1; 10])]);
    let mode = fs::metadata(&whole_files(dir.path())[0])
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[cfg(unix)]
#[test]
fn lock_is_not_followed_and_its_target_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("precious");
    fs::write(&target, "precious").unwrap();
    let folder = dir.path().join("cache");
    put(&folder, 1 << 20, &[]);
    fs::remove_file(folder.join("lock")).unwrap();
    std::os::unix::fs::symlink(&target, folder.join("lock")).unwrap();
    let store = DiskStore::open(config(&folder, 1 << 20)).unwrap();
    assert!(store.status().failure().is_some(), "nothing is written");
    drop(store);
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
    fs::remove_file(folder.join("lock")).unwrap();
    fs::write(folder.join("lock"), "kept").unwrap();
    put(&folder, 1 << 20, &[(tokens(10, 0), vec![1])]);
    assert_eq!(fs::read_to_string(folder.join("lock")).unwrap(), "kept");
}

#[cfg(unix)]
#[test]
fn pipes_links_and_folders_among_the_states_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let state = (tokens(10, 0), vec![1; 100]);
    put(dir.path(), 1 << 20, std::slice::from_ref(&state));
    let path = whole_files(dir.path()).remove(0);
    let owner = path.parent().unwrap();
    for ending in ["state", "part"] {
        let pipe = owner.join(format!("pipe.{ending}"));
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        fs::create_dir(owner.join(format!("folder.{ending}"))).unwrap();
        let link = owner.join(format!("link.{ending}"));
        std::os::unix::fs::symlink("/dev/zero", link).unwrap();
        let endless = owner.join(format!("loop.{ending}"));
        std::os::unix::fs::symlink(&endless, &endless).unwrap();
    }
    let folder = dir.path().to_path_buf();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut store = DiskStore::open(config(&folder, 1 << 20)).unwrap();
        let found = found(&mut store, &tokens(20, 0), 0);
        store.put(&tokens(30, 5), Box::new(vec![7_u8; 10]));
        drop(store);
        sender.send(found).unwrap();
    });
    let found = receiver.recv_timeout(std::time::Duration::from_secs(30));
    assert_eq!(found.expect("no blocking"), Some((10, vec![1; 100])));
}

#[cfg(unix)]
#[test]
fn folder_that_everyone_may_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), 1 << 20, &[]);
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = DiskStore::open(config(dir.path(), 1 << 20)).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("0700"), "{error}");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let owner = fs::read_dir(dir.path()).unwrap().flatten();
    let owner = owner.map(|entry| entry.path()).find(|path| path.is_dir());
    let owner = owner.unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::remove_dir_all(&owner).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), &owner).unwrap();
    assert!(
        DiskStore::open(config(dir.path(), 1 << 20)).is_err(),
        "a link"
    );
}

#[test]
fn held_lock_delays_the_start_by_seconds_only() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), 1 << 20, &[]);
    let lock = File::options().write(true).open(dir.path().join("lock"));
    lock.as_ref().unwrap().lock().unwrap();
    let begun = std::time::Instant::now();
    let store = DiskStore::open(config(dir.path(), 1 << 20)).unwrap();
    assert!(begun.elapsed() < std::time::Duration::from_secs(20));
    assert!(store.status().failure().is_some(), "nothing is written");
}
