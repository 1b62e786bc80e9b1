//! Files on disk: split files, and files of other formats.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::fs;
use std::path::{Path, PathBuf};

use contract::QuantType;
use gguf::{GgufError, GgufFile, GgufWriter, Value};

/// The split keys of one part.
struct SplitPart {
    no: u16,
    count: u16,
    total: i32,
    tensors: &'static [&'static str],
}

fn part_path(dir: &Path, number: usize, count: u16) -> PathBuf {
    dir.join(format!("m-{number:05}-of-{count:05}.gguf"))
}

fn write(path: &Path, part: &SplitPart) {
    let mut writer = GgufWriter::new();
    writer.meta("split.no", Value::U16(part.no)).unwrap();
    writer.meta("split.count", Value::U16(part.count)).unwrap();
    writer
        .meta("split.tensors.count", Value::I32(part.total))
        .unwrap();
    for name in part.tensors {
        writer.tensor(name, QuantType::F32, &[2]).unwrap();
    }
    let mut body = writer.start(Vec::new()).unwrap();
    for name in part.tensors {
        body.write(&[name.as_bytes()[0]; 8]).unwrap();
    }
    fs::write(path, body.finish().unwrap()).unwrap();
}

fn three(dir: &Path) -> [SplitPart; 3] {
    let parts = [&["a", "b"][..], &["c"], &["d"]].map(|tensors| SplitPart {
        no: 0,
        count: 3,
        total: 4,
        tensors,
    });
    let mut parts = parts;
    for (i, part) in parts.iter_mut().enumerate() {
        part.no = i as u16;
        write(&part_path(dir, i + 1, 3), part);
    }
    parts
}

fn refused(path: &Path, parts: &[&str]) {
    let text = GgufFile::open(path).unwrap_err().to_string();
    for part in parts {
        assert!(text.contains(part), "no '{part}' in: {text}");
    }
}

#[test]
fn first_part_opens_all_parts() {
    let dir = tempfile::tempdir().unwrap();
    three(dir.path());
    let file = GgufFile::open(&part_path(dir.path(), 1, 3)).unwrap();
    assert_eq!((file.n_parts(), file.tensors().len()), (3, 4));
    for name in ["a", "b", "c", "d"] {
        assert_eq!(
            file.data(file.tensor(name).unwrap()),
            [name.as_bytes()[0]; 8]
        );
    }
}

#[test]
fn later_parts_refer_to_the_first() {
    let dir = tempfile::tempdir().unwrap();
    three(dir.path());
    refused(
        &part_path(dir.path(), 2, 3),
        &["m-00002-of-00003.gguf", "part 2 of 3", "open part 1"],
    );
}

#[test]
fn missing_and_mismatched_parts_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let first = part_path(dir.path(), 1, 3);
    let second = part_path(dir.path(), 2, 3);
    let [_, part, _] = three(dir.path());
    fs::remove_file(&second).unwrap();
    refused(&first, &["m-00002-of-00003.gguf"]);
    write(&second, &SplitPart { no: 2, ..part });
    refused(
        &first,
        &["m-00002-of-00003.gguf", "split.no 2", "1 of 3 was expected"],
    );
    write(
        &second,
        &SplitPart {
            no: 1,
            count: 3,
            total: 4,
            tensors: &["a"],
        },
    );
    refused(
        &first,
        &["m-00002-of-00003.gguf", "tensor a", "earlier part"],
    );
    write(
        &second,
        &SplitPart {
            no: 1,
            count: 3,
            total: 4,
            tensors: &["c", "x"],
        },
    );
    refused(&first, &["split.tensors.count is 4", "hold 5 tensors"]);
    let mut writer = GgufWriter::new();
    writer.meta("split.no", Value::from("one")).unwrap();
    let body = writer.start(Vec::new()).unwrap();
    fs::write(&second, body.finish().unwrap()).unwrap();
    refused(
        &first,
        &["m-00002-of-00003.gguf", "key split.no holds string (one)"],
    );
    write(
        &second,
        &SplitPart {
            no: 1,
            count: 3,
            total: 4,
            tensors: &["c", "x"],
        },
    );
    let bytes = fs::read(&second).unwrap();
    fs::write(&second, &bytes[..bytes.len() / 2]).unwrap();
    refused(&first, &["m-00002-of-00003.gguf"]);
}

#[test]
fn renamed_parts_are_refused_with_the_pattern() {
    let dir = tempfile::tempdir().unwrap();
    three(dir.path());
    let renamed = dir.path().join("model.gguf");
    fs::rename(part_path(dir.path(), 1, 3), &renamed).unwrap();
    refused(&renamed, &["model.gguf", "-00001-of-00003.gguf"]);
}

#[test]
fn unopenable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    refused(&dir.path().join("absent.gguf"), &["absent.gguf"]);
    refused(dir.path(), &["not a plain file"]);
    #[cfg(unix)]
    {
        refused(Path::new("/dev/null"), &["/dev/null", "not a plain file"]);
        let pipe = dir.path().join("pipe.gguf");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        refused(&pipe, &["pipe.gguf", "not a plain file"]);
    }
    let empty = dir.path().join("empty.gguf");
    fs::write(&empty, []).unwrap();
    let error = GgufFile::open(&empty).unwrap_err();
    assert!(matches!(error, GgufError::NotGguf { .. }), "{error}");
}
