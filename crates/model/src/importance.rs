//! Importance matrices: how much each input of a matrix counts when its weights are rounded.
//!
//! Two file formats are read. GGUF: tensors `NAME.in_sum2` with sums of squared activations and
//! `NAME.counts` with the numbers of rows that were summed. The older one, little-endian: the
//! number of entries, then for each the length of its name, the name, the number of calls, the
//! number of values, and the sums as f32.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

use contract::QuantType;
use gguf::{Array, GgufFile, GgufWriter, TensorInfo, TensorType, Value};

use crate::ModelError;

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
/// The first bytes of a GGUF file.
const GGUF_MAGIC: &[u8] = b"GGUF";

/// The importance of the inputs of matrices, by the matrix's name.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportanceMatrix {
    name: String,
    entries: HashMap<String, Vec<f32>>,
}

impl ImportanceMatrix {
    /// A matrix called `name` in messages and metadata; each entry has a value for every input, of
    /// one expert after the other.
    ///
    /// # Errors
    /// [`ModelError::Importance`] for a value that is negative or not finite, or without entries.
    pub fn new(
        name: &str,
        entries: HashMap<String, Vec<f32>>,
    ) -> Result<ImportanceMatrix, ModelError> {
        if entries.is_empty() {
            return Err(refused(name, "no entries"));
        }
        for (tensor, values) in &entries {
            if let Some(wrong) = values.iter().find(|v| !v.is_finite() || **v < 0.0) {
                let detail = format!("{tensor} has the value {wrong}; make the file again");
                return Err(refused(name, &detail));
            }
        }
        Ok(ImportanceMatrix {
            name: name.to_owned(),
            entries,
        })
    }

    /// Reads a file of either format.
    ///
    /// # Errors
    /// [`ModelError::Importance`] for a file that cannot be read or is damaged,
    /// [`ModelError::Container`] for a damaged GGUF file.
    pub fn open(path: &Path) -> Result<ImportanceMatrix, ModelError> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|e| refused(&name, &e.to_string()))?;
        let entries = if bytes.starts_with(GGUF_MAGIC) {
            gguf_entries(&name, &GgufFile::open(path)?)?
        } else {
            legacy_entries(&bytes).ok_or_else(|| {
                let detail =
                    "neither a GGUF importance matrix nor a complete one of the older form";
                refused(&name, detail)
            })?
        };
        ImportanceMatrix::new(&name, entries)
    }

    /// The file's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of matrices that have an entry.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Always false: a matrix without entries is refused.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The importance of the inputs of `tensor`: a value for each column, for each expert.
    ///
    /// # Errors
    /// [`ModelError::Importance`] when the entry has another length.
    pub(crate) fn of(&self, tensor: &TensorInfo) -> Result<Option<&[f32]>, ModelError> {
        let Some(values) = self.entries.get(&**tensor.name()) else {
            return Ok(None);
        };
        let experts: u64 = tensor.dims().iter().skip(2).product();
        let expected = tensor.dims().first().copied().unwrap_or(0) * experts;
        if values.len() as u64 != expected {
            let detail = format!(
                "{} has {} values, {expected} expected; it was made for another model",
                tensor.name(),
                values.len()
            );
            return Err(refused(&self.name, &detail));
        }
        Ok(Some(values))
    }
}

/// Sums of one matrix's inputs.
#[derive(Debug, Clone, Copy)]
pub struct ImportanceSums<'a> {
    /// The matrix.
    pub tensor: &'a str,
    /// Sum over the rows of the square of each input, `[cols]`.
    pub squares: &'a [f32],
    /// Number of rows.
    pub rows: usize,
}

/// Writes an importance matrix as GGUF, from `chunks` chunks of `chunk_tokens` tokens of `text`.
///
/// # Errors
/// [`ModelError::Container`] for a name that GGUF cannot hold or a failed write.
pub fn write<'a, W: Write>(
    out: W,
    sums: impl Iterator<Item = ImportanceSums<'a>> + Clone,
    text: &str,
    (chunks, chunk_tokens): (usize, usize),
) -> Result<W, ModelError> {
    let count = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut writer = GgufWriter::new();
    writer.meta("general.type", "imatrix".into())?;
    let texts = Array::String(vec![text.into()]);
    writer.meta("imatrix.datasets", Value::Array(texts))?;
    writer.meta("imatrix.chunk_count", count(chunks))?;
    writer.meta("imatrix.chunk_size", count(chunk_tokens))?;
    for entry in sums.clone() {
        let name = |suffix: &str| format!("{}{suffix}", entry.tensor);
        let cols = entry.squares.len() as u64;
        writer.tensor(&name(SUMS), QuantType::F32, &[cols, 1])?;
        writer.tensor(&name(COUNTS), QuantType::F32, &[1, 1])?;
    }
    let mut body = writer.start(out)?;
    for entry in sums {
        for values in [entry.squares, &[entry.rows as f32]] {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            body.write(&bytes)?;
        }
    }
    Ok(body.finish()?)
}

fn refused(file: &str, detail: &str) -> ModelError {
    ModelError::Importance {
        file: file.to_owned(),
        detail: detail.to_owned(),
    }
}

