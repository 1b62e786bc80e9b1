//! The golden files and the bundled pair that they describe.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use contract::TokenId;
use cpu::CpuOptions;
use serde_json::Value;

pub(crate) const REFERENCE: CpuOptions = CpuOptions {
    reference: true,
    threads: Some(2),
};
pub(crate) const FAST: CpuOptions = CpuOptions {
    reference: false,
    threads: Some(2),
};

pub(crate) fn ember(name: &str) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ember");
    if here.is_dir() {
        here.join(name)
    } else {
        // A test binary on another machine runs two folders below the root.
        Path::new("../../models/ember").join(name)
    }
}

pub(crate) fn cases() -> Vec<Value> {
    let text = fs::read(ember("golden/golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    golden["cases"].as_array().unwrap().clone()
}

pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_f64().unwrap())
        .collect()
}

pub(crate) fn ids(value: &Value) -> Vec<TokenId> {
    numbers(value)
        .into_iter()
        .map(|n| TokenId(n as u32))
        .collect()
}

/// Tensors of the golden file by name, integers as floats.
pub(crate) fn tensors() -> HashMap<String, Vec<f32>> {
    let bytes = fs::read(ember("golden/golden.safetensors")).unwrap();
    let (head, data) =
        bytes[8..].split_at(u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize);
    let head: Value = serde_json::from_slice(head).unwrap();
    let mut all = HashMap::new();
    for (name, entry) in head
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
    {
        let range = numbers(&entry["data_offsets"]);
        let words = data[range[0] as usize..range[1] as usize].chunks_exact(4);
        let word = |bytes: &[u8]| -> [u8; 4] { bytes.try_into().unwrap() };
        let values = match entry["dtype"].as_str().unwrap() {
            "F32" => words.map(|w| f32::from_le_bytes(word(w))).collect(),
            "I32" => words.map(|w| i32::from_le_bytes(word(w)) as f32).collect(),
            other => panic!("{name} is {other}"),
        };
        all.insert(name.clone(), values);
    }
    all
}
