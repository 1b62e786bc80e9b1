//! The safetensors container, one file or several with an index, read in place and without trust.
//!
//! ```text
//! header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data
//! ```
//! Offsets count from the end of the header. Matrices are row-major `[out, in]`, as everywhere
//! here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::{QuantType, WeightError, WeightRef, WeightSource};
use gguf::FileBytes;
use serde_json::{Map, Value};

use super::config::Config;
use super::tensors::DraftTensors;
use crate::ModelError;

/// Maximum bytes of a header.
const MAX_HEADER: usize = 64 << 20;
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

    fn add(&mut self, path: &Path) -> Result<(), ModelError> {
        let file = path.display().to_string();
        let bytes = FileBytes::open(path)?;
        let refuse = |detail: String| ModelError::Key {
            file: file.clone(),
            key: "header".to_owned(),
            detail,
        };
        let length = bytes
            .first_chunk::<8>()
            .map(|length| u64::from_le_bytes(*length))
            .and_then(|length| usize::try_from(length).ok())
            .filter(|length| *length <= MAX_HEADER && *length <= bytes.len() - 8)
            .ok_or_else(|| refuse("not a safetensors file, or a truncated one".to_owned()))?;
        let (header, data) = bytes[8..].split_at(length);
        let header: Map<String, Value> =
            serde_json::from_slice(header).map_err(|e| refuse(e.to_string()))?;
        let data_begin = 8 + length;
        for (name, entry) in header {
            if name == "__metadata__" {
                continue;
            }
            let place = place(&name, &entry, data.len(), self.parts.len()).map_err(|detail| {
                ModelError::Tensor {
                    file: file.clone(),
                    tensor: name.escape_debug().to_string(),
                    detail,
                }
            })?;
            let place = TensorRange {
                begin: data_begin + place.begin,
                end: data_begin + place.end,
                ..place
            };
            if self
                .tensors
                .insert(Arc::from(name.as_str()), place)
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

/// One entry of a header; offsets are checked against the data's length and the shape.
fn place(name: &str, entry: &Value, available: usize, part: usize) -> Result<TensorRange, String> {
    let numbers = |key: &str| -> Option<Vec<usize>> {
        let numbers = entry.get(key)?.as_array()?.iter();
        numbers
            .map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok()))
            .collect()
    };
    let dtype = entry.get("dtype").and_then(Value::as_str).unwrap_or("");
    let shape = numbers("shape").ok_or("its shape cannot be read")?;
    let offsets = numbers("data_offsets").unwrap_or_default();
    let [begin, end] = offsets[..] else {
        return Err("its data_offsets cannot be read".to_owned());
    };
    if begin > end || end > available {
        return Err(format!(
            "its data {begin}..{end} is beyond the {available} bytes there are"
        ));
    }
    let ty = match dtype {
        "F32" => QuantType::F32,
        "F16" => QuantType::F16,
        "BF16" => QuantType::BF16,
        other => {
            return Ok(TensorRange {
                weight: Err(other.escape_debug().to_string()),
                part,
                begin,
                end,
            });
        }
    };
    let (rows, cols) = match shape[..] {
        [len] => (1, len),
        [rows, cols] => (rows, cols),
        _ => return Err(format!("{} dimensions, 1 or 2 are expected", shape.len())),
    };
    let wanted = rows
        .checked_mul(cols)
        .and_then(|n| n.checked_mul(ty.block_bytes()));
    if rows == 0 || cols == 0 || wanted != Some(end - begin) {
        return Err(format!(
            "{} bytes for a {dtype} of shape {rows} x {cols}",
            end - begin
        ));
    }
    Ok(TensorRange {
        weight: Ok(WeightRef {
            name: Arc::from(name),
            ty,
            rows,
            cols,
        }),
        part,
        begin,
        end,
    })
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
