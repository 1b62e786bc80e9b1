//! NumPy files: writes a two-dimensional f32 array row by row in version 1.0, and reads arrays of
//! any version.
//!
//! Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>. Crates for it
//! (npyz, ndarray-npy) add a parser generator and a C build step for the one header line that is
//! parsed here.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::{Context, bail};

/// A file that is written row by row.
pub(super) struct NpyWriter {
    file: BufWriter<File>,
    cols: usize,
    rows_left: usize,
}

impl NpyWriter {
    /// Creates the file and writes its header for `[rows, cols]` little-endian f32 values.
    pub(super) fn create(path: &Path, rows: usize, cols: usize) -> io::Result<NpyWriter> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&header(rows, cols))?;
        Ok(NpyWriter {
            file,
            cols,
            rows_left: rows,
        })
    }

    /// Appends one row of `cols` values.
    pub(super) fn row(&mut self, values: &[f32]) -> io::Result<()> {
        if values.len() != self.cols || self.rows_left == 0 {
            return Err(io::Error::other(
                "the row has another length, or there are more rows than in the header",
            ));
        }
        self.rows_left -= 1;
        for value in values {
            self.file.write_all(&value.to_le_bytes())?;
        }
        Ok(())
    }

    /// Flushes the file.
    ///
    /// # Errors
    /// If rows are missing.
    pub(super) fn finish(mut self) -> io::Result<()> {
        if self.rows_left != 0 {
            return Err(io::Error::other(format!(
                "{} rows are missing",
                self.rows_left
            )));
        }
        self.file.flush()
    }
}

/// Reads an array of f32 or f64 values, as f32: `(shape, values)`, the last dimension contiguous.
pub(super) fn read_f32(path: &Path) -> anyhow::Result<(Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&bytes).with_context(|| format!("{} is not a NumPy array of floats", path.display()))
}

fn parse(bytes: &[u8]) -> anyhow::Result<(Vec<usize>, Vec<f32>)> {
    let rest = bytes
        .strip_prefix(b"\x93NUMPY")
        .context("the file has no NumPy magic bytes")?;
    let (length, begin) = match *rest {
        [1, _, a, b, ..] => (usize::from(u16::from_le_bytes([a, b])), 4),
        [2 | 3, _, a, b, c, d, ..] => (u32::from_le_bytes([a, b, c, d]) as usize, 6),
        _ => bail!("the format version is not 1, 2 or 3"),
    };
    let header = rest.get(begin..).and_then(|rest| rest.get(..length));
    let header = std::str::from_utf8(header.context("the header is cut off")?)?;
    let data = &rest[begin + length..];
    let after = |key: &str| {
        header
            .split_once(key)
            .map(|(_, rest)| rest.trim_start_matches([':', ' ']))
    };
    let descr = after("'descr'").context("the header has no descr")?;
    let order = after("'fortran_order'").context("the header has no fortran_order")?;
    if !order.starts_with("False") {
        bail!("the array is in Fortran order; save numpy.ascontiguousarray of it");
    }
    let shape = after("'shape'").and_then(|rest| rest.strip_prefix('('));
    let (shape, _) = shape
        .and_then(|rest| rest.split_once(')'))
        .context("the header has no shape")?;
    let sizes = shape
        .split(',')
        .map(str::trim)
        .filter(|size| !size.is_empty());
    let shape = sizes.map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let count = shape
        .iter()
        .try_fold(1_usize, |product, n| product.checked_mul(*n));
    let count = count.context("the shape is too large")?;
    let values: Vec<f32> = match descr.get(1..4) {
        Some("<f4") => {
            let words = data.as_chunks::<4>().0.iter();
            words.map(|word| f32::from_le_bytes(*word)).collect()
        }
        Some("<f8") => {
            let words = data.as_chunks::<8>().0.iter();
            words.map(|word| f64::from_le_bytes(*word) as f32).collect()
        }
        _ => bail!("the values are neither <f4 nor <f8"),
    };
    if values.len() != count {
        bail!("{} values for a shape of {shape:?}", values.len());
    }
    Ok((shape, values))
}

/// The header: magic, version, length, and a Python dictionary padded so that the data begins at a
/// multiple of 64.
fn header(rows: usize, cols: usize) -> Vec<u8> {
    const PREFIX: usize = 10;
    let mut dict =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
    let unpadded = PREFIX + dict.len() + 1;
    dict.extend(std::iter::repeat_n(
        ' ',
        unpadded.next_multiple_of(64) - unpadded,
    ));
    dict.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    let length = u16::try_from(dict.len()).expect("two numbers fit a short header");
    bytes.extend(length.to_le_bytes());
    bytes.extend(dict.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_begins_at_a_multiple_of_64() {
        for (rows, cols) in [(1, 1), (200, 248_320), (4096, 7)] {
            let bytes = header(rows, cols);
            assert_eq!(bytes.len() % 64, 0);
            assert_eq!(
                usize::from(bytes[8]) + 256 * usize::from(bytes[9]) + 10,
                bytes.len()
            );
            assert_eq!(bytes.last(), Some(&b'\n'));
        }
    }

    #[test]
    fn array_round_trips_and_a_cut_file_is_refused() {
        let mut bytes = header(2, 2);
        for value in [1.0_f32, -2.0, 0.5, f32::NEG_INFINITY] {
            bytes.extend(value.to_le_bytes());
        }
        let (shape, values) = parse(&bytes).unwrap();
        assert_eq!(shape, [2, 2]);
        assert_eq!(values, [1.0, -2.0, 0.5, f32::NEG_INFINITY]);
        for cut in 0..bytes.len() - 1 {
            assert!(parse(&bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn missing_and_extra_rows_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.npy");
        let mut npy = NpyWriter::create(&path, 2, 2).unwrap();
        npy.row(&[1.0, 2.0]).unwrap();
        assert!(npy.row(&[1.0]).is_err());
        npy.row(&[3.0, 4.0]).unwrap();
        assert!(npy.row(&[1.0, 2.0]).is_err());
        npy.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes[bytes.len() - 4..], 4.0_f32.to_le_bytes());
        assert!(NpyWriter::create(&path, 1, 1).unwrap().finish().is_err());
    }
}
