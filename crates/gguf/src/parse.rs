//! Parses one file: header, metadata, tensor directory. Every value is checked before use.

use std::collections::HashSet;
use std::sync::Arc;

use crate::cursor::{Cursor, ParseFault};
use crate::tensors::shape;
use crate::value::shown;
use crate::{Array, GgufError, GgufString, Meta, TensorInfo, TensorType, Value};

/// Longest metadata key, in bytes.
const MAX_KEY: u64 = 65_535;
/// Longest tensor name, in bytes.
const MAX_NAME: u64 = 63;
/// Maximum nesting of arrays; real files have at most one level.
const MAX_DEPTH: usize = 8;
const DEFAULT_ALIGNMENT: u64 = 32;
/// Minimum bytes of a key-value pair (empty key, type, one byte) and of a tensor entry (one-byte
/// name, one dimension).
const LEAST_PAIR: u64 = 8 + 4 + 1;
const LEAST_TENSOR: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The parsed parts of one file.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) version: u32,
    pub(crate) meta: Meta,
    pub(crate) tensors: Vec<TensorInfo>,
    /// End of the tensor directory.
    pub(crate) head_bytes: usize,
}

/// Parses everything before the tensor data. `part` becomes the part index of the tensors.
pub(crate) fn parse(file: &str, bytes: &[u8], part: usize) -> Result<Parsed, GgufError> {
    let at = |place: String| {
        move |fault: ParseFault| GgufError::Malformed {
            file: file.to_owned(),
            place,
            field: fault.field,
            offset: fault.offset,
            detail: fault.detail,
        }
    };
    let header = || at("header".to_owned());
    let mut cursor = Cursor::new(bytes);
    let version = version(file, bytes, &mut cursor)?;
    let n_tensors = cursor
        .count("tensor count", LEAST_TENSOR)
        .map_err(header())?;
    let n_pairs = cursor
        .count("metadata count", LEAST_PAIR)
        .map_err(header())?;
    let mut meta = Meta::default();
    for i in 0..n_pairs {
        let start = cursor.offset();
        let key = key(&mut cursor).map_err(at(format!("metadata pair {i}")))?;
        let place = || at(format!("key {}", shown(key.as_bytes())));
        let value = value(&mut cursor).map_err(place())?;
        if meta.insert(key, value).is_err() {
            let detail = "the key is there already".to_owned();
            return Err(place()(ParseFault {
                field: "key",
                offset: start,
                detail,
            }));
        }
    }
    let alignment = alignment(&meta).map_err(at("key general.alignment".to_owned()))?;
    let mut tensors = Vec::with_capacity(n_tensors);
    for i in 0..n_tensors {
        let name_field = cursor.offset();
        let name = name(&mut cursor).map_err(at(format!("tensor {i}")))?;
        let place = at(format!("tensor {}", shown(name.as_bytes())));
        tensors.push(entry(&mut cursor, (name_field, name), part, alignment).map_err(place)?);
    }
    let head_bytes = bytes.len() - cursor.rest_len();
    if !tensors.is_empty() {
        let data_start = cursor.offset().checked_next_multiple_of(alignment);
        place_tensors(&mut tensors, data_start, bytes.len() as u64)
            .map_err(|(tensor, fault)| at(format!("tensor {}", shown(tensor.as_bytes())))(fault))?;
    }
    let tensors = tensors.into_iter().map(|entry| entry.info).collect();
    Ok(Parsed {
        version,
        meta,
        tensors,
        head_bytes,
    })
}

fn version(file: &str, bytes: &[u8], cursor: &mut Cursor<'_>) -> Result<u32, GgufError> {
    let found = &bytes[..bytes.len().min(4)];
    if found != b"GGUF" {
        let found = if found.is_empty() {
            "nothing".to_owned()
        } else {
            format!("\"{}\"", found.escape_ascii())
        };
        return Err(GgufError::NotGguf {
            file: file.to_owned(),
            found,
        });
    }
    let read = cursor.take(4, "magic").and_then(|_| cursor.u32("version"));
    match read {
        Ok(version @ (2 | 3)) => Ok(version),
        Ok(version) if matches!(version.swap_bytes(), 1..=3) => Err(GgufError::BigEndian {
            file: file.to_owned(),
        }),
        Ok(version) => Err(GgufError::Version {
            file: file.to_owned(),
            version,
        }),
        Err(ParseFault {
            field,
            offset,
            detail,
        }) => Err(GgufError::Malformed {
            file: file.to_owned(),
            place: "header".to_owned(),
            field,
            offset,
            detail,
        }),
    }
}

