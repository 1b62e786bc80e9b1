//! Tests of the commands that read and write GGUF files.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::process::{command, good, hearth, hearth_with, model};

/// The report of `hearth inspect`.
fn inspected(path: &std::path::Path) -> Value {
    serde_json::from_str(&good("inspect {} --json --tensors --metadata", &[path]).out).unwrap()
}

#[test]
fn quantized_file_has_the_recipes_types_and_the_same_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("small.gguf");
    let done = good("quantize {} {} q4_k_m", &[&model(), &small]);
    assert!(done.err.contains("small.gguf: 56 tensors"), "{}", done.err);
    let (before, after) = (inspected(&model()), inspected(&small));
    assert!(before["types"]["BF16"]["tensors"].as_u64() > Some(20));
    assert!(
        after["types"]["Q4_K"]["tensors"].as_u64() > Some(10),
        "{}",
        after["types"]
    );
    assert!(after["types"]["Q6_K"]["tensors"].as_u64() > Some(0));
    assert!(after["types"].get("BF16").is_none());
    for key in ["weights", "tensors", "architecture"] {
        assert_eq!(before["file"][key], after["file"][key], "{key}");
    }
    assert_eq!(before["model"], after["model"]);
    assert_eq!(before["vocabulary"], after["vocabulary"]);
    assert!(after["file"]["bits_per_weight"].as_f64() < Some(7.0));
    let sum: u64 = after["types"]
        .as_object()
        .unwrap()
        .values()
        .map(|ty| ty["tensors"].as_u64().unwrap())
        .sum();
    assert_eq!(sum, after["tensors"].as_array().unwrap().len() as u64);
    let names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["small.gguf"], "no temporary file is left");
}

#[test]
fn importance_matrix_of_a_text_makes_a_two_bit_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (wide, matrix, small) = (path("wide.gguf"), path("matrix.gguf"), path("small.gguf"));
    good("synth tiny-dense:bf16 {}", &[&wide]);
    let text = path("text.txt");
    fs::write(&text, "One fox jumps over two lazy dogs. ".repeat(60)).unwrap();
    let words = [
        "quantize",
        wide.to_str().unwrap(),
        small.to_str().unwrap(),
        "iq2_m",
    ];
    let without = hearth(&words);
    assert_eq!(without.code, Some(1));
    assert!(without.err.contains("--imatrix FILE"), "{}", without.err);
    good(
        "imatrix {} {} --text {} --chunk-tokens 64 --chunks 2",
        &[&wide, &matrix, &text],
    );
    good(
        "quantize {} {} iq2_m --imatrix {}",
        &[&wide, &small, &matrix],
    );
    let types = &inspected(&small)["types"];
    assert!(types["IQ2_S"]["tensors"].as_u64() > Some(3), "{types}");
}