fn gguf_entries(name: &str, file: &GgufFile) -> Result<HashMap<String, Vec<f32>>, ModelError> {
    let floats = |info: &TensorInfo| -> Result<Vec<f32>, ModelError> {
        if info.ty() != TensorType::Known(QuantType::F32) {
            return Err(refused(name, &format!("{} is not F32", info.name())));
        }
        let (words, _) = file.data(info).as_chunks::<4>();
        Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
    };
    let mut entries = HashMap::new();
    for info in file.tensors() {
        let Some(tensor) = info.name().strip_suffix(SUMS) else {
            continue;
        };
        let Some(counts) = file.tensor(&format!("{tensor}{COUNTS}")) else {
            return Err(refused(name, &format!("{tensor} has sums but no counts")));
        };
        let (mut sums, counts) = (floats(info)?, floats(counts)?);
        if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            let detail = format!("{tensor} has {} sums, {} counts", sums.len(), counts.len());
            return Err(refused(name, &detail));
        }
        let per_count = sums.len() / counts.len();
        for (sums, count) in sums.chunks_exact_mut(per_count.max(1)).zip(counts) {
            // Experts that were never used count evenly.
            let is_used = count > 0.0;
            sums.iter_mut()
                .for_each(|sum| *sum = if is_used { *sum / count } else { 1.0 });
        }
        entries.insert(tensor.to_owned(), sums);
    }
    Ok(entries)
}

/// The entries of the older format; what follows them is not needed. `None` if bytes are missing.
fn legacy_entries(bytes: &[u8]) -> Option<HashMap<String, Vec<f32>>> {
    let mut rest = bytes;
    let mut entries = HashMap::new();
    for _ in 0..take_count(&mut rest)? {
        let name_bytes = take_count(&mut rest)?;
        let name = str::from_utf8(take(&mut rest, name_bytes)?).ok()?;
        let calls = take_count(&mut rest)?;
        let n_values = take_count(&mut rest)?;
        let (words, _) = take(&mut rest, n_values.checked_mul(4)?)?.as_chunks::<4>();
        let divisor = if calls > 0 { calls as f32 } else { 1.0 };
        let values = words.iter().map(|word| f32::from_le_bytes(*word) / divisor);
        entries.insert(name.to_owned(), values.collect());
    }
    Some(entries)
}

fn take<'a>(rest: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(n)?;
    *rest = after;
    Some(taken)
}

/// A number that is not negative.
fn take_count(rest: &mut &[u8]) -> Option<usize> {
    let word = i32::from_le_bytes(*take(rest, 4)?.first_chunk()?);
    usize::try_from(word).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn legacy(entries: &[(&str, i32, &[f32])]) -> Vec<u8> {
        let mut bytes = i32::try_from(entries.len()).unwrap().to_le_bytes().to_vec();
        for (name, calls, values) in entries {
            bytes.extend((name.len() as i32).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend(calls.to_le_bytes());
            bytes.extend((values.len() as i32).to_le_bytes());
            bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        }
        bytes
    }

    #[test]
    fn both_file_formats_give_means_of_squares() {
        let dir = tempfile::tempdir().unwrap();
        let old = dir.path().join("old.dat");
        let mut bytes = legacy(&[("a.weight", 4, &[8.0, 2.0]), ("b.weight", 0, &[3.0])]);
        // The number of calls and a data set's name may follow.
        bytes.extend([9, 0, 0, 0, 1, 0, 0, 0, b'x']);
        std::fs::write(&old, &bytes).unwrap();
        let read = ImportanceMatrix::open(&old).unwrap();
        assert_eq!(read.entries["a.weight"], [2.0, 0.5]);
        assert_eq!(read.entries["b.weight"], [3.0]);

        let new = dir.path().join("new.gguf");
        let mut writer = GgufWriter::new();
        writer.meta("general.type", "imatrix".into()).unwrap();
        writer
            .tensor("e.weight.in_sum2", QuantType::F32, &[2, 2])
            .unwrap();
        writer
            .tensor("e.weight.counts", QuantType::F32, &[1, 2])
            .unwrap();
        let mut body = writer.start(Vec::new()).unwrap();
        for values in [&[8.0_f32, 2.0, 5.0, 6.0][..], &[2.0, 0.0]] {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            body.write(&bytes).unwrap();
        }
        std::fs::write(&new, body.finish().unwrap()).unwrap();
        let read = ImportanceMatrix::open(&new).unwrap();
        assert_eq!(read.entries["e.weight"], [4.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn written_sums_are_read_as_means() {
        let sums = [ImportanceSums {
            tensor: "a.weight",
            squares: &[6.0, 3.0, 0.0],
            rows: 3,
        }];
        let out = write(Vec::new(), sums.into_iter(), "a text", (2, 512)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made.gguf");
        std::fs::write(&path, out).unwrap();
        let read = ImportanceMatrix::open(&path).unwrap();
        assert_eq!(read.entries["a.weight"], [2.0, 1.0, 0.0]);
        assert_eq!(read.len(), 1);
    }

    #[test]
    fn damaged_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cut.dat");
        let whole = legacy(&[("a.weight", 4, &[8.0, 2.0])]);
        for n in [0, 3, 6, 14, whole.len() - 1] {
            std::fs::write(&path, &whole[..n]).unwrap();
            let error = ImportanceMatrix::open(&path).unwrap_err();
            assert!(
                matches!(error, ModelError::Importance { .. }),
                "{n}: {error}"
            );
            assert!(error.to_string().contains("cut.dat"), "{error}");
        }
        std::fs::write(&path, legacy(&[("a.weight", 1, &[f32::NAN])])).unwrap();
        let error = ImportanceMatrix::open(&path).unwrap_err();
        assert!(error.to_string().contains("a.weight"), "{error}");
    }
}
