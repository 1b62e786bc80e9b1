//! Reads little-endian fields from bytes that may end anywhere.

/// A fault of one field; the caller adds the key or tensor and the file.
#[derive(Debug)]
pub(crate) struct ParseFault {
    pub(crate) field: &'static str,
    pub(crate) offset: u64,
    pub(crate) detail: String,
}

/// A position in the bytes of a file.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    /// Bytes from the start of the file.
    pub(crate) fn offset(&self) -> u64 {
        self.at as u64
    }

    pub(crate) fn left(&self) -> u64 {
        self.rest_len() as u64
    }

    /// Bytes not read yet.
    pub(crate) fn rest_len(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// A fault of the field that begins `back` bytes before the cursor.
    pub(crate) fn fault(&self, field: &'static str, back: u64, detail: String) -> ParseFault {
        ParseFault {
            field,
            offset: self.offset() - back,
            detail,
        }
    }

    /// The next `n` bytes, if they are there.
    pub(crate) fn take(&mut self, n: u64, field: &'static str) -> Result<&'a [u8], ParseFault> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(n).ok().and_then(|n| rest.get(..n)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => Err(self.fault(field, 0, format!("{n} bytes wanted, {} left", rest.len()))),
        }
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], ParseFault> {
        let bytes = self.take(N as u64, field)?;
        Ok(*bytes
            .as_array()
            .expect("take gives as many bytes as asked for"))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, ParseFault> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, ParseFault> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A number of elements that take at least `least_bytes` each. Refused if they exceed the
    /// remaining bytes, so that allocations are bounded by the file's size.
    pub(crate) fn count(
        &mut self,
        field: &'static str,
        least_bytes: u64,
    ) -> Result<usize, ParseFault> {
        let count = self.u64(field)?;
        let most = self.left() / least_bytes;
        match usize::try_from(count) {
            Ok(n) if count <= most => Ok(n),
            _ => Err(self.fault(
                field,
                8,
                format!(
                    "{count} given, but only {most} can fit into the {} bytes left",
                    self.left()
                ),
            )),
        }
    }

    /// A length and that many bytes.
    pub(crate) fn string(&mut self, field: &'static str) -> Result<&'a [u8], ParseFault> {
        let len = self.u64(field)?;
        if len > self.left() {
            let detail = format!("a string of {len} bytes, but only {} are left", self.left());
            return Err(self.fault(field, 8, detail));
        }
        self.take(len, field)
    }

    /// `count` numbers of `N` bytes each.
    pub(crate) fn numbers<const N: usize, T>(
        &mut self,
        count: usize,
        field: &'static str,
        read: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, ParseFault> {
        let bytes = self.take(count as u64 * N as u64, field)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|b| read(*b)).collect())
    }
}