#[test]
fn inspect_prints_sizes_types_and_the_memory_plan() {
    let text = good(
        "inspect {} --max-ctx 2048 --kv-type q8_0 --tensors --metadata",
        &[&model()],
    )
    .out;
    for part in [
        "architecture        qwen35",
        "BF16",
        "layers              4",
        "delta value heads   6",
        "tokens              1024",
        "context             2048",
        "keys                q8_0",
        "blk.0.ssm_conv1d.weight",
        "qwen35.context_length: u32 = 8192",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}

#[test]
fn memory_plan_grows_with_context_and_reports_a_misfit() {
    let plan = |flags: &str| -> Value {
        let done = good(&format!("inspect {{}} --json {flags}"), &[&model()]);
        serde_json::from_str::<Value>(&done.out).unwrap()["plan"].clone()
    };
    let short = plan("--max-ctx 1024");
    let long = plan("--max-ctx 4096");
    let bytes = |plan: &Value| plan["cache_bytes"].as_u64().unwrap();
    // F16 keys and values of one attention layer with one head of size 256, for four sequences.
    assert_eq!(bytes(&long) - bytes(&short), 3072 * 4 * 2 * 256 * 2);
    let too_long = plan("--max-ctx 16777216 --max-sequences 64 --kv-pool 1073741824");
    assert!(
        too_long["does_not_fit"]
            .as_str()
            .unwrap()
            .contains("--max-ctx"),
        "{too_long}"
    );
}

#[test]
fn plan_places_a_model_on_gpus_that_are_not_here() {
    let plan = |flags: &str| -> Value {
        let done = good(&format!("inspect {{}} --json --plan {flags}"), &[&model()]);
        serde_json::from_str(&done.out).unwrap()
    };
    let report = plan("--vram 24GiB,12GiB --target-devices cuda:0,cuda:1 --target-layer-split 1,3");
    let parts = report["placement"].as_array().unwrap();
    let of = |key: &str| {
        parts
            .iter()
            .map(|part| part[key].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(of("device"), ["cuda:0", "cuda:1"]);
    assert_eq!(
        (of("first_layer"), of("layers")),
        (vec![0.into(), 1.into()], vec![1.into(), 3.into()])
    );
    assert_eq!(of("head"), [false, true]);
    // A quarter of a gigabyte holds no layer beside the driver's memory; the other GPU has room.
    let report = plan("--vram 24GiB,256MiB");
    let why = report["plan"]["does_not_fit"].as_str().unwrap();
    for part in ["cuda:1 lacks", "cuda:0 has", "--target-layer-split"] {
        assert!(why.contains(part), "{part} in {why}");
    }
}

#[test]
fn plan_shows_the_scorer_and_what_yields_to_it() {
    let plan = |flags: &str| -> Value {
        let line = format!("inspect {{}} --json --plan --prefill-drafter {{}} {flags}");
        serde_json::from_str(&good(&line, &[&model(), &model()]).out).unwrap()
    };
    let roomy = plan("--vram 24GiB");
    assert_eq!(roomy["scorer"]["longest_prompt"], 262_144);
    let bytes = roomy["scorer"]["device_bytes"].as_u64().unwrap();
    let room = |report: &Value| report["memory"]["room_bytes"].as_u64().unwrap();
    let done = good("inspect {} --json --plan --vram 24GiB", &[&model()]);
    let without: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(room(&without) - room(&roomy), bytes);
    let narrow = plan("--vram 2GiB");
    let yields = narrow["scorer"]["yields"].as_str().unwrap();
    assert!(
        yields.contains("the scorer reads prompts of up to"),
        "{narrow}"
    );
}

#[test]
fn synth_is_deterministic_by_seed() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for (name, seed) in [("a", 7), ("b", 7), ("c", 8)] {
        good(
            &format!("synth tiny-dense:q8_0 {{}} --seed {seed}"),
            &[&path(name)],
        );
    }
    let read = |name: &str| fs::read(path(name)).unwrap();
    assert!(read("a") == read("b"));
    assert!(read("a") != read("c"));
}

#[test]
fn existing_output_file_needs_force() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.gguf");
    fs::write(&path, "precious").unwrap();
    let (name, model) = (path.to_str().unwrap(), model());
    for args in [
        vec!["synth", "tiny-dense:q8_0", name],
        vec!["quantize", model.to_str().unwrap(), name, "q8_0"],
    ] {
        let done = hearth(&args);
        assert_eq!(done.code, Some(1));
        assert!(
            done.err.contains("mine.gguf") && done.err.contains("--force"),
            "{}",
            done.err
        );
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
    good("synth tiny-dense:q8_0 {} --force", &[&path]);
    assert!(fs::read(&path).unwrap().starts_with(b"GGUF"));
}

#[test]
fn output_that_is_the_input_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::copy(model(), at("in.gguf")).unwrap();
    fs::hard_link(at("in.gguf"), at("hard.gguf")).unwrap();
    std::os::unix::fs::symlink(at("in.gguf"), at("soft.gguf")).unwrap();
    let before = fs::read(model()).unwrap();
    for (input, output) in [
        ("in.gguf", "in.gguf"),
        ("in.gguf", "hard.gguf"),
        ("in.gguf", "soft.gguf"),
        ("soft.gguf", "in.gguf"),
    ] {
        let (input, output) = (at(input), at(output));
        let words = [
            "quantize",
            input.to_str().unwrap(),
            output.to_str().unwrap(),
            "q8_0",
            "--force",
        ];
        let done = hearth(&words);
        assert_eq!(done.code, Some(1), "{words:?}");
        assert!(done.err.contains("is the same file"), "{}", done.err);
        assert!(fs::read(at("in.gguf")).unwrap() == before, "{words:?}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn devices_and_links_are_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("link.gguf");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    let model = model();
    for output in ["/dev/null", "/dev/stdout", link.to_str().unwrap()] {
        for words in [
            vec!["synth", "tiny-dense:q8_0", output, "--force"],
            vec![
                "quantize",
                model.to_str().unwrap(),
                output,
                "q8_0",
                "--force",
            ],
        ] {
            let done = hearth(&words);
            assert_eq!(done.code, Some(1), "{words:?}: {}", done.err);
            assert!(
                done.err.contains("not a plain file") || done.err.contains("symbolic link"),
                "{}",
                done.err
            );
        }
    }
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

/// The names in a directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn signals_leave_no_part_of_a_file() {
    // Writing takes far longer than a signal needs to arrive.
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("out.gguf");
        let mut child = command()
            .args(["synth", "qwen3.5-2b:bf16"])
            .arg(&output)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while names(dir.path()).is_empty() {
            assert_eq!(child.try_wait().unwrap(), None, "{signal}");
            std::thread::sleep(Duration::from_millis(2));
        }
        let kill = format!("kill -{signal} {}", child.id());
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
        assert_eq!(child.wait().unwrap().code(), Some(code), "{signal}");
        assert_eq!(names(dir.path()), [""; 0], "{signal}");
    }
}

fn tokens(text: &str, flags: &[&str]) -> Vec<u32> {
    let model = model();
    let mut args = vec!["tokenize", model.to_str().unwrap()];
    args.extend(flags);
    let done = hearth_with(text.as_bytes(), &args);
    assert_eq!(done.code, Some(0), "{}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

#[test]
fn special_tokens_are_parsed_unless_disabled() {
    let text = "Hello world<|im_end|>";
    let matched = tokens(text, &[]);
    let literal = tokens(text, &["--no-special"]);
    assert_eq!(matched.last(), Some(&1007));
    assert!(!literal.contains(&1007) && literal.len() > matched.len());
    let n = matched.len() - 1;
    assert_eq!(matched[..n], literal[..n]);
    assert_eq!(tokens("", &[]), Vec::<u32>::new());
}
