//! Quantises a GGUF file: keeps the metadata and converts each tensor to its recipe's type.
//!
//! Works for any family, because only names and shapes matter. Memory is bounded: rows are read
//! from the map, converted in pieces on several threads, and written in order.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use contract::{QuantType, quant};
use gguf::{GgufFile, GgufWriter, TensorInfo, TensorType, Value};

use crate::ModelError;
use crate::importance::ImportanceMatrix;
use crate::names::HEAD;
use crate::reader::Reader;
use crate::recipe::{FileShape, Recipe, choose, needs_importance};

/// Values per piece and thread.
const PIECE_VALUES: usize = 1 << 19;

/// Options of a conversion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizeOptions<'a> {
    /// Chooses each tensor's type.
    pub recipe: Recipe,
    /// Conversion threads; 0 counts as 1.
    pub threads: usize,
    /// Weights of the errors of formats that can use them: the IQ types but IQ4.
    pub importance: Option<&'a ImportanceMatrix>,
}

/// Progress of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeProgress<'a> {
    /// The current tensor.
    pub tensor: &'a str,
    /// Bytes of the input's tensors converted.
    pub done_bytes: u64,
    /// Total bytes of the input's tensors.
    pub total_bytes: u64,
}

/// Result of a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizeReport {
    /// Every tensor, in file order.
    pub tensors: Vec<Change>,
    /// Bytes of the input's tensors.
    pub input_bytes: u64,
    /// Bytes of the output's tensors.
    pub output_bytes: u64,
}

/// Conversion of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Its name.
    pub name: Arc<str>,
    /// Its type in the input.
    pub from: QuantType,
    /// Its type in the output; if unchanged, its bytes are copied.
    pub to: QuantType,
}

impl QuantizeReport {
    /// Number of tensors that were already quantized and got another quantized type. They have the
    /// error of both types: warn the user that converting the original is better.
    pub fn requantised(&self) -> usize {
        let quantised = |ty: QuantType| ty.block_values() > 1;
        let twice = |c: &&Change| c.from != c.to && quantised(c.from) && quantised(c.to);
        self.tensors.iter().filter(twice).count()
    }
}

/// Converts the file at `input` (the first part of a split file) and writes one file to `out`,
/// which is returned. `input` is read meanwhile, so `out` must be another file.
///
/// # Errors
/// [`ModelError::Container`] for an invalid input or a failed write, [`ModelError::Tensor`] for a
/// tensor of an unsupported type or without the importance that its new type needs,
/// [`ModelError::Importance`] for an importance matrix of another model. What is refused writes
/// nothing.
pub fn quantize<W: Write>(
    input: &Path,
    out: W,
    options: &QuantizeOptions<'_>,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<(QuantizeReport, W), ModelError> {
    let file = GgufFile::open(input)?;
    let plan = plan(&file, options)?;
    let out = convert(&file, plan.0, &plan.1, options, out, progress)?;
    Ok((report(&file, plan.1), out))
}

fn report(file: &GgufFile, tensors: Vec<Change>) -> QuantizeReport {
    let stored = |info: &TensorInfo, ty: QuantType| {
        info.values() / ty.block_values() as u64 * ty.block_bytes() as u64
    };
    let sum = |ty: fn(&Change) -> QuantType| {
        file.tensors()
            .iter()
            .zip(&tensors)
            .map(|(info, change)| stored(info, ty(change)))
            .sum()
    };
    QuantizeReport {
        input_bytes: sum(|c| c.from),
        output_bytes: sum(|c| c.to),
        tensors,
    }
}

/// The output's metadata and directory, and the conversion of each tensor.
fn plan(
    file: &GgufFile,
    options: &QuantizeOptions<'_>,
) -> Result<(GgufWriter, Vec<Change>), ModelError> {
    let QuantizeOptions {
        recipe, importance, ..
    } = *options;
    let mut writer = GgufWriter::new();
    let fresh = [
        ("general.file_type", Value::U32(recipe.file_type())),
        ("general.quantization_version", Value::U32(2)),
    ];
    for (key, value) in file.meta().iter() {
        let is_fresh = fresh.iter().any(|(name, _)| *name == key);
        // The parts of a split file become one.
        let is_stale = key.starts_with("split.") || key.starts_with("quantize.imatrix.");
        if !is_fresh && !is_stale {
            writer.meta(key, value.clone())?;
        }
    }
    for (key, value) in fresh {
        writer.meta(key, value)?;
    }
    if let Some(importance) = importance {
        let entries = i32::try_from(importance.len()).unwrap_or(i32::MAX);
        writer.meta("quantize.imatrix.file", importance.name().into())?;
        writer.meta("quantize.imatrix.entries_count", Value::I32(entries))?;
    }
    let reader = Reader::new(file)?;
    let count = |suffix| reader.optional(suffix).ok().flatten().unwrap_or(0);
    let (heads, kv_heads) = (
        count("attention.head_count"),
        count("attention.head_count_kv"),
    );
    let shape = FileShape {
        block_count: reader.count("block_count")?,
        tied: file.tensor(HEAD).is_none(),
        is_grouped: kv_heads > 0 && heads / kv_heads >= 4,
        has_experts: count("expert_count") >= 4,
        has_importance: importance.is_some(),
    };
    let mut changes = Vec::with_capacity(file.tensors().len());
    for info in file.tensors() {
        let TensorType::Known(from) = info.ty() else {
            return Err(reader.refuse_tensor(
                info.name(),
                format!("stored as {}, which cannot be read", info.ty()),
            ));
        };
        let to = match choose(recipe, shape, info.name(), info.dims()) {
            // Tensors that are never quantized keep their unquantized type.
            QuantType::F32 if from.block_values() == 1 && recipe != Recipe::F32 => from,
            other => other,
        };
        let has_entry = match importance {
            Some(importance) => importance.of(info)?.is_some(),
            None => false,
        };
        if from != to && needs_importance(info.name(), to) && !has_entry {
            let wish = format!(
                "to be stored as {}, which needs an importance matrix with this tensor",
                to.name()
            );
            return Err(reader.refuse_tensor(info.name(), wish));
        }
        writer.tensor(info.name(), to, info.dims())?;
        changes.push(Change {
            name: Arc::clone(info.name()),
            from,
            to,
        });
    }
    Ok((writer, changes))
}

