//! Copies of synthetic files with changes, and what a refusal of one has to say.

use std::sync::Arc;

use gguf::{FileBytes, GgufFile, GgufWriter, TensorType, Value};
use model::synth::SynthSpec;
use model::{LoadedModel, ModelError};

/// A synthetic file with changed metadata and other tensor names; `None` drops a tensor.
pub(crate) fn rewritten_from(
    base: &str,
    set: &[(&str, Option<Value>)],
    rename: impl Fn(&str) -> Option<String>,
) -> Result<LoadedModel, ModelError> {
    rewritten_with(base, set, |name, dims| Some((rename(name)?, dims.to_vec())))
}

/// As [`rewritten_from`], with other dimensions of as many values too.
pub(crate) fn rewritten_with(
    base: &str,
    set: &[(&str, Option<Value>)],
    change: impl Fn(&str, &[u64]) -> Option<(String, Vec<u64>)>,
) -> Result<LoadedModel, ModelError> {
    let bytes = SynthSpec::parse(base).unwrap().bytes().unwrap();
    let file = GgufFile::from_bytes("base", FileBytes::shared(Arc::from(bytes))).unwrap();
    let mut writer = GgufWriter::new();
    for (key, value) in file.meta().iter() {
        match set.iter().find(|(k, _)| *k == key) {
            Some((_, Some(new))) => writer.meta(key, new.clone()).unwrap(),
            Some((_, None)) => {}
            None => writer.meta(key, value.clone()).unwrap(),
        }
    }
    for (key, value) in set {
        if let (None, Some(value)) = (file.meta().get(key), value) {
            writer.meta(key, value.clone()).unwrap();
        }
    }
    let mut kept = Vec::new();
    for tensor in file.tensors() {
        let Some((name, dims)) = change(tensor.name(), tensor.dims()) else {
            continue;
        };
        let TensorType::Known(ty) = tensor.ty() else {
            unreachable!("synthetic types are known")
        };
        writer.tensor(&name, ty, &dims).unwrap();
        kept.push(tensor);
    }
    let mut body = writer.start(Vec::new()).unwrap();
    for tensor in kept {
        body.write(file.data(tensor)).unwrap();
    }
    let bytes = body.finish().unwrap();
    model::load_bytes("changed.gguf", FileBytes::shared(Arc::from(bytes)))
}

/// The message must name the file and every part given.
pub(crate) fn check_refused(result: Result<LoadedModel, ModelError>, parts: &[&str]) {
    let message = result
        .err()
        .expect("the file should be refused")
        .to_string();
    for part in ["changed.gguf"].iter().chain(parts) {
        assert!(message.contains(part), "no '{part}' in: {message}");
    }
}
