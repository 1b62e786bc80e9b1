//! Converting whole files: what changes, what stays, and what is never left behind.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::collections::HashMap;
use std::fs;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use contract::{QuantType, quant};
use gguf::{FileBytes, GgufFile, TensorInfo, TensorType, Value};
use model::quantize::{QuantizeOptions, QuantizeReport, quantize};
use model::recipe::Recipe;
use model::synth::SynthSpec;
use model::{ImportanceMatrix, ModelError};

/// A synthetic file in a folder of its own.
fn synthetic(dir: &Path, spec: &str) -> PathBuf {
    let path = dir.join("in.gguf");
    fs::write(&path, SynthSpec::parse(spec).unwrap().bytes().unwrap()).unwrap();
    path
}

fn run(input: &Path, recipe: Recipe, threads: usize) -> (PathBuf, QuantizeReport) {
    let output = input.with_file_name(format!("{}-{threads}.gguf", recipe.name()));
    let mut last = 0;
    let importance = recipe.needs_importance().then(|| even_importance(input));
    let (report, _) = quantize(
        input,
        BufWriter::new(fs::File::create(&output).unwrap()),
        &QuantizeOptions {
            recipe,
            threads,
            importance: importance.as_ref(),
        },
        &mut |progress| {
            assert!(progress.done_bytes >= last && progress.done_bytes <= progress.total_bytes);
            last = progress.done_bytes;
        },
    )
    .unwrap();
    assert_eq!(last, report.input_bytes);
    (output, report)
}

/// An importance matrix that has every matrix and prefers no input.
fn even_importance(input: &Path) -> ImportanceMatrix {
    let file = GgufFile::open(input).unwrap();
    let matrices = file.tensors().iter().filter(|info| info.dims().len() == 2);
    let entries =
        matrices.map(|info| (info.name().to_string(), vec![1.0; info.dims()[0] as usize]));
    ImportanceMatrix::new("even", entries.collect()).unwrap()
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
    // The slow searches of one bit and of two have one recipe each here; the codec's own tests have
    // them all.
    let is_like_others = |recipe: &Recipe| {
        !recipe.needs_importance() || matches!(recipe, Recipe::IQ1_M | Recipe::IQ2_M)
    };
    for recipe in Recipe::ALL.into_iter().filter(is_like_others) {
        let (output, report) = run(&input, recipe, 2);
        let after = GgufFile::open(&output).unwrap();
        assert_eq!(report.tensors.len(), before.tensors().len());
        assert_eq!(report.requantised(), 0);
        for (change, info) in report.tensors.iter().zip(before.tensors()) {
            let made = after.tensor(&change.name).unwrap();
            assert_eq!(made.ty(), TensorType::Known(change.to));
            assert_eq!(made.dims(), info.dims());
            let mut expected = vec![0; after.data(made).len()];
            let values = values(&before, info);
            if recipe.needs_importance() {
                let even = vec![1.0; values.len()];
                quant::quantize_row_weighted(change.to, &values, &even, &mut expected);
            } else {
                quant::quantize_row(change.to, &values, &mut expected);
            }
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
        importance: None,
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
        importance: None,
    };
    let mut out = Vec::new();
    let error = quantize(&input, &mut out, &options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("in.gguf"), "{error}");
    assert_eq!(out, [0; 0]);
}

#[test]
fn importance_changes_rows_by_column_and_must_fit_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let input = synthetic(dir.path(), "tiny-dense:f32");
    let before = GgufFile::open(&input).unwrap();
    let name = "blk.0.ffn_up.weight";
    let info = before.tensor(name).unwrap();
    let cols = info.dims()[0] as usize;
    let weights: Vec<f32> = (0..cols).map(|i| (i % 7) as f32 + 0.1).collect();
    let mut entries = HashMap::from([(name.to_owned(), weights.clone())]);
    let with = |entries: HashMap<String, Vec<f32>>, recipe| {
        let importance = ImportanceMatrix::new("some.dat", entries).unwrap();
        let options = QuantizeOptions {
            recipe,
            threads: 3,
            importance: Some(&importance),
        };
        quantize(&input, Vec::new(), &options, &mut |_| {})
    };
    let (_, out) = with(entries.clone(), Recipe::IQ3_S).unwrap();
    let after = GgufFile::from_bytes("out", FileBytes::shared(out.into())).unwrap();
    let made = after.tensor(name).unwrap();
    assert_eq!(made.ty(), TensorType::Known(QuantType::IQ3_S));
    let values = values(&before, info);
    let row_bytes = QuantType::IQ3_S.row_bytes(cols);
    let rows = values.chunks(cols).zip(after.data(made).chunks(row_bytes));
    let mut differ = 0;
    for (row, stored) in rows {
        let (mut weighted, mut plain) = (vec![0; row_bytes], vec![0; row_bytes]);
        quant::quantize_row_weighted(QuantType::IQ3_S, row, &weights, &mut weighted);
        quant::quantize_row(QuantType::IQ3_S, row, &mut plain);
        assert!(stored == weighted);
        differ += usize::from(weighted != plain);
    }
    assert!(differ > 0);
    let key = after.meta().get("quantize.imatrix.file");
    assert_eq!(key, Some(&Value::from("some.dat")));

    let error = with(entries.clone(), Recipe::IQ2_XS).unwrap_err();
    assert!(matches!(error, ModelError::Tensor { .. }), "{error}");
    entries.insert(name.to_owned(), vec![1.0; 3]);
    let error = with(entries, Recipe::IQ3_S).unwrap_err();
    assert!(matches!(error, ModelError::Importance { .. }), "{error}");
    assert!(error.to_string().contains(name), "{error}");
}
