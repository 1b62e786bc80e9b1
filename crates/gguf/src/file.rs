//! An opened model file: one map per part of a split file, with one tensor directory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::{WeightError, WeightRef, WeightSource};

use crate::parse::{Parsed, parse};
use crate::split::{SplitInfo, part_paths};
use crate::tensors::shape;
use crate::{FileBytes, GgufError, Meta, TensorInfo, TensorType};

/// An opened GGUF file with all its parts. Tensor bytes are read in place.
#[derive(Debug)]
pub struct GgufFile {
    /// The path as given, or the name given to bytes in memory.
    name: String,
    version: u32,
    meta: Meta,
    tensors: Vec<TensorInfo>,
    index: HashMap<Arc<str>, usize>,
    /// One per file; unmapped when this is dropped.
    parts: Vec<FileBytes>,
    /// The path of each part; none for bytes in memory.
    paths: Vec<PathBuf>,
    /// End of the tensor directory of each part.
    head_bytes: Vec<usize>,
}

impl GgufFile {
    /// Opens a file. If it is the first part of a split file, also opens the other parts.
    ///
    /// # Errors
    /// Any [`GgufError`] except those of the writer.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let name = path.display().to_string();
        let first = FileBytes::open(path)?;
        let parsed = parse(&name, &first, 0)?;
        let split = SplitInfo::read(&name, &parsed.meta)?;
        if split.no != 0 {
            let detail = format!(
                "this is part {} of {}; open part 1",
                split.no.saturating_add(1),
                split.count
            );
            return Err(GgufError::Split { file: name, detail });
        }
        let mut file = GgufFile::of_one(name, first, parsed);
        file.paths.push(path.to_owned());
        if split.count > 1 {
            let paths = part_paths(path, split.count)?;
            for (part, path) in paths.iter().enumerate().skip(1) {
                file.add_part(path, part, split)?;
            }
        }
        if let Some(expected) = split.tensors
            && split.count > 1
            && expected != file.tensors.len() as u64
        {
            let detail = format!(
                "split.tensors.count is {expected}, but the {} parts hold {} tensors",
                split.count,
                file.tensors.len()
            );
            return Err(GgufError::Split {
                file: file.name,
                detail,
            });
        }
        Ok(file)
    }

    /// Parses a file in memory; `name` is used in messages. Split files are refused.
    ///
    /// # Errors
    /// As [`GgufFile::open`].
    pub fn from_bytes(name: &str, bytes: FileBytes) -> Result<GgufFile, GgufError> {
        let parsed = parse(name, &bytes, 0)?;
        let split = SplitInfo::read(name, &parsed.meta)?;
        if split.no != 0 || split.count > 1 {
            let detail = "a part of a split file cannot be read from memory".to_owned();
            return Err(GgufError::Split {
                file: name.to_owned(),
                detail,
            });
        }
        Ok(GgufFile::of_one(name.to_owned(), bytes, parsed))
    }

    fn of_one(name: String, bytes: FileBytes, parsed: Parsed) -> GgufFile {
        let Parsed {
            version,
            meta,
            tensors,
            head_bytes,
        } = parsed;
        let index = tensors
            .iter()
            .enumerate()
            .map(|(i, info)| (Arc::clone(&info.name), i))
            .collect();
        GgufFile {
            name,
            version,
            meta,
            tensors,
            index,
            parts: vec![bytes],
            paths: Vec::new(),
            head_bytes: vec![head_bytes],
        }
    }

    fn add_part(&mut self, path: &Path, part: usize, first: SplitInfo) -> Result<(), GgufError> {
        let name = path.display().to_string();
        let bytes = FileBytes::open(path)?;
        let parsed = parse(&name, &bytes, part)?;
        let split = SplitInfo::read(&name, &parsed.meta)?;
        let refuse = |detail| {
            Err(GgufError::Split {
                file: name.clone(),
                detail,
            })
        };
        if split.no != part as u64 || split.count != first.count {
            return refuse(format!(
                "split.no {} of split.count {} where {part} of {} was expected",
                split.no, split.count, first.count
            ));
        }
        for info in parsed.tensors {
            if self.index.contains_key(&info.name) {
                return refuse(format!("tensor {} is in an earlier part too", info.name));
            }
            self.index
                .insert(Arc::clone(&info.name), self.tensors.len());
            self.tensors.push(info);
        }
        self.parts.push(bytes);
        self.paths.push(path.to_owned());
        self.head_bytes.push(parsed.head_bytes);
        Ok(())
    }

    /// The path as given, or the name given to bytes in memory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata, all of it in the first part.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// All tensors, in file order, part by part.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// Bytes of all parts.
    pub fn size_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    /// Number of files.
    pub fn n_parts(&self) -> usize {
        self.parts.len()
    }

    /// The paths of all parts, the first one first; none for bytes in memory.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The bytes of a part before its tensor data: header, metadata, tensor directory.
    ///
    /// # Panics
    /// If `part` is not below [`GgufFile::n_parts`].
    pub fn head(&self, part: usize) -> &[u8] {
        &self.parts[part][..self.head_bytes[part]]
    }

    /// The bytes of a tensor; empty for a foreign type, because its size is unknown.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        &self.parts[tensor.part][tensor.start..tensor.start + tensor.n_bytes]
    }

    /// The values of a tensor of 64-bit integers; `None` for another type or a missing tensor.
    pub fn integers(&self, name: &str) -> Option<Vec<i64>> {
        let tensor = self
            .tensor(name)
            .filter(|info| info.ty == TensorType::I64)?;
        let (values, _) = self.data(tensor).as_chunks();
        Some(
            values
                .iter()
                .map(|bytes| i64::from_le_bytes(*bytes))
                .collect(),
        )
    }
}

impl WeightSource for GgufFile {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        let Some(info) = self.tensor(&weight.name) else {
            return Err(WeightError::Missing {
                name: Arc::clone(&weight.name),
            });
        };
        let bytes = self.data(info);
        if info.ty != TensorType::Known(weight.ty) || bytes.len() != weight.bytes() {
            let detail = format!(
                "{} {} in the file, {} {} wanted",
                shape(&info.dims),
                info.ty,
                shape(&[weight.cols as u64, weight.rows as u64]),
                weight.ty.name()
            );
            return Err(WeightError::Mismatch {
                name: Arc::clone(&weight.name),
                detail,
            });
        }
        Ok(bytes)
    }
}
