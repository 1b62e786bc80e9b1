//! The store under `kill -9`. Whenever a writer dies, another process finds complete and correct
//! states only, no file is left over, and the budget holds.

#![allow(clippy::print_stdout, reason = "figures for runs with --nocapture")]
#![allow(clippy::unwrap_used, reason = "all of this file is a test")]
#![allow(
    clippy::disallowed_methods,
    reason = "the test passes parameters to its own child process"
)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use contract::TokenId;
use contract::snapshot::SequentialReader;
use decode::Store;
use server::engine::store::{DiskStore, StoreConfig};

const BUDGET: u64 = 3 << 20;
/// Set for the process to be killed.
const VICTIM: &str = "STORE_VICTIM";
/// What that process prints before it opens the store.
const BEGUN: &str = "the writer begins";
/// Default number of kills.
const FEW: u64 = 12;

fn config(dir: &Path) -> StoreConfig {
    StoreConfig {
        dir: dir.to_path_buf(),
        budget: BUDGET,
        owner: [3; 16],
    }
}

fn tokens(state: u64) -> Vec<TokenId> {
    let n = 300 + state % 700;
    (0..n)
        .map(|i| TokenId((i * 31 + state * 7919) as u32 % 50_000))
        .collect()
}

/// The payload of these tokens; another payload is a wrong hit.
fn payload(tokens: &[TokenId]) -> Vec<u8> {
    let seed = tokens.iter().fold(1_u64, |seed, token| {
        (seed ^ u64::from(token.0))
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1)
    });
    let n = 20_000 + (seed >> 40) as usize % 200_000;
    let mut state = seed;
    let byte = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(seed | 1);
        (state >> 56) as u8
    };
    (0..n).map(byte).collect()
}

/// The process to be killed, if this executable is started as one. Its standard input names the
/// folder and the first state.
#[test]
fn victim() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    println!("{BEGUN}");
    let mut lines = BufReader::new(std::io::stdin()).lines();
    let dir = PathBuf::from(lines.next().unwrap().unwrap());
    let mut state: u64 = lines.next().unwrap().unwrap().parse().unwrap();
    loop {
        let mut store = DiskStore::open(config(&dir)).unwrap();
        for _ in 0..5 {
            let tokens = tokens(state);
            store.put(&tokens, Box::new(payload(&tokens)));
            state += 1;
        }
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let owners = fs::read_dir(dir)
        .unwrap()
        .flatten()
        .filter(|e| e.path().is_dir());
    let files = owners.flat_map(|owner| fs::read_dir(owner.path()).unwrap().flatten());
    files.map(|file| file.path()).collect()
}

fn kill(times: u64) {
    let dir = tempfile::tempdir().unwrap();
    let mut found = 0;
    for round in 0..times {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim", "--nocapture"])
            .env(VICTIM, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = format!("{}\n{}\n", dir.path().display(), round * 1000);
        child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(start.as_bytes())
            .unwrap();
        // A busy machine may take long to start the process.
        let stdout = BufReader::new(child.stdout.take().unwrap());
        assert!(stdout.lines().any(|line| line.unwrap().contains(BEGUN)));
        std::thread::sleep(Duration::from_millis(15 + round * 37 % 120));
        // `kill` sends SIGKILL.
        child.kill().unwrap();
        child.wait().unwrap();
        let mut store = DiskStore::open(config(dir.path())).unwrap();
        let kept = store.token_lists();
        for tokens in &kept {
            let prompt = [&tokens[..], &[TokenId(1), TokenId(2)]].concat();
            let state = store.find(&prompt, 0, prompt.len()).unwrap();
            assert_eq!(state.position, tokens.len());
            let mut bytes = Vec::new();
            SequentialReader::new(&*state.source)
                .read_to_end(&mut bytes)
                .unwrap();
            assert!(bytes == payload(tokens), "kill {round}: a wrong hit");
        }
        found += kept.len();
        let left = files(dir.path());
        assert_eq!(
            left.len(),
            kept.len(),
            "kill {round}: files are left over: {left:?}"
        );
        let bytes: u64 = left
            .iter()
            .map(|file| fs::metadata(file).unwrap().len())
            .sum();
        assert!(bytes <= BUDGET, "round {round}: {bytes} bytes");
    }
    assert!(found as u64 > times, "only {found} states were found");
    println!("{times} kills, {found} correct states found");
}

/// Kills the writer twelve times, or `STORE_KILLS` times.
#[test]
fn killed_writer_leaves_complete_states_or_none() {
    let times = std::env::var("STORE_KILLS").map_or(FEW, |text| text.parse().unwrap());
    kill(times);
}
