//! Writes a two-dimensional f32 array in NumPy's format, version 1.0, row by row.
//!
//! Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A file that takes rows until it has as many as announced.
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
            return Err(io::Error::other("a row that the header did not announce"));
        }
        self.rows_left -= 1;
        for value in values {
            self.file.write_all(&value.to_le_bytes())?;
        }
        Ok(())
    }

    /// Flushes the file; an error if rows are missing.
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

/// The header: magic, version, length, a Python dictionary padded so that data begins at a multiple of 64.
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
    fn rows_are_counted() {
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