fn limited<'a>(
    cursor: &mut Cursor<'a>,
    field: &'static str,
    most: u64,
) -> Result<&'a str, ParseFault> {
    let bytes = cursor.string(field)?;
    let len = bytes.len() as u64;
    if len > most {
        return Err(cursor.fault(
            field,
            len + 8,
            format!("{len} bytes long, the limit is {most}"),
        ));
    }
    std::str::from_utf8(bytes)
        .map_err(|_| cursor.fault(field, len, format!("not UTF-8: {}", shown(bytes))))
}

fn key<'a>(cursor: &mut Cursor<'a>) -> Result<&'a str, ParseFault> {
    limited(cursor, "key", MAX_KEY)
}

fn value(cursor: &mut Cursor<'_>) -> Result<Value, ParseFault> {
    const F: &str = "value";
    let id = cursor.u32("value type")?;
    Ok(match id {
        0 => Value::U8(u8::from_le_bytes(cursor.array(F)?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array(F)?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array(F)?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array(F)?)),
        4 => Value::U32(cursor.u32(F)?),
        5 => Value::I32(i32::from_le_bytes(cursor.array(F)?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array(F)?)),
        7 => Value::Bool(truth(cursor, 1, F)?[0]),
        8 => Value::String(GgufString::from(cursor.string(F)?)),
        9 => Value::Array(array(cursor, 1)?),
        10 => Value::U64(cursor.u64(F)?),
        11 => Value::I64(i64::from_le_bytes(cursor.array(F)?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array(F)?)),
        _ => return Err(unknown_type(cursor, "value type", id)),
    })
}

fn unknown_type(cursor: &Cursor<'_>, field: &'static str, id: u32) -> ParseFault {
    cursor.fault(field, 4, format!("{id} is not a type, the highest is 12"))
}

fn array(cursor: &mut Cursor<'_>, depth: usize) -> Result<Array, ParseFault> {
    const F: &str = "array elements";
    let id = cursor.u32("array element type")?;
    let least = match id {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => 12,
        _ => return Err(unknown_type(cursor, "array element type", id)),
    };
    let n = cursor.count("array length", least)?;
    Ok(match id {
        0 => Array::U8(cursor.take(n as u64, F)?.to_vec()),
        1 => Array::I8(cursor.numbers(n, F, i8::from_le_bytes)?),
        2 => Array::U16(cursor.numbers(n, F, u16::from_le_bytes)?),
        3 => Array::I16(cursor.numbers(n, F, i16::from_le_bytes)?),
        4 => Array::U32(cursor.numbers(n, F, u32::from_le_bytes)?),
        5 => Array::I32(cursor.numbers(n, F, i32::from_le_bytes)?),
        6 => Array::F32(cursor.numbers(n, F, f32::from_le_bytes)?),
        7 => Array::Bool(truth(cursor, n, F)?),
        8 => Array::String(
            (0..n)
                .map(|_| cursor.string(F).map(GgufString::from))
                .collect::<Result<_, _>>()?,
        ),
        9 if depth >= MAX_DEPTH => {
            let detail = format!("arrays nested deeper than {MAX_DEPTH}");
            return Err(cursor.fault("array element type", 12, detail));
        }
        9 => Array::Array(
            (0..n)
                .map(|_| array(cursor, depth + 1))
                .collect::<Result<_, _>>()?,
        ),
        10 => Array::U64(cursor.numbers(n, F, u64::from_le_bytes)?),
        11 => Array::I64(cursor.numbers(n, F, i64::from_le_bytes)?),
        _ => Array::F64(cursor.numbers(n, F, f64::from_le_bytes)?),
    })
}

fn truth(cursor: &mut Cursor<'_>, n: usize, field: &'static str) -> Result<Vec<bool>, ParseFault> {
    let bytes = cursor.take(n as u64, field)?;
    if let Some(i) = bytes.iter().position(|&b| b > 1) {
        let detail = format!("{} is not a bool, which is 0 or 1", bytes[i]);
        return Err(cursor.fault(field, (n - i) as u64, detail));
    }
    Ok(bytes.iter().map(|&b| b == 1).collect())
}

fn alignment(meta: &Meta) -> Result<u64, ParseFault> {
    let Some(value) = meta.get("general.alignment") else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_integer() {
        Some(v) if v.is_power_of_two() && v <= u64::from(u32::MAX) => Ok(v),
        _ => Err(ParseFault {
            field: "value",
            offset: 0,
            detail: format!(
                "{} {value} is not an alignment, which is a power of two",
                value.type_name()
            ),
        }),
    }
}

/// A tensor entry with an unchecked offset.
struct TensorEntry {
    info: TensorInfo,
    /// Bytes from the start of the data section.
    offset: u64,
    /// Offsets of the name and offset fields, for messages.
    name_field: u64,
    offset_field: u64,
}

fn name(cursor: &mut Cursor<'_>) -> Result<Arc<str>, ParseFault> {
    let name = limited(cursor, "name", MAX_NAME)?;
    if name.is_empty() {
        return Err(cursor.fault("name", 8, "the name is empty".to_owned()));
    }
    Ok(name.into())
}

