//! Which files a name brings, and what is said about names that are wrong.

use super::*;

fn rig() -> HubRig {
    let rig = HubRig::new();
    for (index, path) in [
        "README.md",
        "BF16/Model-BF16-00001-of-00003.gguf",
        "BF16/Model-BF16-00002-of-00003.gguf",
        "BF16/Model-BF16-00003-of-00003.gguf",
        "Model-Q4_K_M.gguf",
        "Model-Q8_0.gguf",
        "mmproj-F16.gguf",
        "mtp-Model-Q8_0.gguf",
    ]
    .iter()
    .enumerate()
    {
        rig.hub.add(REPO, path, random_bytes(index as u64, 300_000));
    }
    rig
}

fn check(name: &str, path: &str, files: usize) {
    let rig = rig();
    let pulled = rig.pull(name).unwrap();
    assert!(
        pulled.path.ends_with(path),
        "{name}: {}",
        pulled.path.display()
    );
    assert_eq!(pulled.size_bytes, files as u64 * 300_000, "{name}");
    assert_eq!(pulled.downloaded_bytes, pulled.size_bytes, "{name}");
    // A second pull asks and downloads nothing.
    assert_eq!(rig.pull(name).unwrap().downloaded_bytes, 0, "{name}");
    let hub = Hub::new(&rig.settings);
    assert_eq!(hub.find(&hub.parse(name).unwrap()), Some(pulled.path));
}

#[test]
fn names_bring_the_files_that_they_mean() {
    check(REPO, "Model-Q4_K_M.gguf", 1);
    check("hf://maker/Model-GGUF:q8_0", "Model-Q8_0.gguf", 1);
    check("maker/Model-GGUF@v1:Q8_0", "Model-Q8_0.gguf", 1);
    let first = "BF16/Model-BF16-00001-of-00003.gguf";
    check("maker/Model-GGUF:bf16", first, 3);
    check(
        "hf://maker/Model-GGUF/BF16/Model-BF16-00002-of-00003.gguf",
        first,
        3,
    );
    check(
        "maker/Model-GGUF:mtp-Model-Q8_0.gguf",
        "mtp-Model-Q8_0.gguf",
        1,
    );
}

#[test]
fn address_of_a_page_is_a_name() {
    let rig = rig();
    let page = format!("{}/{REPO}/blob/main/Model-Q8_0.gguf", rig.hub.endpoint());
    assert!(rig.pull(&page).unwrap().path.ends_with("Model-Q8_0.gguf"));
}

#[test]
fn drafts_of_the_repository_are_offered() {
    let pulled = rig().pull(REPO).unwrap();
    assert_eq!(pulled.drafts, ["maker/Model-GGUF:mtp-Model-Q8_0.gguf"]);
}

#[test]
fn wrong_names_are_answered_with_near_ones() {
    let rig = rig();
    let error = rig.pull("maker/Modle-GGUF").unwrap_err();
    assert!(matches!(error, HubError::RepoNotFound { .. }), "{error}");
    let error = rig.pull("other/Model-GGUF").unwrap_err();
    assert!(
        error.to_string().contains("did you mean maker/Model-GGUF?"),
        "{error}"
    );
    let error = rig.pull("maker/Model-GGUF@v2").unwrap_err();
    assert!(
        matches!(error, HubError::RevisionNotFound { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("it has main or v1"), "{error}");
    let error = rig.pull("maker/Model-GGUF:Q5_K_M").unwrap_err();
    assert!(matches!(error, HubError::QuantNotFound { .. }), "{error}");
    assert!(error.to_string().contains("BF16, Q4_K_M, Q8_0"), "{error}");
    let error = rig.pull("maker/Model-GGUF:Model-Q4.gguf").unwrap_err();
    assert!(matches!(error, HubError::FileNotFound { .. }), "{error}");
    rig.hub.add("maker/Model", "pytorch_model.bin", "x");
    let error = rig.pull("maker/Model").unwrap_err();
    assert!(matches!(error, HubError::NoModel { .. }), "{error}");
    assert!(error.to_string().contains("ends with -GGUF"), "{error}");
}

#[test]
fn draft_in_safetensors_is_a_folder() {
    let rig = HubRig::new();
    let repo = "maker/Draft-DFlash";
    rig.hub.add(repo, "config.json", "{}");
    rig.hub
        .add(repo, "model.safetensors", random_bytes(1, 1000));
    rig.hub.add(repo, "README.md", "text");
    let pulled = rig.pull(repo).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&pulled.path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors"]);
}

#[test]
fn preview_has_the_first_bytes_and_the_size_of_each_part() {
    let rig = rig();
    rig.hub.faults(|faults| faults.cuts = [10].into());
    let hub = Hub::new(&rig.settings);
    let name = hub.parse("maker/Model-GGUF:BF16").unwrap();
    let first = hub.preview(&name, 1000, rig.dir.path(), &|_| {}).unwrap();
    assert_eq!(first, rig.dir.path().join("Model-BF16-00001-of-00003.gguf"));
    for (index, seed) in [(1, 1), (2, 2), (3, 3)] {
        let path = rig
            .dir
            .path()
            .join(format!("Model-BF16-0000{index}-of-00003.gguf"));
        let bytes = std::fs::read(path).unwrap();
        let whole = random_bytes(seed, 300_000);
        assert!(bytes[..1000] == whole[..1000] && bytes.len() == 300_000);
        assert!(bytes[1000..].iter().all(|&byte| byte == 0));
    }
    let requests = rig.hub.take_seen();
    let at_content = requests.iter().filter(|seen| seen.at_content);
    assert!(at_content.clone().count() == 4);
    assert!(
        at_content
            .clone()
            .all(|seen| seen.range.as_deref() == Some("bytes=0-999"))
    );
    assert_eq!(hub.find(&name), None);
}
