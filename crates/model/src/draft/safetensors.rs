//! The safetensors container, one file or several with an index, read in place.
//!
//! The crate `safetensors` parses and checks the header. Matrices are row-major `[out, in]`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::{QuantType, WeightError, WeightRef, WeightSource};
use gguf::FileBytes;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::Value;

use super::config::Config;
use super::tensors::DraftTensors;
use crate::ModelError;

/// Bytes of the header's length, before the header.
const LENGTH_BYTES: usize = 8;
/// Maximum bytes of a `config.json` or an index.
const MAX_JSON: u64 = 16 << 20;
/// Bytes of each end of a tensor that are hashed.
const SAMPLE: usize = 4096;

/// One or several files with one list of tensors.
pub(super) struct Safetensors {
    /// The path as given.
    name: String,
    /// One per file; unmapped when this is dropped.
    parts: Vec<FileBytes>,
    tensors: BTreeMap<Arc<str>, TensorRange>,
}

/// Position and storage type of a tensor.
struct TensorRange {
    /// The weight, or the name of an unsupported type.
    weight: Result<WeightRef, String>,
    part: usize,
    begin: usize,
    end: usize,
}

impl Safetensors {
    /// Opens a folder with `config.json` and `model.safetensors` (or its index), or such a file in
    /// its folder.
    pub(super) fn open(path: &Path) -> Result<(Config, Safetensors), ModelError> {
        let name = path.display().to_string();
        let folder = if path.is_dir() {
            path
        } else {
            path.parent().unwrap_or(Path::new(""))
        };
        let config_path = folder.join("config.json");
        let config = Config::parse(config_path.display().to_string(), read_json(&config_path)?)?;
        let mut file = Safetensors {
            name,
            parts: Vec::new(),
            tensors: BTreeMap::new(),
        };
        for path in part_paths(path, folder)? {
            file.add(&path)?;
        }
        Ok((config, file))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn directory(&self) -> DraftTensors {
        let mut directory = DraftTensors::new(self.name.clone());
        for (name, place) in &self.tensors {
            directory.insert(Arc::clone(name), place.weight.clone());
        }
        directory
    }

    /// Name, type, shape and both ends of every tensor, for the draft's hash.
    pub(super) fn samples(&self) -> impl Iterator<Item = (String, &[u8], &[u8])> {
        self.tensors.iter().map(|(name, place)| {
            let data = &self.parts[place.part][place.begin..place.end];
            let (front, back) = data.split_at(data.len().min(SAMPLE));
            let back = &back[back.len().saturating_sub(SAMPLE)..];
            (format!("{name} {:?}", place.weight), front, back)
        })
    }

    /// The values of a tensor of 64-bit integers; `None` for another type or a missing tensor.
    pub(super) fn integers(&self, name: &str) -> Option<Vec<i64>> {
        let place = self.tensors.get(name)?;
        place.weight.as_ref().err().filter(|ty| *ty == "I64")?;
        let (values, _) = self.parts[place.part][place.begin..place.end].as_chunks();
        Some(
            values
                .iter()
                .map(|bytes| i64::from_le_bytes(*bytes))
                .collect(),
        )
    }

    fn add(&mut self, path: &Path) -> Result<(), ModelError> {
        let file = path.display().to_string();
        let bytes = FileBytes::open(path)?;
        let refuse = |detail: String| ModelError::Key {
            file: file.clone(),
            key: "header".to_owned(),
            detail,
        };
        let (length, header) =
            SafeTensors::read_metadata(&bytes).map_err(|error| refuse(error.to_string()))?;
        let data_begin = LENGTH_BYTES + length;
        for (name, info) in header.tensors() {
            let range = tensor_range(&name, info, self.parts.len());
            let range = range.and_then(|range| {
                let available = bytes.len() - data_begin;
                if range.end > available {
                    return Err(format!(
                        "its data is beyond the {available} bytes there are"
                    ));
                }
                Ok(TensorRange {
                    begin: data_begin + range.begin,
                    end: data_begin + range.end,
                    ..range
                })
            });
            let range = range.map_err(|detail| ModelError::Tensor {
                file: file.clone(),
                tensor: name.escape_debug().to_string(),
                detail,
            })?;
            if self
                .tensors
                .insert(Arc::from(name.as_str()), range)
                .is_some()
            {
                return Err(refuse(format!(
                    "tensor {} occurs twice",
                    name.escape_debug()
                )));
            }
        }
        self.parts.push(bytes);
        Ok(())
    }
}

/// The range of a tensor in the data, and its weight.
fn tensor_range(name: &str, info: &TensorInfo, part: usize) -> Result<TensorRange, String> {
    let (begin, end) = info.data_offsets;
    let range = |weight| TensorRange {
        weight,
        part,
        begin,
        end,
    };
    let ty = match info.dtype {
        Dtype::F32 => QuantType::F32,
        Dtype::F16 => QuantType::F16,
        Dtype::BF16 => QuantType::BF16,
        other => return Ok(range(Err(format!("{other:?}")))),
    };
    let (rows, cols) = match info.shape[..] {
        [len] => (1, len),
        [rows, cols] => (rows, cols),
        [outer, rows, cols] => match outer.checked_mul(rows) {
            Some(rows) => (rows, cols),
            None => return Err(format!("{outer} x {rows} rows overflow")),
        },
        _ => {
            return Err(format!(
                "{} dimensions, 1 to 3 are expected",
                info.shape.len()
            ));
        }
    };
    if rows == 0 || cols == 0 {
        return Err(format!("an empty shape {rows} x {cols}"));
    }
    Ok(range(Ok(WeightRef {
        name: Arc::from(name),
        ty,
        rows,
        cols,
    })))
}

/// The paths of all files, in name order.
fn part_paths(path: &Path, folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let single = folder.join("model.safetensors");
    let index_path = folder.join("model.safetensors.index.json");
    if single.is_file() || !index_path.is_file() {
        return Ok(vec![single]);
    }
    let refuse = |detail: &str| ModelError::Key {
        file: index_path.display().to_string(),
        key: "weight_map".to_owned(),
        detail: detail.to_owned(),
    };
    let index: Value = serde_json::from_slice(&read_json(&index_path)?)
        .map_err(|error| refuse(&error.to_string()))?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let files = map.ok_or_else(|| refuse("missing"))?.values();
    let mut names = Vec::new();
    for file in files {
        // An index may only name files of its own folder.
        let name = file.as_str().filter(|name| !name.contains(['/', '\\']));
        names.push(name.ok_or_else(|| refuse("an entry is no file name"))?);
    }
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

fn read_json(path: &Path) -> Result<Vec<u8>, ModelError> {
    let bytes = FileBytes::open(path)?;
    if bytes.len() as u64 > MAX_JSON {
        return Err(ModelError::Key {
            file: path.display().to_string(),
            key: "length".to_owned(),
            detail: format!("{} bytes are more than any such file has", bytes.len()),
        });
    }
    Ok(bytes.to_vec())
}

impl WeightSource for Safetensors {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        let place = self.tensors.get(&weight.name);
        let Some(place) = place else {
            return Err(WeightError::Missing {
                name: Arc::clone(&weight.name),
            });
        };
        match &place.weight {
            Ok(stored) if stored == weight => Ok(&self.parts[place.part][place.begin..place.end]),
            stored => Err(WeightError::Mismatch {
                name: Arc::clone(&weight.name),
                detail: format!("{stored:?} in the file, {weight:?} wanted"),
            }),
        }
    }
}