fn entry(
    cursor: &mut Cursor<'_>,
    (name_field, name): (u64, Arc<str>),
    part: usize,
    alignment: u64,
) -> Result<TensorEntry, ParseFault> {
    let n_dims = cursor.u32("dimension count")?;
    if !(1..=4).contains(&n_dims) {
        let detail = format!("{n_dims} dimensions, the format has 1 to 4");
        return Err(cursor.fault("dimension count", 4, detail));
    }
    let dims_at = cursor.offset();
    let dims = cursor.numbers(n_dims as usize, "dimensions", u64::from_le_bytes)?;
    let dims_fault = |detail| ParseFault {
        field: "dimensions",
        offset: dims_at,
        detail,
    };
    if dims.contains(&0) {
        return Err(dims_fault(format!("{}: a dimension is zero", shape(&dims))));
    }
    let Some(values) = dims
        .iter()
        .try_fold(1u64, |product, &d| product.checked_mul(d))
    else {
        return Err(dims_fault(format!(
            "{}: the product overflows 64 bits",
            shape(&dims)
        )));
    };
    let ty = TensorType::from_id(cursor.u32("type")?);
    let block = match ty {
        TensorType::Foreign(_) => None,
        TensorType::I64 => Some((1, size_of::<i64>() as u64)),
        TensorType::Known(known) => Some((known.block_values() as u64, known.block_bytes() as u64)),
    };
    let n_bytes = match block {
        None => 0,
        Some((block_values, block_bytes)) => {
            if dims[0] % block_values != 0 {
                return Err(dims_fault(format!(
                    "rows of {} values, but {ty} comes in blocks of {block_values}",
                    dims[0]
                )));
            }
            let bytes = (values / block_values).checked_mul(block_bytes);
            bytes
                .and_then(|bytes| usize::try_from(bytes).ok())
                .ok_or_else(|| {
                    dims_fault(format!("{} of {ty}: the size overflows", shape(&dims)))
                })?
        }
    };
    let offset_field = cursor.offset();
    let offset = cursor.u64("offset")?;
    if offset % alignment != 0 {
        let detail = format!("{offset} is not a multiple of the alignment {alignment}");
        return Err(cursor.fault("offset", 8, detail));
    }
    let info = TensorInfo {
        name,
        ty,
        dims,
        part,
        start: 0,
        n_bytes,
    };
    Ok(TensorEntry {
        info,
        offset,
        name_field,
        offset_field,
    })
}

/// Converts offsets to positions in the file. Checks that they are inside it, that names are
/// unique, and that no tensors overlap.
fn place_tensors(
    tensors: &mut [TensorEntry],
    data_start: Option<u64>,
    file_len: u64,
) -> Result<(), (Arc<str>, ParseFault)> {
    let mut seen: HashSet<&str> = HashSet::with_capacity(tensors.len());
    for tensor in tensors.iter() {
        if !seen.insert(&tensor.info.name) {
            let detail = "another tensor has the same name".to_owned();
            let fault = ParseFault {
                field: "name",
                offset: tensor.name_field,
                detail,
            };
            return Err((Arc::clone(&tensor.info.name), fault));
        }
    }
    for tensor in tensors.iter_mut() {
        let n_bytes = tensor.info.n_bytes as u64;
        let start = data_start.and_then(|start| start.checked_add(tensor.offset));
        let end = start.and_then(|start| start.checked_add(n_bytes));
        let placed = match (start, end) {
            (Some(start), Some(end)) if end <= file_len => usize::try_from(start).ok(),
            _ => None,
        };
        let Some(start) = placed else {
            let detail = format!(
                "{n_bytes} bytes at {} of a data section that starts at {}, but the file ends at {file_len}; \
                 it is truncated or damaged",
                tensor.offset,
                data_start.map_or("no valid place".to_owned(), |start| format!("byte {start}")),
            );
            let fault = ParseFault {
                field: "offset",
                offset: tensor.offset_field,
                detail,
            };
            return Err((Arc::clone(&tensor.info.name), fault));
        };
        tensor.info.start = start;
    }
    let mut order: Vec<&TensorEntry> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.info.start);
    for pair in order.windows(2) {
        let (first, second) = (&pair[0].info, &pair[1]);
        if first.start + first.n_bytes > second.info.start {
            let detail = format!(
                "at byte {} of the file, which {} occupies up to byte {}",
                second.info.start,
                shown(first.name.as_bytes()),
                first.start + first.n_bytes
            );
            let fault = ParseFault {
                field: "offset",
                offset: second.offset_field,
                detail,
            };
            return Err((Arc::clone(&second.info.name), fault));
        }
    }
    Ok(())
}
