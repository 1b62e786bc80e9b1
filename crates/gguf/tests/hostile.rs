//! Damaged and hostile files always give an error with a position, never a panic, and never use
//! more memory than the file's size justifies.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use contract::QuantType;
use gguf::{Array, FileBytes, GgufError, GgufFile, GgufString, GgufWriter, Value};

/// Counts the bytes allocated by this thread, so that parallel tests do not interfere.
struct Counting;

thread_local! {
    static IN_USE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    // The thread may be ending, and its counters may be gone.
    let _ = IN_USE.try_with(|in_use| {
        in_use.set(in_use.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(in_use.get())));
    });
}

// SAFETY: every call goes to the system's allocator with the same arguments; counting allocates
// nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's obligations are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's obligations are the system allocator's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Maximum memory for reading a file of `len` bytes. An empty string has eight bytes in the file
/// and sixteen in memory, a nested array twelve and thirty-two, and growing vectors double.
fn allowed(len: usize) -> usize {
    8 * len + 8192
}

fn open(bytes: &[u8]) -> Result<GgufFile, GgufError> {
    let shared = FileBytes::shared(Arc::from(bytes));
    let before = IN_USE.get();
    PEAK.set(before);
    let result = GgufFile::from_bytes("bad.gguf", shared);
    let used = usize::try_from(PEAK.get() - before).unwrap();
    assert!(
        used <= allowed(bytes.len()),
        "{used} bytes for a file of {}",
        bytes.len()
    );
    result
}

/// Every value type, nested arrays, several tensor types.
fn sample() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    let texts =
        |texts: &[&str]| Array::String(texts.iter().map(|t| GgufString::from(*t)).collect());
    let nested = Array::Array(vec![Array::U16(vec![1, 2]), texts(&["a", ""])]);
    for (key, value) in [
        ("general.architecture", Value::from("none")),
        ("general.alignment", Value::U32(64)),
        ("u8", Value::U8(1)),
        ("i8", Value::I8(-1)),
        ("u16", Value::U16(1)),
        ("i16", Value::I16(-1)),
        ("i32", Value::I32(-1)),
        ("f32", Value::F32(1.5)),
        ("bool", Value::Bool(true)),
        ("u64", Value::U64(1)),
        ("i64", Value::I64(-1)),
        ("f64", Value::F64(1.5)),
        ("tokens", Value::Array(texts(&["a", "bc", "def"]))),
        ("kinds", Value::Array(Array::I32(vec![1, 3, 4]))),
        ("flags", Value::Array(Array::Bool(vec![true, false]))),
        ("nested", Value::Array(nested)),
    ] {
        writer.meta(key, value).unwrap();
    }
    for (name, ty, dims) in [
        ("norm", QuantType::F32, &[4][..]),
        ("w", QuantType::Q8_0, &[32, 2]),
        ("conv", QuantType::F16, &[2, 1, 3]),
    ] {
        writer.tensor(name, ty, dims).unwrap();
    }
    let mut body = writer.start(Vec::new()).unwrap();
    body.write(&[7; 16 + 68 + 12]).unwrap();
    body.finish().unwrap()
}

/// The part of the sample before the data section.
fn head_len(bytes: &[u8]) -> usize {
    open(bytes).unwrap().head(0).len()
}

/// An error must name the file and a position in it.
fn check_error(error: &GgufError) {
    let text = error.to_string();
    assert!(text.starts_with("bad.gguf"), "{text}");
    if let GgufError::Malformed {
        place,
        field,
        detail,
        ..
    } = error
    {
        assert!(
            !place.is_empty() && !field.is_empty() && !detail.is_empty(),
            "{text}"
        );
    }
}

#[test]
fn truncated_files_are_refused() {
    let whole = sample();
    let last = {
        let file = open(&whole).unwrap();
        let conv = file.data(file.tensor("conv").unwrap());
        conv.as_ptr() as usize - file.head(0).as_ptr() as usize + conv.len()
    };
    for len in 0..last {
        check_error(&open(&whole[..len]).expect_err("cut files are refused"));
    }
    open(&whole[..last]).unwrap();
}

