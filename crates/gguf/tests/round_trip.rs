//! Reading returns what was written, for any metadata and any tensors.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use std::collections::HashSet;
use std::sync::Arc;

use contract::{QuantType, WeightError, WeightRef, WeightSource};
use gguf::{Array, FileBytes, GgufError, GgufFile, GgufString, GgufWriter, TensorType, Value};
use proptest::collection::vec;
use proptest::prelude::*;

fn read(bytes: Vec<u8>) -> Result<GgufFile, GgufError> {
    GgufFile::from_bytes("test.gguf", FileBytes::shared(Arc::from(bytes)))
}

fn text() -> impl Strategy<Value = GgufString> {
    vec(any::<u8>(), 0..12).prop_map(|bytes| GgufString::from(&bytes[..]))
}

/// Floats by value rather than by bits, because NaN differs from itself.
fn array() -> impl Strategy<Value = Array> {
    let leaf = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..9).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(-1e9f32..1e9, 0..9).prop_map(Array::F32),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        vec(text(), 0..9).prop_map(Array::String),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        vec(-1e9f64..1e9, 0..9).prop_map(Array::F64),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| vec(inner, 0..4).prop_map(Array::Array))
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        (-1e9f32..1e9).prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        text().prop_map(Value::String),
        array().prop_map(Value::Array),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        (-1e9f64..1e9).prop_map(Value::F64),
    ]
}

fn tensors() -> impl Strategy<Value = Vec<(QuantType, Vec<u64>)>> {
    let ty = prop::sample::select(QuantType::ALL.to_vec());
    vec((ty, 1u64..3, vec(1u64..4, 0..4)), 0..6).prop_map(|tensors| {
        let one = |(ty, blocks, mut dims): (QuantType, u64, Vec<u64>)| {
            dims.insert(0, blocks * ty.block_values() as u64);
            dims.truncate(4);
            (ty, dims)
        };
        tensors.into_iter().map(one).collect()
    })
}

proptest! {
    #[test]
    fn metadata_of_every_type_and_tensors_come_back(
        values in vec(value(), 0..12),
        tensors in tensors(),
        align_shift in 3u32..9,
        version in 2u32..4,
    ) {
        let mut writer = GgufWriter::new();
        let alignment = 1u32 << align_shift;
        writer.meta("general.alignment", Value::U32(alignment)).unwrap();
        for (i, value) in values.iter().enumerate() {
            writer.meta(&format!("key.{i}"), value.clone()).unwrap();
        }
        for (i, (ty, dims)) in tensors.iter().enumerate() {
            writer.tensor(&format!("tensor.{i}"), *ty, dims).unwrap();
        }
        let mut body = writer.start(Vec::new()).unwrap();
        let content = |i: usize, (ty, dims): &(QuantType, Vec<u64>)| {
            let values: u64 = dims.iter().product();
            vec![i as u8 + 1; ty.row_bytes(values as usize)]
        };
        for (i, tensor) in tensors.iter().enumerate() {
            // Pieces that do not end with the tensor.
            for piece in content(i, tensor).chunks(7) {
                body.write(piece).unwrap();
            }
        }
        let mut bytes = body.finish().unwrap();
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        let file = read(bytes).unwrap();
        prop_assert_eq!(file.version(), version);
        prop_assert_eq!(file.meta().len(), values.len() + 1);
        for (i, value) in values.iter().enumerate() {
            prop_assert_eq!(file.meta().get(&format!("key.{i}")), Some(value));
        }
        let start = file.head(0).as_ptr() as usize;
        for (i, tensor) in tensors.iter().enumerate() {
            let info = file.tensor(&format!("tensor.{i}")).unwrap();
            prop_assert_eq!(info.ty(), TensorType::Known(tensor.0));
            prop_assert_eq!(info.dims(), &tensor.1[..]);
            prop_assert_eq!(file.data(info), &content(i, tensor)[..]);
            let position = file.data(info).as_ptr() as usize - start;
            prop_assert_eq!(position % alignment as usize, 0);
            let weight = info.weight().unwrap();
            prop_assert_eq!(file.bytes(&weight).unwrap(), file.data(info));
        }
    }
}

#[test]
fn integers_of_any_width_are_read() {
    let mut writer = GgufWriter::new();
    let values = [
        Value::U8(7),
        Value::I8(7),
        Value::U16(7),
        Value::I16(7),
        Value::U32(7),
        Value::I32(7),
        Value::U64(7),
        Value::I64(7),
    ];
    for (i, value) in values.iter().enumerate() {
        writer.meta(&format!("k{i}"), value.clone()).unwrap();
    }
    writer.meta("negative", Value::I32(-1)).unwrap();
    writer
        .meta("list", Value::Array(Array::I32(vec![1, 2])))
        .unwrap();
    let file = read(writer.start(Vec::new()).unwrap().finish().unwrap()).unwrap();
    for i in 0..values.len() {
        assert_eq!(file.meta().integer(&format!("k{i}")).unwrap(), Some(7));
    }
    assert_eq!(file.meta().integers("list").unwrap(), Some(vec![1, 2]));
    assert_eq!(file.meta().integers("k0").unwrap(), Some(vec![7]));
    assert_eq!(file.meta().integer("absent").unwrap(), None);
    let error = file.meta().integer("negative").unwrap_err().to_string();
    assert_eq!(
        error,
        "key negative holds i32 (-1), expected a whole number, not negative"
    );
    let error = file.meta().text("list").unwrap_err().to_string();
    assert_eq!(
        error,
        "key list holds array of 2 i32 ([1, 2]), expected a string"
    );
}

