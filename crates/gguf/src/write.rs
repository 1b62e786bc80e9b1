//! Writes GGUF version 3: the head, then the tensors as a stream.

use std::collections::HashSet;
use std::io::Write;

use contract::QuantType;

use crate::tensors::I64_ID;
use crate::{Array, GgufError, GgufString, Meta, Value};

/// Collects the metadata and the tensor directory of a new file.
///
/// ```
/// use contract::QuantType;
/// use gguf::{GgufWriter, Value};
///
/// let mut writer = GgufWriter::new();
/// writer.meta("general.architecture", Value::from("none"))?;
/// writer.tensor("scale", QuantType::F32, &[2])?;
/// let mut body = writer.start(Vec::new())?;
/// body.write(&1.0f32.to_le_bytes())?;
/// body.write(&2.0f32.to_le_bytes())?;
/// let file: Vec<u8> = body.finish()?;
/// assert!(file.starts_with(b"GGUF"));
/// # Ok::<(), gguf::GgufError>(())
/// ```
#[derive(Debug, Default)]
pub struct GgufWriter {
    meta: Meta,
    tensors: Vec<Planned>,
    names: HashSet<String>,
    /// Bytes of the data section so far, without padding after the last tensor.
    data_bytes: u64,
    alignment: u64,
}

#[derive(Debug)]
struct Planned {
    name: String,
    type_id: u32,
    dims: Vec<u64>,
    offset: u64,
    n_bytes: u64,
}

impl GgufWriter {
    /// An empty file with the default alignment of 32 bytes.
    pub fn new() -> GgufWriter {
        GgufWriter {
            alignment: 32,
            ..GgufWriter::default()
        }
    }

    /// Adds a key. `general.alignment` sets the alignment and must precede the first tensor.
    ///
    /// # Errors
    /// [`GgufError::Unwritable`] if the key exists or is longer than 65535 bytes, or if an
    /// alignment is not a power of two in a `u32` or follows a tensor.
    pub fn meta(&mut self, key: &str, value: Value) -> Result<(), GgufError> {
        let refuse = |detail: &str| Err(unwritable(format!("key {key}"), detail.to_owned()));
        if key.len() > 65_535 {
            return refuse("longer than 65535 bytes");
        }
        if key == "general.alignment" {
            match value {
                _ if !self.tensors.is_empty() => return refuse("set after the first tensor"),
                Value::U32(v) if v.is_power_of_two() => self.alignment = v.into(),
                _ => return refuse("not a power of two in a u32"),
            }
        }
        match self.meta.insert(key, value) {
            Ok(()) => Ok(()),
            Err(_) => refuse("the key is there already"),
        }
    }

    /// Adds a tensor of `dims`, the contiguous dimension first. Its bytes follow later, in the same
    /// order.
    ///
    /// # Errors
    /// [`GgufError::Unwritable`] for a name that is empty, taken or longer than 63 bytes, and for
    /// dimensions that the format or the type cannot hold.
    pub fn tensor(&mut self, name: &str, ty: QuantType, dims: &[u64]) -> Result<(), GgufError> {
        let block = (ty.block_values() as u64, ty.block_bytes() as u64);
        self.plan((name, dims), (ty.name(), ty.id()), block)
    }

    /// Adds a vector of `len` 64-bit integers.
    ///
    /// # Errors
    /// As [`GgufWriter::tensor`].
    pub fn integers(&mut self, name: &str, len: u64) -> Result<(), GgufError> {
        self.plan(
            (name, &[len]),
            ("I64", I64_ID),
            (1, size_of::<i64>() as u64),
        )
    }

    fn plan(
        &mut self,
        (name, dims): (&str, &[u64]),
        (type_name, type_id): (&str, u32),
        (block_values, block_bytes): (u64, u64),
    ) -> Result<(), GgufError> {
        let refuse = |detail: String| Err(unwritable(format!("tensor {name}"), detail));
        if name.is_empty() || name.len() > 63 {
            return refuse(format!(
                "a name of {} bytes, the format has 1 to 63",
                name.len()
            ));
        }
        if !(1..=4).contains(&dims.len()) || dims.contains(&0) {
            return refuse(format!("dimensions {dims:?}"));
        }
        if !dims[0].is_multiple_of(block_values) {
            return refuse(format!(
                "rows of {} values, but {type_name} comes in blocks of {block_values}",
                dims[0],
            ));
        }
        let offset = self.data_bytes.checked_next_multiple_of(self.alignment);
        let values = dims
            .iter()
            .try_fold(1u64, |product, &d| product.checked_mul(d));
        let sizes = values
            .and_then(|values| (values / block_values).checked_mul(block_bytes))
            .and_then(|n_bytes| Some((offset?, n_bytes, offset?.checked_add(n_bytes)?)));
        let Some((offset, n_bytes, end)) = sizes else {
            return refuse(format!("dimensions {dims:?} overflow"));
        };
        if !self.names.insert(name.to_owned()) {
            return refuse("the name is taken".to_owned());
        }
        self.data_bytes = end;
        self.tensors.push(Planned {
            name: name.to_owned(),
            type_id,
            dims: dims.to_vec(),
            offset,
            n_bytes,
        });
        Ok(())
    }

