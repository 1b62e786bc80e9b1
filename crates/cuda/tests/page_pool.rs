//! KV pages shared by sequences and snapshots: results do not depend on page locations, and moves
//! lose nothing. Unit tests of the page pool cover failing copies without a GPU. Without a GPU
//! every test prints SKIPPED and passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}

use conformance::compare::{Precision, compare_rows};
use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
use contract::{
    Backend, CommitItem, KvFormat, KvFormats, Limits, LogitsRequest, LogitsRow, NodeIdx, QuantType,
    Runner, SeqId, SnapshotId, SnapshotLocation, TokenId, Tree,
};
use cuda::Options;

use fixtures::model::{ModelDevice, load_config, open_device, open_device_with, text, verify};

/// Eight device pages: four for each of two sequences.
const FEW: Limits = Limits {
    sequences: 2,
    context: 1000,
    tree_nodes: 24,
    prefill_chunk: 256,
    pool_tokens: None,
};

fn synthetic() -> SyntheticModel {
    SyntheticModel::new(SyntheticLayout::HybridEven, QuantType::Q4_K, 8)
}

fn open(device: &ModelDevice, kv: KvFormat) -> Box<dyn Runner> {
    let config = load_config(&synthetic(), KvFormats { k: kv, v: kv }, FEW);
    device.backend.open(config, &mut |_| {}).unwrap()
}

/// Decodes eight tokens with a verification tree each, and returns all rows.
fn decode_token(runner: &mut dyn Runner, seq: SeqId, salt: usize) -> Vec<LogitsRow> {
    let vocab = runner.info().vocab;
    let mut rows = Vec::new();
    for token in text(vocab, 8, salt) {
        let tree = Tree::new(&[token, TokenId(1), TokenId(2)], &[NodeIdx::ROOT; 2]).unwrap();
        rows.extend(verify(runner, seq, &tree));
        let path = tree.path_to(NodeIdx::ROOT);
        runner.commit(&[CommitItem { seq, path: &path }]).unwrap();
    }
    rows
}

fn same(what: &str, found: &[LogitsRow], expected: &[LogitsRow]) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = compare_rows(found, expected, Precision::BitExact);
        same.unwrap_or_else(|e| panic!("{what}, row {i}: {e}"));
    }
}

/// Prefills a prompt in chunks that end inside pages. Returns the last token's row.
fn prefill_tokens(runner: &mut dyn Runner, seq: SeqId, n: usize, salt: usize) -> Vec<LogitsRow> {
    let prompt = text(runner.info().vocab, n, salt);
    let mut rows = Vec::new();
    for chunk in prompt.chunks(192) {
        rows = runner
            .prefill(seq, chunk, &[(chunk.len() - 1, LogitsRequest::full())])
            .unwrap();
    }
    rows
}

/// Bit-identical for contiguous and scattered pages.
#[test]
fn page_locations_do_not_affect_results() {
    let (Some(straight), Some(scattered)) = (
        open_device(false),
        open_device_with(Options {
            scatter_pages: true,
            ..Options::default()
        }),
    ) else {
        return;
    };
    for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0, KvFormat::Q4_0] {
        let rows_by_layout = [&straight, &scattered].map(|device| {
            let mut runner = open(device, kv);
            let mut rows = Vec::new();
            let (a, b) = (runner.open(1000).unwrap(), runner.open(1000).unwrap());
            for (seq, n) in [(a, 700), (b, 513)] {
                rows.extend(prefill_tokens(&mut *runner, seq, n, 3));
            }
            for _ in 0..3 {
                rows.extend(decode_token(&mut *runner, a, 5));
                rows.extend(decode_token(&mut *runner, b, 6));
            }
            rows
        });
        same(kv.name(), &rows_by_layout[1], &rows_by_layout[0]);
    }
}

/// Six sequences of three pages each on eight device pages. Snapshots move to the host and back
/// while other sequences decode, and each continues bit-identically.
#[test]
fn snapshots_beyond_device_memory_move_to_the_host_and_back() {
    let Some(device) = open_device(false) else {
        return;
    };
    for kv in [KvFormat::F16, KvFormat::Q8_0] {
        let mut runner = open(&device, kv);
        let runner = &mut *runner;
        let mut states: Vec<(SnapshotId, Vec<LogitsRow>)> = Vec::new();
        let other = runner.open(1000).unwrap();
        prefill_tokens(runner, other, 600, 99);
        for i in 0..6 {
            let seq = runner.open(1000).unwrap();
            prefill_tokens(runner, seq, 520 + 31 * i, i);
            let location = [SnapshotLocation::Host, SnapshotLocation::Device][i % 2];
            let saved = runner.snapshot(seq, location).unwrap();
            states.push((saved.id, decode_token(runner, seq, 7)));
            runner.close(seq);
        }
        let saved_bytes = runner.capacity().snapshot_bytes;
        for round in 0..2 {
            for (i, (id, expected)) in states.iter().enumerate() {
                let seq = runner.open(1000).unwrap();
                runner.restore(seq, *id).unwrap();
                let found = decode_token(runner, seq, 7);
                same(&format!("{} {round}/{i}", kv.name()), &found, expected);
                runner.close(seq);
                // Another sequence continues meanwhile.
                decode_token(runner, other, i);
            }
        }
        assert_eq!(runner.capacity().snapshot_bytes, saved_bytes);
        // A prefill from the start gives the same rows.
        let mut fresh = open(&device, kv);
        let seq = fresh.open(1000).unwrap();
        prefill_tokens(&mut *fresh, seq, 520 + 31 * 3, 3);
        let found = decode_token(&mut *fresh, seq, 7);
        same("read from its beginning", &found, &states[3].1);
        for (id, _) in states {
            runner.free_snapshot(id);
        }
        assert_eq!(runner.capacity().snapshot_bytes, 0);
    }
}

