//! Files of servers that are no hubs.

use super::*;

#[test]
fn file_of_another_server_is_downloaded_and_found() {
    let rig = HubRig::new();
    let content = random_bytes(1, 500_000);
    rig.hub.add(REPO, "Model.gguf", content.clone());
    rig.hub
        .faults(|faults| faults.cuts = [1, 100_000, 7].into());
    let url = format!("{}?key=1", rig.hub.content_url(REPO, "Model.gguf"));
    let pulled = rig.pull(&url).unwrap();
    assert!(pulled.path.starts_with(rig.dir.path().join("models")));
    assert!(pulled.path.ends_with("Model.gguf"));
    assert!(std::fs::read(&pulled.path).unwrap() == content);
    let hub = Hub::new(&rig.settings);
    let name = hub.parse(&url).unwrap();
    assert_eq!(hub.find(&name), Some(pulled.path.clone()));
    let listed = hub.cache().list();
    assert_eq!(listed[0].path, pulled.path);
    assert_eq!(hub.cache().remove(&name).unwrap().bytes, 500_000);
    assert_eq!(hub.find(&name), None);
}

#[test]
fn file_that_changed_since_the_cut_is_begun_again() {
    let mut rig = HubRig::new();
    rig.settings.tuning.attempts = 1;
    rig.hub.add(REPO, "Model.gguf", random_bytes(1, 300_000));
    let url = rig.hub.content_url(REPO, "Model.gguf");
    rig.hub.faults(|faults| faults.cuts = [10, 150_000].into());
    rig.pull(&url).unwrap_err();
    let content = random_bytes(2, 300_000);
    rig.hub.add(REPO, "Model.gguf", content.clone());
    let pulled = rig.pull(&url).unwrap();
    assert_eq!(pulled.downloaded_bytes, 300_000);
    assert!(std::fs::read(&pulled.path).unwrap() == content);
}

#[test]
fn split_file_of_another_server_brings_all_parts() {
    let rig = HubRig::new();
    for index in 1..=2 {
        let name = format!("M-0000{index}-of-00002.gguf");
        rig.hub.add(REPO, &name, random_bytes(index, 1000));
    }
    let url = rig.hub.content_url(REPO, "M-00001-of-00002.gguf");
    let pulled = rig.pull(&url).unwrap();
    assert_eq!(pulled.size_bytes, 2000);
    let second = pulled.path.with_file_name("M-00002-of-00002.gguf");
    assert!(second.is_file());
}

#[test]
fn missing_file_is_an_error_with_its_address() {
    let rig = HubRig::new();
    let url = format!("{}?key=secret", rig.hub.content_url(REPO, "M.gguf"));
    let error = rig.pull(&url).unwrap_err();
    assert!(matches!(error, HubError::NotFound { .. }), "{error}");
    assert!(!error.to_string().contains("secret"), "{error}");
}