#[test]
fn bit_flips_are_read_or_refused_with_their_offset() {
    let whole = sample();
    let mut refused = 0;
    for at in 0..head_len(&whole) {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            if let Err(error) = open(&bytes) {
                check_error(&error);
                refused += 1;
            }
        }
    }
    assert!(refused > 1000, "only {refused} of the flips were noticed");
}

#[test]
fn hostile_numbers_are_read_or_refused() {
    let whole = sample();
    let len = whole.len() as u64;
    let numbers = [
        0,
        1,
        len,
        len - 1,
        len / 8,
        u64::from(u32::MAX),
        1 << 32,
        1 << 40,
        1 << 61,
        (1 << 63) - 1,
        1 << 63,
        u64::MAX - 31,
        u64::MAX - 7,
        u64::MAX,
    ];
    for at in 0..head_len(&whole) - 8 {
        for number in numbers {
            for width in [4, 8] {
                let mut bytes = whole.clone();
                bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
                if let Err(error) = open(&bytes) {
                    check_error(&error);
                }
            }
        }
    }
}

/// A file with a head of given bytes.
fn raw(version: u32, n_tensors: u64, n_pairs: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(n_tensors.to_le_bytes());
    bytes.extend(n_pairs.to_le_bytes());
    bytes.extend(rest.concat());
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn entry(name: &str, dims: &[u64], ty: u32, offset: u64) -> Vec<u8> {
    let dims_bytes: Vec<u8> = dims.iter().flat_map(|d| d.to_le_bytes()).collect();
    let n_dims = (dims.len() as u32).to_le_bytes();
    let (ty, offset) = (ty.to_le_bytes(), offset.to_le_bytes());
    [&string(name)[..], &n_dims, &dims_bytes, &ty, &offset].concat()
}

fn pair(key: &str, ty: u32, value: &[u8]) -> Vec<u8> {
    [&string(key)[..], &ty.to_le_bytes(), value].concat()
}

fn check_refused(bytes: &[u8], parts: &[&str]) {
    let text = open(bytes)
        .expect_err("hostile files are refused")
        .to_string();
    for part in parts {
        assert!(text.contains(part), "no '{part}' in: {text}");
    }
}

#[test]
fn other_formats_and_versions_are_distinguished() {
    check_refused(b"", &["not a GGUF file", "nothing"]);
    check_refused(b"PK\x03\x04rest", &["not a GGUF file", "PK\\x03\\x04"]);
    check_refused(&raw(1, 0, 0, &[]), &["version 1", "2 and 3"]);
    check_refused(&raw(4, 0, 0, &[]), &["version 4"]);
    check_refused(&raw(3u32.swap_bytes(), 0, 0, &[]), &["big-endian"]);
    check_refused(
        b"GGUF\x03\0",
        &["header", "version", "4 bytes wanted, 2 left"],
    );
    open(&raw(3, 0, 0, &[])).unwrap();
}

#[test]
fn counts_are_checked_before_allocation() {
    check_refused(
        &raw(3, u64::MAX, 0, &[]),
        &["tensor count", "byte 8", "only 0 can fit"],
    );
    check_refused(
        &raw(3, 0, 1 << 60, &[&[0; 26]]),
        &["metadata count", "byte 16", "only 2 can"],
    );
    for ty in 0..13u32 {
        let array = [&ty.to_le_bytes()[..], &(1u64 << 50).to_le_bytes(), &[0; 64]].concat();
        check_refused(
            &raw(3, 0, 1, &[&pair("k", 9, &array)]),
            &["key k", "array length"],
        );
    }
    let long = [&(1u64 << 62).to_le_bytes()[..], b"abc"].concat();
    check_refused(
        &raw(3, 0, 1, &[&pair("k", 8, &long)]),
        &["key k", "value", "but only 3 are left"],
    );
}

#[test]
fn invalid_metadata_is_refused_with_its_key() {
    let twice = [pair("k", 0, &[1]), pair("k", 0, &[2])].concat();
    check_refused(
        &raw(3, 0, 2, &[&twice]),
        &["key k", "there already", "byte 38"],
    );
    check_refused(
        &raw(3, 0, 1, &[&pair("k", 13, &[0; 8])]),
        &["key k", "value type", "13"],
    );
    check_refused(
        &raw(3, 0, 1, &[&pair("k", 7, &[2])]),
        &["key k", "2 is not a bool"],
    );
    check_refused(
        &raw(3, 0, 1, &[&pair("\u{1b}[31m", 7, &[2])]),
        &["key \\u{1b}[31m"],
    );
    let not_utf8 = [&2u64.to_le_bytes()[..], b"\xff\xfe", &[0; 5]].concat();
    check_refused(
        &raw(3, 0, 1, &[&not_utf8]),
        &["metadata pair 0", "key", "not UTF-8"],
    );
    let long_key = pair(&"k".repeat(70_000), 0, &[1]);
    check_refused(&raw(3, 0, 1, &[&long_key]), &["key", "70000", "65535"]);
    for alignment in [0u32, 24] {
        let set = pair("general.alignment", 4, &alignment.to_le_bytes());
        check_refused(
            &raw(3, 0, 1, &[&set]),
            &["general.alignment", "power of two"],
        );
    }
    let depth = |n: usize| {
        let arrays = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()]
            .concat()
            .repeat(n);
        let inner = [&0u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[5]].concat();
        raw(3, 0, 1, &[&pair("deep", 9, &[arrays, inner].concat())])
    };
    open(&depth(7)).unwrap();
    check_refused(&depth(8), &["key deep", "nested deeper than 8"]);
    check_refused(&depth(100_000), &["key deep", "nested deeper than 8"]);
}