/// Snapshots of one sequence share its rows.
#[test]
fn snapshots_of_one_sequence_share_their_pages() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut runner = open(&device, KvFormat::F16);
    let seq = runner.open(1000).unwrap();
    prefill_tokens(&mut *runner, seq, 768, 1);
    let first = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let alone = runner.capacity().snapshot_bytes;
    assert_eq!(first.bytes, alone);
    runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let both = runner.capacity().snapshot_bytes;
    let empty = runner.open(1000).unwrap();
    let states_only = runner
        .snapshot(empty, SnapshotLocation::Host)
        .unwrap()
        .bytes;
    assert_eq!(both - alone, states_only);
    assert!(states_only < alone);
}

/// A detached snapshot keeps its state while its source is freed and its pages move and are
/// overwritten.
#[test]
fn detached_snapshot_keeps_the_saved_state() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut runner = open(&device, KvFormat::Q8_0);
    let runner = &mut *runner;
    let seq = runner.open(1000).unwrap();
    prefill_tokens(runner, seq, 600, 1);
    let saved = runner.snapshot(seq, SnapshotLocation::Host).unwrap();
    let mut exported = Vec::new();
    runner.export(saved.id, &mut exported).unwrap();
    let expected = decode_token(runner, seq, 7);
    let [mut early, mut late] = [(); 2].map(|()| runner.detach(saved.id).unwrap());
    assert_eq!(early.bytes(), exported.len() as u64);
    let writer = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        early.write(&mut bytes).unwrap();
        bytes
    });
    runner.free_snapshot(saved.id);
    runner.close(seq);
    // Two sequences take all eight pages, so the detached pages move to the host.
    for salt in 0..3 {
        let seqs = [(); 2].map(|()| runner.open(1000).unwrap());
        for seq in seqs {
            prefill_tokens(runner, seq, 990, 20 + salt);
        }
        seqs.into_iter().for_each(|seq| runner.close(seq));
    }
    assert!(
        writer.join().unwrap() == exported,
        "written while others read"
    );
    let mut bytes = Vec::new();
    late.write(&mut bytes).unwrap();
    assert!(bytes == exported, "written after its pages had moved");
    drop(late);
    assert_eq!(runner.capacity().snapshot_bytes, 0);
    // Import once into free device pages, and once with none free.
    let other = runner.open(1000).unwrap();
    for n in [0, 990] {
        prefill_tokens(runner, other, n, 40);
        let full = (n > 0).then(|| runner.snapshot(other, SnapshotLocation::Host).unwrap());
        let imported = runner.import(&mut &exported[..]).unwrap();
        let again = runner.import(&mut &exported[..]).unwrap();
        let seq = runner.open(1000).unwrap();
        for id in [imported.id, again.id] {
            runner.restore(seq, id).unwrap();
            let found = decode_token(runner, seq, 7);
            same("read from what was exported", &found, &expected);
        }
        runner.close(seq);
        for id in [imported.id, again.id]
            .into_iter()
            .chain(full.map(|f| f.id))
        {
            runner.free_snapshot(id);
        }
    }
}

/// Snapshots are copied concurrently with steps. Later work on the sequence, and new owners of its
/// memory, wait for the copies.
#[test]
fn snapshots_are_saved_and_restored_while_steps_run() {
    let Some(device) = open_device(false) else {
        return;
    };
    let mut runner = open(&device, KvFormat::F16);
    let runner = &mut *runner;
    let seq = runner.open(1000).unwrap();
    prefill_tokens(runner, seq, 320, 3);
    let saved = runner.snapshot(seq, SnapshotLocation::Host).unwrap().id;
    // This overwrites every state while the previous copy is still running.
    let rows = prefill_tokens(runner, seq, 256, 4);
    runner.restore(seq, saved).unwrap();
    let decoded = decode_token(runner, seq, 5);
    for location in [SnapshotLocation::Host, SnapshotLocation::Device].repeat(4) {
        runner.restore(seq, saved).unwrap();
        let again = runner.snapshot(seq, location).unwrap().id;
        same("read on", &prefill_tokens(runner, seq, 256, 4), &rows);
        runner.restore(seq, again).unwrap();
        runner.free_snapshot(again);
        // Reuses the memory of the previous sequence, with another state.
        let other = runner.open(1000).unwrap();
        let empty = runner.snapshot(other, location).unwrap().id;
        same("decoded", &decode_token(runner, seq, 5), &decoded);
        runner.free_snapshot(empty);
        runner.close(other);
    }
}
