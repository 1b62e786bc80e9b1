//! Damaged drafts in every file format: each loads, or is refused with its file's name.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use model::{DraftOptions, LoadedDraft, ModelError};

use crate::export::{DraftFileFormat, Export, target};

/// Damaged files of each container.
const FILES: u64 = 5_000;
/// One file in so many is also cut.
const CUT_EVERY: u64 = 25;
const NUMBERS: [u64; 8] = [
    0,
    1,
    255,
    1 << 31,
    u32::MAX as u64,
    1 << 40,
    1 << 63,
    u64::MAX,
];

/// Knuth's MMIX generator, of which the high bits are used.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    /// One changed bit, byte, number or copied stretch before `end`.
    fn damage(&mut self, bytes: &mut [u8], end: usize) {
        let at = self.below(end - 8);
        match self.below(4) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => bytes[at] = self.below(256) as u8,
            2 => {
                let number = NUMBERS[self.below(NUMBERS.len())].to_le_bytes();
                let width = if self.below(2) == 0 { 4 } else { 8 };
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            _ => {
                let from = self.below(end - 8);
                bytes.copy_within(from..from + 8, at);
            }
        }
    }
}

/// Damages the first `head` bytes of a file in place, loads, and restores the file.
///
/// Returns how many of `times` damaged files were refused.
fn damage_and_load(path: &Path, head: usize, times: u64, load: impl Fn() -> Loaded) -> u64 {
    let whole = fs::read(path).unwrap();
    let head = head.min(whole.len());
    let mut draws = Draws(whole.len() as u64);
    let mut refused = 0;
    for number in 0..times {
        let mut bytes = whole[..head].to_vec();
        for _ in 0..=draws.below(3) {
            draws.damage(&mut bytes, head);
        }
        let mut file = File::options().write(true).open(path).unwrap();
        file.write_all(&bytes).unwrap();
        let is_cut = number % CUT_EVERY == 0;
        if is_cut {
            file.set_len(draws.below(whole.len()) as u64).unwrap();
        }
        match load() {
            Ok(draft) => assert!(!draft.spec.layers.is_empty() && draft.spec.depth() > 0),
            Err(error) => {
                let text = error.to_string();
                let name = path.file_stem().unwrap().to_str().unwrap();
                let folder = path.parent().unwrap().to_str().unwrap();
                assert!(
                    text.contains(name) || text.contains(folder),
                    "{number}: {text}"
                );
                refused += 1;
            }
        }
        file.seek(SeekFrom::Start(0)).unwrap();
        let changed = if is_cut { &whole[..] } else { &whole[..head] };
        file.write_all(changed).unwrap();
    }
    refused
}

type Loaded = Result<LoadedDraft, ModelError>;

#[test]
fn damaged_gguf_drafts_load_or_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let times = FILES.div_ceil(DraftFileFormat::GGUF.len() as u64);
    for file_format in DraftFileFormat::GGUF {
        let path = folder.path().join("damaged.gguf");
        fs::write(&path, Export::new(file_format).sliding().gguf()).unwrap();
        let load = || model::load_draft(&path, &target(), DraftOptions::default());
        load().unwrap();
        let refused = damage_and_load(&path, 4_000, times, load);
        assert!(
            refused > times / 2,
            "{file_format:?}: only {refused} of {times}"
        );
    }
}

#[test]
fn damaged_safetensors_drafts_load_or_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    Export::new(DraftFileFormat::Safetensors).write_safetensors(folder.path());
    let load = || model::load_draft(folder.path(), &target(), DraftOptions::default());
    load().unwrap();
    for (name, head) in [("config.json", usize::MAX), ("model.safetensors", 3_500)] {
        let path = folder.path().join(name);
        let refused = damage_and_load(&path, head, FILES / 2, load);
        assert!(refused > FILES / 8, "{name}: only {refused}");
        load().unwrap();
    }
}
