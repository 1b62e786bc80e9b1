//! Converting whole files: what changes, what stays, and what is never left behind.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::fs;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use contract::{QuantType, quant};
use gguf::{FileBytes, GgufFile, TensorInfo, TensorType, Value};
use model::quantize::{QuantizeOptions, QuantizeReport, quantize};
use model::recipe::Recipe;
use model::synth::SynthSpec;

/// A synthetic file in a folder of its own.
fn synthetic(dir: &Path, spec: &str) -> PathBuf {
    let path = dir.join("in.gguf");
    fs::write(&path, SynthSpec::parse(spec).unwrap().bytes().unwrap()).unwrap();
    path
}

fn run(input: &Path, recipe: Recipe, threads: usize) -> (PathBuf, QuantizeReport) {
    let output = input.with_file_name(format!("{}-{threads}.gguf", recipe.name()));
    let mut last = 0;
    let (report, _) = quantize(
        input,
        BufWriter::new(fs::File::create(&output).unwrap()),
        &QuantizeOptions { recipe, threads },
        &mut |progress| {
            assert!(progress.done_bytes >= last && progress.done_bytes <= progress.total_bytes);
            last = progress.done_bytes;
        },
    )
    .unwrap();
    assert_eq!(last, report.input_bytes);
    (output, report)
}

fn values(file: &GgufFile, info: &TensorInfo) -> Vec<f32> {
    let TensorType::Known(ty) = info.ty() else {
        panic!()
    };
    let mut values = vec![0.0; info.values() as usize];
    quant::dequantize_row(ty, file.data(info), &mut values);
    values
}

#[test]
fn rows_equal_the_codec_output() {
    let dir = tempfile::tempdir().unwrap();
    let input = synthetic(dir.path(), "tiny-hybrid:f32");
    let before = GgufFile::open(&input).unwrap();
    for recipe in Recipe::ALL {
        let (output, report) = run(&input, recipe, 2);
        let after = GgufFile::open(&output).unwrap();
        assert_eq!(report.tensors.len(), before.tensors().len());
        assert_eq!(report.requantised(), 0);
        for (change, info) in report.tensors.iter().zip(before.tensors()) {
            let made = after.tensor(&change.name).unwrap();
            assert_eq!(made.ty(), TensorType::Known(change.to));
            assert_eq!(made.dims(), info.dims());
            let mut expected = vec![0; after.data(made).len()];
            quant::quantize_row(change.to, &values(&before, info), &mut expected);
            assert!(
                after.data(made) == expected,
                "{} of {}",
                change.name,
                recipe.name()
            );
        }
    }
}

#[test]
fn thread_count_does_not_change_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let input = synthetic(dir.path(), "tiny-hybrid-r1:bf16");
    let (one, _) = run(&input, Recipe::Q4_K_M, 1);
    let (three, _) = run(&input, Recipe::Q4_K_M, 3);
    assert!(fs::read(one).unwrap() == fs::read(three).unwrap());
}

#[test]
fn metadata_is_kept_except_the_file_type() {
    let dir = tempfile::tempdir().unwrap();
    let input = synthetic(dir.path(), "tiny-dense:f16");
    let (output, _) = run(&input, Recipe::Q8_0, 2);
    let (before, after) = (
        GgufFile::open(&input).unwrap(),
        GgufFile::open(&output).unwrap(),
    );
    assert_eq!(after.meta().get("general.file_type"), Some(&Value::U32(7)));
    assert_eq!(after.meta().len(), before.meta().len());
    for (key, value) in before
        .meta()
        .iter()
        .filter(|(key, _)| *key != "general.file_type")
    {
        assert_eq!(after.meta().get(key), Some(value), "{key}");
    }
    assert!(model::load(&output).is_ok());
}

#[test]
fn tensors_of_the_target_type_are_copied_and_others_requantized() {
    let dir = tempfile::tempdir().unwrap();
    let input = synthetic(dir.path(), "tiny-hybrid:q4_k_m");
    let (output, same) = run(&input, Recipe::Q4_K_M, 2);
    assert_eq!(same.requantised(), 0);
    let (before, after) = (
        GgufFile::open(&input).unwrap(),
        GgufFile::open(&output).unwrap(),
    );
    for info in before.tensors() {
        assert!(before.data(info) == after.data(after.tensor(info.name()).unwrap()));
    }
    let (_, smaller) = run(&input, Recipe::Q4_0, 2);
    let twice = |c: &&model::quantize::Change| c.to == QuantType::Q4_0;
    assert_eq!(
        smaller.requantised(),
        smaller.tensors.iter().filter(twice).count()
    );
    assert!(smaller.requantised() > 0);
}

#[test]
fn conversion_is_written_to_any_writer_and_its_input_stays() {
    let dir = tempfile::tempdir().unwrap();
    let input = synthetic(dir.path(), "tiny-dense:bf16");
    let options = QuantizeOptions {
        recipe: Recipe::Q8_0,
        threads: 2,
    };
    let before = fs::read(&input).unwrap();
    let (report, out) = quantize(&input, Vec::new(), &options, &mut |_| {}).unwrap();
    assert!(report.output_bytes < report.input_bytes);
    assert!(model::load_bytes("out", FileBytes::shared(out.into())).is_ok());
    assert!(fs::read(&input).unwrap() == before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn refused_inputs_write_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in.gguf");
    fs::write(&input, b"GGUF\x03\0\0\0 nothing good").unwrap();
    let options = QuantizeOptions {
        recipe: Recipe::Q8_0,
        threads: 2,
    };
    let mut out = Vec::new();
    let error = quantize(&input, &mut out, &options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("in.gguf"), "{error}");
    assert_eq!(out, [0; 0]);
}
