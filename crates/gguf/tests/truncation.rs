//! A file that is shortened while it is mapped. Each test runs itself again in another process.
#![allow(clippy::unwrap_used, reason = "test helpers")]
#![allow(
    clippy::disallowed_methods,
    reason = "a variable marks the process of a test"
)]

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use gguf::{FileBytes, OnTruncation, TRUNCATED_EXIT, truncated_file, watch_truncation};

const IN_CHILD: &str = "GGUF_TEST_CHILD";

/// Runs a test of this file again in a process of its own; `None` in that process.
fn again(test: &str) -> Option<Output> {
    if std::env::var_os(IN_CHILD).is_some() {
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", "--nocapture", test])
        .env(IN_CHILD, "1");
    Some(child.output().unwrap())
}

/// Maps a file, shortens it to a page, and passes the map on.
fn with_shortened_file(read: impl FnOnce(&FileBytes)) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("short.gguf");
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    let bytes = FileBytes::open(&path).unwrap();
    assert_eq!(bytes[1 << 19], 7);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(65_536).unwrap();
    read(&bytes);
}

#[test]
fn lost_page_ends_the_process_with_a_message_and_a_status() {
    let Some(output) = again("lost_page_ends_the_process_with_a_message_and_a_status") else {
        watch_truncation(OnTruncation::EndProcess);
        return with_shortened_file(|bytes| {
            assert_eq!(bytes[100], 7);
            let _ = std::hint::black_box(bytes[1 << 19]);
            unreachable!("the process has ended");
        });
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(i32::from(TRUNCATED_EXIT)),
        "{text}"
    );
    assert!(
        text.contains("short.gguf: the file was shortened"),
        "{text}"
    );
}

fn read_zeros() {
    watch_truncation(OnTruncation::ReadZeros);
    with_shortened_file(|bytes| {
        assert_eq!(truncated_file(), None);
        assert_eq!(bytes[100], 7);
        let sums: Vec<u64> = std::thread::scope(|scope| {
            let rest = &bytes[1 << 19..];
            let sum = || rest.iter().map(|byte| u64::from(*byte)).sum();
            let readers: Vec<_> = (0..4).map(|_| scope.spawn(sum)).collect();
            readers
                .into_iter()
                .map(|reader| reader.join().unwrap())
                .collect()
        });
        assert_eq!(sums, [0; 4]);
        assert!(truncated_file().unwrap().ends_with("short.gguf"));
        assert_eq!(bytes[100], 7, "the rest of the file stays");
    });
    // A new map at the same place is a file of its own.
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), vec![9; 1 << 20]).unwrap();
    let bytes = FileBytes::open(file.path()).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 9));
}

#[test]
fn lost_pages_read_as_zeros_and_the_file_is_named() {
    let Some(output) = again("lost_pages_read_as_zeros_and_the_file_is_named") else {
        return read_zeros();
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
fn other_causes_of_the_signal_end_the_process_as_before() {
    let Some(output) = again("other_causes_of_the_signal_end_the_process_as_before") else {
        watch_truncation(OnTruncation::ReadZeros);
        let kill = format!("kill -BUS {}", std::process::id());
        // The first signal restores the default only.
        for _ in 0..2 {
            Command::new("sh").args(["-c", &kill]).status().unwrap();
        }
        unreachable!("the process has ended");
    };
    assert!(output.status.signal().is_some(), "{output:?}");
}