    /// Bytes of all tensors, with the padding between them.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Writes the head and returns the stream of the data section. `out` should be buffered.
    ///
    /// # Errors
    /// [`GgufError::Write`].
    pub fn start<W: Write>(self, mut out: W) -> Result<GgufBody<W>, GgufError> {
        let mut head = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.meta.len() as u64).to_le_bytes());
        for (key, value) in self.meta.iter() {
            put_string(&mut head, key.as_bytes());
            head.extend(value.type_id().to_le_bytes());
            put_value(&mut head, value);
        }
        for tensor in &self.tensors {
            put_string(&mut head, tensor.name.as_bytes());
            head.extend((tensor.dims.len() as u32).to_le_bytes());
            head.extend(tensor.dims.iter().flat_map(|d| d.to_le_bytes()));
            head.extend(tensor.type_id.to_le_bytes());
            head.extend(tensor.offset.to_le_bytes());
        }
        out.write_all(&head).map_err(GgufError::Write)?;
        let written = head.len() as u64;
        let mut body = GgufBody {
            out,
            tensors: self.tensors.into_iter(),
            left: 0,
            data_start: 0,
            alignment: self.alignment,
            written,
        };
        body.pad_to(written.next_multiple_of(self.alignment))?;
        body.data_start = body.written;
        Ok(body)
    }
}

/// The data section as a stream: the tensors' bytes in the order of the directory, in pieces of any
/// size.
#[derive(Debug)]
pub struct GgufBody<W> {
    out: W,
    /// Tensors that have not been started.
    tensors: std::vec::IntoIter<Planned>,
    /// Missing bytes of the current tensor.
    left: u64,
    data_start: u64,
    alignment: u64,
    /// Bytes of the file so far.
    written: u64,
}

impl<W: Write> GgufBody<W> {
    /// Writes the next bytes. A piece may span tensors; padding is added between them.
    ///
    /// # Errors
    /// [`GgufError::Write`], or [`GgufError::Unwritable`] if there are more bytes than the tensors
    /// have.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), GgufError> {
        while !bytes.is_empty() {
            if self.left == 0 {
                let Some(next) = self.tensors.next() else {
                    let detail = format!("{} bytes more than the tensors have", bytes.len());
                    return Err(unwritable("the data section".to_owned(), detail));
                };
                self.pad_to(self.data_start + next.offset)?;
                self.left = next.n_bytes;
            }
            let now = usize::try_from(self.left)
                .unwrap_or(usize::MAX)
                .min(bytes.len());
            self.out
                .write_all(&bytes[..now])
                .map_err(GgufError::Write)?;
            self.left -= now as u64;
            self.written += now as u64;
            bytes = &bytes[now..];
        }
        Ok(())
    }

    /// Checks that all tensors are complete, flushes and returns the output.
    ///
    /// # Errors
    /// [`GgufError::Write`], or [`GgufError::Unwritable`] if bytes are missing.
    pub fn finish(mut self) -> Result<W, GgufError> {
        let missing = if self.left > 0 {
            Some(format!("{} bytes of a tensor are missing", self.left))
        } else {
            self.tensors
                .next()
                .map(|next| format!("tensor {} has no bytes", next.name))
        };
        if let Some(detail) = missing {
            return Err(unwritable("the data section".to_owned(), detail));
        }
        // Other writers pad the last tensor too.
        self.pad_to(self.written.next_multiple_of(self.alignment))?;
        self.out.flush().map_err(GgufError::Write)?;
        Ok(self.out)
    }

    fn pad_to(&mut self, position: u64) -> Result<(), GgufError> {
        const ZEROS: [u8; 256] = [0; 256];
        while self.written < position {
            let now = (position - self.written).min(ZEROS.len() as u64);
            let zeros = usize::try_from(now).map_or(&ZEROS[..], |n| &ZEROS[..n]);
            self.out.write_all(zeros).map_err(GgufError::Write)?;
            self.written += now;
        }
        Ok(())
    }
}

fn unwritable(what: String, detail: String) -> GgufError {
    GgufError::Unwritable { what, detail }
}

fn put_string(head: &mut Vec<u8>, bytes: &[u8]) {
    head.extend((bytes.len() as u64).to_le_bytes());
    head.extend(bytes);
}

fn put_value(head: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => head.push(*v),
        Value::I8(v) => head.extend(v.to_le_bytes()),
        Value::U16(v) => head.extend(v.to_le_bytes()),
        Value::I16(v) => head.extend(v.to_le_bytes()),
        Value::U32(v) => head.extend(v.to_le_bytes()),
        Value::I32(v) => head.extend(v.to_le_bytes()),
        Value::F32(v) => head.extend(v.to_le_bytes()),
        Value::Bool(v) => head.push(u8::from(*v)),
        Value::String(v) => put_string(head, v.as_bytes()),
        Value::Array(v) => put_array(head, v),
        Value::U64(v) => head.extend(v.to_le_bytes()),
        Value::I64(v) => head.extend(v.to_le_bytes()),
        Value::F64(v) => head.extend(v.to_le_bytes()),
    }
}

fn put_array(head: &mut Vec<u8>, array: &Array) {
    head.extend(array.element_id().to_le_bytes());
    head.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => head.extend(v),
        Array::I8(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::U16(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::I16(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::U32(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::I32(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::F32(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::Bool(v) => head.extend(v.iter().map(|&x| u8::from(x))),
        Array::String(v) => v
            .iter()
            .for_each(|text: &GgufString| put_string(head, text.as_bytes())),
        Array::Array(v) => v.iter().for_each(|inner| put_array(head, inner)),
        Array::U64(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::I64(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        Array::F64(v) => head.extend(v.iter().flat_map(|x| x.to_le_bytes())),
    }
}
