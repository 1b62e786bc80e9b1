//! Loads any bytes as a GGUF file and as a model; an error must name the file.
//!
//! A panic, a hang, or memory out of proportion to the input is a finding.

#![no_main]

use std::sync::Arc;

use contract::quant;
use gguf::{FileBytes, GgufFile};
use libfuzzer_sys::fuzz_target;

const NAME: &str = "fuzz.gguf";

fuzz_target!(|bytes: &[u8]| {
    let shared: Arc<[u8]> = Arc::from(bytes);
    match GgufFile::from_bytes(NAME, FileBytes::shared(Arc::clone(&shared))) {
        Ok(file) => read_all(&file),
        Err(error) => assert!(error.to_string().contains(NAME)),
    }
    match model::load_bytes(NAME, FileBytes::shared(shared)) {
        Ok(loaded) => {
            for weight in loaded.spec.weights() {
                let bytes = loaded
                    .weights
                    .bytes(weight)
                    .expect("a loaded spec has its weights");
                assert_eq!(bytes.len(), weight.bytes());
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

/// Reads every metadata value and dequantises a row of every tensor.
fn read_all(file: &GgufFile) {
    for (key, value) in file.meta().iter() {
        assert!(file.meta().get(key).is_some());
        assert!(!value.type_name().is_empty());
        let _ = value.to_string();
        let _ = file.meta().text(key);
        let _ = file.meta().texts(key);
        let _ = file.meta().integers(key);
        let _ = file.meta().float(key);
    }
    for info in file.tensors() {
        let data = file.data(info);
        let Some(weight) = info.weight() else {
            continue;
        };
        assert_eq!(data.len(), weight.bytes());
        let mut row = vec![0.0; weight.cols];
        quant::dequantize_row(
            weight.ty,
            &data[..weight.ty.row_bytes(weight.cols)],
            &mut row,
        );
    }
}
