use std::os::unix::fs::PermissionsExt;

use super::*;

fn response(id: &str, previous: Option<&str>) -> KeptResponse {
    KeptResponse {
        id: id.to_owned(),
        previous: previous.map(str::to_owned),
        input: "\"hi\"".to_owned(),
        output: format!("[{{\"id\":\"msg_{id}\"}}]"),
        response: "x".repeat(100),
    }
}

#[tokio::test]
async fn memory_drops_the_end_of_a_chain_before_its_start() {
    let one = response("resp_1", None).bytes();
    let store = ResponseStore::in_memory(3 * one);
    store.keep(response("resp_1", None));
    store.keep(response("resp_2", Some("resp_1")));
    store.keep(response("resp_3", Some("resp_2")));
    assert_eq!(store.history("resp_3").unwrap().len(), 3);
    assert_eq!(store.item("msg_resp_2").unwrap(), "{\"id\":\"msg_resp_2\"}");
    // The use of the chain has made its start the newest.
    assert_eq!(store.history("resp_3").unwrap().len(), 3);
    store.keep(response("resp_4", None));
    assert_eq!(store.history("resp_3"), Err("resp_3".to_owned()));
    assert_eq!(store.item("msg_resp_3"), None);
    assert!(store.get("resp_1").is_some());
    assert!(store.forget("resp_1") && !store.forget("resp_1"));
    assert_eq!(store.history("resp_2"), Err("resp_1".to_owned()));
    let none = ResponseStore::in_memory(0);
    none.keep(response("resp_1", None));
    assert!(!none.is_on() && none.get("resp_1").is_none());
}

/// Waits until the blocking pool has written what was kept.
async fn written(folder: &Path, n_files: usize) {
    for _ in 0..1_000 {
        let found = std::fs::read_dir(folder).unwrap().flatten();
        if found
            .filter(|file| file.path().extension().unwrap() == "json")
            .count()
            == n_files
        {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    panic!("{n_files} files in time");
}

#[tokio::test]
async fn folder_keeps_responses_across_restarts_within_its_budget() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("kept");
    let store = ResponseStore::with_folder(0, &folder, 1 << 20).unwrap();
    store.keep(response("resp_1", None));
    written(&folder, 1).await;
    store.keep(response("resp_2", Some("resp_1")));
    written(&folder, 2).await;
    let mode = std::fs::metadata(folder.join("resp_1.json"))
        .unwrap()
        .permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let again = ResponseStore::with_folder(1 << 20, &folder, 1 << 20).unwrap();
    assert_eq!(again.history("resp_2").unwrap().len(), 2);
    assert_eq!(again.item("msg_resp_1").unwrap(), "{\"id\":\"msg_resp_1\"}");
    assert_eq!(again.get("../etc/passwd"), None);
    let size = std::fs::metadata(folder.join("resp_1.json")).unwrap().len();
    let tight = ResponseStore::with_folder(0, &folder, size + 50).unwrap();
    written(&folder, 1).await;
    // The history was read from its end, so its start was used last.
    assert!(tight.get("resp_2").is_none() && tight.get("resp_1").is_some());
    std::fs::write(folder.join("resp_1.json"), "broken").unwrap();
    assert!(tight.get("resp_1").is_none());
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(ResponseStore::with_folder(0, &folder, 1).is_err());
}