fn convert<W: Write>(
    file: &GgufFile,
    writer: GgufWriter,
    changes: &[Change],
    options: &QuantizeOptions<'_>,
    out: W,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<W, ModelError> {
    let mut body = writer.start(out)?;
    let total_bytes = file
        .tensors()
        .iter()
        .map(|info| file.data(info).len() as u64)
        .sum();
    let mut done_bytes = 0;
    for (info, change) in file.tensors().iter().zip(changes) {
        let data = file.data(info);
        let mut tell = |bytes: usize| {
            done_bytes += bytes as u64;
            progress(QuantizeProgress {
                tensor: info.name(),
                done_bytes,
                total_bytes,
            });
        };
        if change.from == change.to {
            for piece in data.chunks(PIECE_VALUES * 4) {
                body.write(piece)?;
                tell(piece.len());
            }
            continue;
        }
        // Both block sizes divide the columns and therefore every row. A piece is whole rows, or
        // whole super-blocks of one long row.
        let cols = usize::try_from(info.dims()[0]).unwrap_or(usize::MAX);
        let values = match PIECE_VALUES / cols {
            0 => PIECE_VALUES,
            rows => rows * cols,
        };
        let from_bytes = change.from.row_bytes(values);
        let threads = options.threads.max(1);
        let importance = options
            .importance
            .map(|all| all.of(info))
            .transpose()?
            .flatten();
        let rows = RowLayout {
            cols,
            per_expert: info.dims().get(1).map_or(1, |&rows| rows as usize),
            importance,
        };
        for (index, turn) in data.chunks(from_bytes * threads).enumerate() {
            let first = index * threads * values;
            for converted in convert_batch(turn, from_bytes, change, (rows, first)) {
                body.write(&converted)?;
            }
            tell(turn.len());
        }
    }
    Ok(body.finish()?)
}

/// Where the values of a piece are in their matrix.
#[derive(Clone, Copy)]
struct RowLayout<'a> {
    /// Values of a row.
    cols: usize,
    /// Rows of an expert, or all.
    per_expert: usize,
    /// A weight for each column, of one expert after the other.
    importance: Option<&'a [f32]>,
}

/// Converts the pieces of one batch, one thread per piece; `first` is the number of its first value
/// in the matrix.
fn convert_batch(
    turn: &[u8],
    piece_bytes: usize,
    change: &Change,
    (rows, first): (RowLayout<'_>, usize),
) -> Vec<Vec<u8>> {
    let values = piece_bytes / change.from.block_bytes() * change.from.block_values();
    std::thread::scope(|scope| {
        let workers: Vec<_> = turn
            .chunks(piece_bytes)
            .enumerate()
            .map(|(index, piece)| {
                let first = first + index * values;
                scope.spawn(move || convert_piece(piece, change, rows, first))
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("codecs do not panic on whole blocks"))
            .collect()
    })
}

fn convert_piece(piece: &[u8], change: &Change, rows: RowLayout<'_>, first: usize) -> Vec<u8> {
    let (from, to) = (change.from, change.to);
    let n = piece.len() / from.block_bytes() * from.block_values();
    let mut values = vec![0.0; n];
    quant::dequantize_row(from, piece, &mut values);
    let mut bytes = vec![0; to.row_bytes(n)];
    let Some(importance) = rows.importance else {
        quant::quantize_row(to, &values, &mut bytes);
        return bytes;
    };
    // A piece is whole rows or a part of one.
    let part = rows.cols.min(n);
    let parts = values
        .chunks(part)
        .zip(bytes.chunks_mut(to.row_bytes(part)));
    for (index, (values, bytes)) in parts.enumerate() {
        let at = first + index * part;
        let expert = at / rows.cols / rows.per_expert;
        let importance = &importance[expert * rows.cols + at % rows.cols..][..values.len()];
        quant::quantize_row_weighted(to, values, importance, bytes);
    }
    bytes
}
