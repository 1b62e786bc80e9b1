//! The cache: its layout, offline mode, list and removal.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;
use crate::test_hub::{COMMIT, sha256};

#[test]
fn layout_is_that_of_huggingface_hub() {
    let rig = HubRig::new();
    let content = random_bytes(1, 1000);
    rig.hub.add(REPO, "dir/Model-Q4_K_M.gguf", content.clone());
    let pulled = rig.pull(REPO).unwrap();
    let repo = rig.settings.cache.join("models--maker--Model-GGUF");
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let link = repo
        .join("snapshots")
        .join(COMMIT)
        .join("dir/Model-Q4_K_M.gguf");
    assert_eq!(pulled.path, link);
    let to = fs::read_link(&link).unwrap();
    let hash = sha256(&content);
    assert_eq!(to.to_str().unwrap(), format!("../../../blobs/{hash}"));
    assert!(fs::read(repo.join("blobs").join(&hash)).unwrap() == content);
    let locks = rig.settings.cache.join(".locks/models--maker--Model-GGUF");
    assert!(locks.join(format!("{hash}.lock")).exists());
}

#[test]
fn files_of_other_programs_are_found_without_the_network() {
    let mut rig = HubRig::new();
    rig.settings.endpoint = "http://127.0.0.1:1".to_owned();
    rig.settings.offline = true;
    let repo = rig.settings.cache.join("models--maker--Model-GGUF");
    let old = "f".repeat(40);
    for (commit, file) in [
        (old.as_str(), "Model-Q8_0.gguf"),
        (COMMIT, "Model-Q4_K_M.gguf"),
    ] {
        let snapshot = repo.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("blobs")).unwrap();
        fs::write(repo.join("blobs").join(file), file).unwrap();
        symlink(format!("../../blobs/{file}"), snapshot.join(file)).unwrap();
    }
    let lost = repo.join("snapshots").join(COMMIT).join("Model-Q6_K.gguf");
    symlink("../../blobs/gone", lost).unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), COMMIT).unwrap();
    for (name, file) in [
        (REPO, "Model-Q4_K_M.gguf"),
        ("maker/Model-GGUF:Q8_0", "Model-Q8_0.gguf"),
        ("maker/Model-GGUF@main", "Model-Q4_K_M.gguf"),
    ] {
        assert!(rig.pull(name).unwrap().path.ends_with(file), "{name}");
    }
    for name in [
        "maker/Model-GGUF:Q6_K",
        "maker/Other",
        "maker/Model-GGUF@main:Q8_0",
    ] {
        let error = rig.pull(name).unwrap_err();
        assert!(matches!(error, HubError::Offline { .. }), "{name}: {error}");
    }
}

#[test]
fn list_names_models_and_removal_frees_their_bytes() {
    let rig = HubRig::new();
    rig.hub
        .add(REPO, "Model-Q4_K_M.gguf", random_bytes(1, 1000));
    rig.hub
        .add(REPO, "Model-Q8_0-00001-of-00002.gguf", random_bytes(2, 500));
    rig.hub
        .add(REPO, "Model-Q8_0-00002-of-00002.gguf", random_bytes(3, 700));
    rig.hub
        .add("maker/plain", "model.gguf", random_bytes(4, 10));
    for name in [REPO, "maker/Model-GGUF:Q8_0", "maker/plain"] {
        rig.pull(name).unwrap();
    }
    let hub = Hub::new(&rig.settings);
    let names = || {
        let list = hub.cache().list();
        list.into_iter()
            .map(|model| (model.name, model.size_bytes))
            .collect::<Vec<_>>()
    };
    let named = |name: &str, size| (name.to_owned(), size);
    let all = [
        named("maker/Model-GGUF:Q4_K_M", 1000),
        named("maker/Model-GGUF:Q8_0", 1200),
        named("maker/plain:model.gguf", 10),
    ];
    assert_eq!(names(), all);
    for (name, _) in &all {
        // The listed name opens the model.
        assert!(hub.find(&hub.parse(name).unwrap()).is_some(), "{name}");
    }
    let remove = |name: &str| hub.cache().remove(&hub.parse(name).unwrap());
    assert_eq!(remove("maker/Model-GGUF:q8_0").unwrap().bytes, 1200);
    assert_eq!(names(), [all[0].clone(), all[2].clone()]);
    assert_eq!(remove("maker/plain").unwrap().files, 1);
    assert!(matches!(
        remove("maker/plain"),
        Err(HubError::NotCached { .. })
    ));
    let gone = remove("maker/Model-GGUF:Q8_0");
    assert!(matches!(gone, Err(HubError::NotCached { .. })), "{gone:?}");
    assert_eq!(names(), [all[0].clone()]);
}

#[test]
fn removal_takes_incomplete_files_along() {
    let mut rig = HubRig::new();
    rig.settings.tuning.attempts = 1;
    rig.hub
        .add(REPO, "Model-Q4_K_M.gguf", random_bytes(1, 100_000));
    rig.hub.faults(|faults| faults.cuts = [50_000].into());
    rig.pull(REPO).unwrap_err();
    let hub = Hub::new(&rig.settings);
    assert!(hub.cache().list().is_empty());
    hub.cache().remove(&hub.parse(REPO).unwrap()).unwrap();
    assert_eq!(rig.files(), Vec::<String>::new());
}
