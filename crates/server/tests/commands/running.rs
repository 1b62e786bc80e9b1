//! Tests of the commands that run a model: `eval` and `run`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::process::{command, good, hearth, hearth_with, ids, model};

/// Reads a NumPy file of f32 `[rows, cols]`.
fn npy(path: &Path) -> (usize, usize, Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..start]).unwrap();
    assert!(
        header.contains("'descr': '<f4', 'fortran_order': False"),
        "{header}"
    );
    let shape = header.split(['(', ')']).nth(1).unwrap();
    let sizes: Vec<usize> = shape.split(", ").map(|n| n.parse().unwrap()).collect();
    let (values, rest) = bytes[start..].as_chunks::<4>();
    assert!(rest.is_empty() && values.len() == sizes[0] * sizes[1]);
    (
        sizes[0],
        sizes[1],
        values.iter().map(|v| f32::from_le_bytes(*v)).collect(),
    )
}

/// The token with the largest logit; of equal ones the lowest id.
fn argmax(row: &[f32]) -> usize {
    (0..row.len())
        .max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a)))
        .unwrap()
}

#[test]
fn eval_writes_a_row_per_id_and_simd_agrees_with_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let (fast, reference) = (
        dir.path().join("fast.npy"),
        dir.path().join("reference.npy"),
    );
    good("eval {} --ids {} --logits {}", &[&model(), &ids(), &fast]);
    good(
        "eval {} --cpu-reference --ids {} --logits {}",
        &[&model(), &ids(), &reference],
    );
    let (rows, cols, fast) = npy(&fast);
    assert_eq!((rows, cols), (70, 1024));
    let (_, _, reference) = npy(&reference);
    let spread = reference.iter().map(|x| f64::from(x.abs())).sum::<f64>() / reference.len() as f64;
    let error = |i: usize| f64::from((fast[i] - reference[i]).abs());
    let mean = (0..fast.len()).map(error).sum::<f64>() / fast.len() as f64;
    assert!(spread > 0.1, "the logits are nearly constant: {spread}");
    assert!(mean < 0.06, "mean error {mean} at a spread of {spread}");
}

#[test]
fn eval_is_independent_of_the_prefill_chunk_and_of_the_number_of_devices() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.path().join(format!("{name}.npy")));
    good(
        "eval {} --ids {} --logits {} --chunk 64",
        &[&model(), &ids(), &a],
    );
    good("eval {} --ids {} --logits {}", &[&model(), &ids(), &b]);
    let split = "eval {} --ids {} --logits {} --target-devices cpu,cpu";
    good(split, &[&model(), &ids(), &c]);
    let [a, b, c] = [a, b, c].map(|path| fs::read(path).unwrap());
    assert!(a == b, "another chunk");
    assert!(a == c, "two devices");
}

#[test]
fn greedy_continuation_follows_the_argmax() {
    let dir = tempfile::tempdir().unwrap();
    let (logits, out) = (dir.path().join("l.npy"), dir.path().join("o.json"));
    good(
        "eval {} --ids {} --logits {} --greedy 5 --out-ids {}",
        &[&model(), &ids(), &logits, &out],
    );
    let (_, cols, values) = npy(&logits);
    let greedy: Vec<usize> = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    assert_eq!(greedy.len(), 5);
    assert_eq!(greedy[0], argmax(&values[values.len() - cols..]));
    // With the continuation as input, each of its tokens is the argmax of the row before it.
    let mut all: Vec<usize> = serde_json::from_slice(&fs::read(ids()).unwrap()).unwrap();
    let n = all.len();
    all.extend(&greedy);
    let longer = dir.path().join("ids.json");
    fs::write(&longer, format!("{all:?}")).unwrap();
    good(
        "eval {} --ids {} --logits {}",
        &[&model(), &longer, &logits],
    );
    let (_, _, values) = npy(&logits);
    for (i, expected) in greedy.iter().enumerate() {
        let row = &values[(n - 1 + i) * cols..][..cols];
        assert_eq!(argmax(row), *expected, "step {i}");
    }
}

#[test]
fn bench_without_a_model_measures_the_bundled_one() {
    let line = "bench --device cpu --pp 16 --tg 2 --verify 1 --depth 16 --reps 1";
    let done = good(line, &[]);
    assert!(done.err.contains("model ember"), "{}", done.err);
    for case in ["pp 16", "tg 2", "verify 1"] {
        assert!(done.out.contains(case), "{case} in {}", done.out);
    }
}

#[test]
fn bench_measures_the_models_own_head() {
    let line = "bench --synthetic tiny-hybrid+mtp:q4_k_m --device cpu --pp 0 --tg 2 --verify 1 \
                --depth 16 --reps 1";
    let done = good(line, &[]);
    for case in ["mtp 1 ", "mtp 7 ", "mtp 7 wide"] {
        assert!(done.out.contains(case), "{case} in {}", done.out);
    }
}

#[test]
fn run_writes_reply_to_stdout_and_timings_to_stderr() {
    let model = model();
    let args = [
        "run",
        model.to_str().unwrap(),
        "Hello",
        "-n",
        "8",
        "--seed",
        "1",
    ];
    let first = hearth(&args);
    assert_eq!(first.code, Some(0), "{}", first.err);
    assert!(!first.out.trim().is_empty() && first.out.ends_with('\n'));
    assert!(!first.out.contains('\x1b'), "a pipe gets no colours");
    assert!(
        first.err.contains("tokens/s") && first.err.contains("8 tokens"),
        "{}",
        first.err
    );
    assert_eq!(hearth(&args).out, first.out, "a seed repeats the reply");
}

#[test]
fn run_reads_prompt_from_stdin_and_defaults_to_the_bundled_model() {
    let model = model();
    let name = model.to_str().unwrap();
    let flags = ["-n", "8", "--seed", "1", "--temperature", "0"];
    let by_word = hearth(&[&["run", name, "Hello"], &flags[..]].concat());
    let by_input = hearth_with(b"Hello\n", &[&["run", name], &flags[..]].concat());
    assert_eq!(by_input.out, by_word.out);
    let without = hearth(&["run", "Hello", "-n", "4"]);
    assert_eq!(without.code, Some(0), "{}", without.err);
    assert!(without.err.contains("a toy"), "{}", without.err);
    let empty = hearth(&["run", name]);
    assert_eq!(empty.code, Some(1));
    assert!(empty.err.contains("no prompt"), "{}", empty.err);
}

#[test]
fn interrupt_ends_the_reply_and_not_the_program() {
    let model = model();
    let mut child = command()
        .args([
            "run",
            model.to_str().unwrap(),
            "--cpu-reference",
            "--chunk",
            "64",
        ])
        .args(["--log", "debug", &"word ".repeat(2500)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut log = Vec::new();
    // Prefill takes far longer than a signal needs to arrive.
    for line in lines.map(Result::unwrap) {
        if line.contains("generating") {
            let kill = format!("kill -INT {}", child.id());
            assert!(
                Command::new("sh")
                    .args(["-c", &kill])
                    .status()
                    .unwrap()
                    .success()
            );
        }
        log.push(line);
    }
    assert_eq!(child.wait().unwrap().code(), Some(0), "{log:?}");
    assert!(log.last().unwrap().contains("0 tokens, cut off"), "{log:?}");
}