#[test]
fn invalid_tensor_entries_are_refused_with_their_name() {
    let data = [0; 4096];
    let one = |entry: Vec<u8>| raw(3, 1, 0, &[&entry, &data]);
    open(&one(entry("t", &[32, 2], 8, 0))).unwrap();
    let cases: [(Vec<u8>, &[&str]); 13] = [
        (entry("", &[1], 0, 0), &["tensor 0", "name is empty"]),
        (
            entry(&"n".repeat(64), &[1], 0, 0),
            &["tensor 0", "64 bytes", "limit is 63"],
        ),
        (
            entry("t", &[], 0, 0),
            &["tensor t", "dimension count", "1 to 4"],
        ),
        (entry("t", &[1; 5], 0, 0), &["tensor t", "5 dimensions"]),
        (entry("t", &[4, 0], 0, 0), &["tensor t", "4 x 0", "zero"]),
        (
            entry("t", &[1 << 32, 1 << 32], 0, 0),
            &["tensor t", "overflows 64 bits"],
        ),
        (
            entry("t", &[1 << 62], 0, 0),
            &["tensor t", "size overflows"],
        ),
        (
            entry("t", &[33], 8, 0),
            &["tensor t", "rows of 33", "Q8_0", "blocks of 32"],
        ),
        (
            entry("t", &[255], 12, 0),
            &["tensor t", "Q4_K", "blocks of 256"],
        ),
        (
            entry("t", &[1], 0, 8),
            &["tensor t", "offset", "8 is not a multiple", "32"],
        ),
        (
            entry("t", &[1], 0, 1 << 62),
            &["tensor t", "truncated or damaged"],
        ),
        (
            entry("t", &[1], 0, u64::MAX - 31),
            &["tensor t", "truncated or damaged"],
        ),
        (
            entry("t", &[1 << 20], 0, 0),
            &["tensor t", "4194304 bytes", "truncated or damaged"],
        ),
    ];
    for (entry, parts) in cases {
        check_refused(&one(entry), parts);
    }
    let two = |a: Vec<u8>, b: Vec<u8>| raw(3, 2, 0, &[&a, &b, &data]);
    let same = two(entry("t", &[1], 0, 0), entry("t", &[1], 0, 32));
    check_refused(&same, &["tensor t", "name", "same name"]);
    let overlap = two(entry("a", &[16], 0, 0), entry("b", &[1], 0, 32));
    check_refused(&overlap, &["tensor b", "which a occupies"]);
}

#[test]
fn tensors_of_unknown_types_load_without_bytes() {
    let bytes = raw(3, 1, 0, &[&entry("t", &[32], 41, 0), &[0; 64]]);
    let file = open(&bytes).unwrap();
    let info = file.tensor("t").unwrap();
    assert_eq!((info.n_bytes(), info.weight()), (None, None));
    assert!(file.data(info).is_empty());
}