#[test]
fn strings_without_utf8_are_kept_as_bytes() {
    let mut writer = GgufWriter::new();
    writer
        .meta("one", Value::String(GgufString::from(&b"ok\xff"[..])))
        .unwrap();
    let list = vec![GgufString::from("fine"), GgufString::from(&b"\xc3\x28"[..])];
    writer
        .meta("list", Value::Array(Array::String(list)))
        .unwrap();
    let file = read(writer.start(Vec::new()).unwrap().finish().unwrap()).unwrap();
    let Some(Value::String(text)) = file.meta().get("one") else {
        panic!()
    };
    assert_eq!(text.as_bytes(), b"ok\xff");
    let error = file.meta().text("one").unwrap_err().to_string();
    assert!(
        error.starts_with("key one holds bytes that are not UTF-8 from byte 2 on"),
        "{error}"
    );
    let error = file.meta().texts("list").unwrap_err().to_string();
    assert!(
        error.starts_with("key list[1] holds bytes that are not UTF-8"),
        "{error}"
    );
}

#[test]
fn mismatched_weight_references_are_refused() {
    let mut writer = GgufWriter::new();
    writer.tensor("w", QuantType::Q8_0, &[32, 2]).unwrap();
    let mut body = writer.start(Vec::new()).unwrap();
    body.write(&[0; 68]).unwrap();
    let file = read(body.finish().unwrap()).unwrap();
    let right = file.tensor("w").unwrap().weight().unwrap();
    assert_eq!(file.bytes(&right).unwrap().len(), 68);
    let missing = WeightRef {
        name: "v".into(),
        ..right.clone()
    };
    assert!(matches!(
        file.bytes(&missing),
        Err(WeightError::Missing { .. })
    ));
    for wrong in [
        WeightRef {
            rows: 3,
            ..right.clone()
        },
        WeightRef {
            ty: QuantType::Q4_0,
            ..right.clone()
        },
    ] {
        assert!(
            matches!(file.bytes(&wrong), Err(WeightError::Mismatch { .. })),
            "{wrong:?}"
        );
    }
}

#[test]
fn writer_refuses_unrepresentable_values() {
    let mut writer = GgufWriter::new();
    writer.meta("k", Value::U8(1)).unwrap();
    assert!(writer.meta("k", Value::U8(2)).is_err());
    assert!(writer.meta("general.alignment", Value::U32(24)).is_err());
    writer.tensor("t", QuantType::F32, &[4]).unwrap();
    for (name, ty, dims) in [
        ("t", QuantType::F32, &[4][..]),
        ("", QuantType::F32, &[4]),
        (&"n".repeat(64), QuantType::F32, &[4]),
        ("a", QuantType::Q4_K, &[128]),
        ("a", QuantType::F32, &[]),
        ("a", QuantType::F32, &[1, 1, 1, 1, 1]),
        ("a", QuantType::F32, &[4, 0]),
        ("a", QuantType::F32, &[u64::MAX, 2]),
    ] {
        let error = writer.tensor(name, ty, dims);
        assert!(
            matches!(error, Err(GgufError::Unwritable { .. })),
            "{name} {dims:?}"
        );
    }
    assert!(writer.meta("general.alignment", Value::U32(64)).is_err());
    let mut body = writer.start(Vec::new()).unwrap();
    body.write(&[0; 15]).unwrap();
    let error = body.finish().unwrap_err().to_string();
    assert_eq!(
        error,
        "the data section cannot be written: 1 bytes of a tensor are missing"
    );
}

#[test]
fn every_type_has_its_own_id() {
    let ids: HashSet<u32> = QuantType::ALL.iter().map(|ty| ty.id()).collect();
    assert_eq!(ids.len(), QuantType::ALL.len());
    for ty in QuantType::ALL {
        assert_eq!(TensorType::from_id(ty.id()), TensorType::Known(ty));
    }
    assert_eq!(TensorType::from_id(27), TensorType::I64);
    assert_eq!(TensorType::from_id(41).to_string(), "Q1_0 (type id 41)");
    assert_eq!(TensorType::from_id(77).to_string(), "type id 77");
}

#[test]
fn integer_tensors_come_back() {
    let values = [3_i64, -1, i64::MAX];
    let mut writer = GgufWriter::new();
    writer.meta("general.architecture", "none".into()).unwrap();
    writer.integers("ids", 3).unwrap();
    writer.tensor("scale", QuantType::F32, &[1]).unwrap();
    let mut body = writer.start(Vec::new()).unwrap();
    for value in values {
        body.write(&value.to_le_bytes()).unwrap();
    }
    body.write(&1.0_f32.to_le_bytes()).unwrap();
    let bytes = FileBytes::shared(body.finish().unwrap().into());
    let file = GgufFile::from_bytes("ids.gguf", bytes).unwrap();
    assert_eq!(file.integers("ids"), Some(values.to_vec()));
    assert_eq!(file.tensor("ids").unwrap().n_bytes(), Some(24));
    assert!(file.tensor("ids").unwrap().weight().is_none());
    assert_eq!(
        (file.integers("scale"), file.integers("none")),
        (None, None)
    );
}
