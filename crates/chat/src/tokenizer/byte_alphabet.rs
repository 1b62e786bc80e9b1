//! The byte alphabet: 256 printable characters, one per byte.

/// The byte map of byte-level BPE vocabularies, in both directions.
///
/// Printable ASCII and most of Latin-1 map to themselves; the other 68 bytes, in increasing order,
/// map to U+0100, U+0101 and so on.
pub(super) struct ByteAlphabet {
    letters: [char; 256],
    /// Byte of each character below U+0144, if any.
    values: [Option<u8>; 0x144],
}

impl ByteAlphabet {
    pub(super) fn new() -> ByteAlphabet {
        let mut letters = ['\0'; 256];
        let mut values = [None; 0x144];
        let mut next = 0x100u32;
        for byte in 0..=u8::MAX {
            let code = match byte {
                0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
                _ => {
                    next += 1;
                    next - 1
                }
            };
            letters[usize::from(byte)] =
                char::from_u32(code).expect("letters lie below the surrogates");
            values[code as usize] = Some(byte);
        }
        ByteAlphabet { letters, values }
    }

    pub(super) fn letter(&self, byte: u8) -> char {
        self.letters[usize::from(byte)]
    }

    /// Sets `mapped` to the characters of `text`'s bytes.
    pub(super) fn map(&self, text: &str, mapped: &mut String) {
        mapped.clear();
        mapped.extend(text.bytes().map(|byte| self.letter(byte)));
    }

    /// Appends the bytes of `token`; a token with a character outside the alphabet has the bytes of
    /// its UTF-8.
    pub(super) fn unmap(&self, token: &str, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        for letter in token.chars() {
            match self.values.get(letter as usize).copied().flatten() {
                Some(byte) => bytes.push(byte),
                None => {
                    bytes.truncate(start);
                    bytes.extend_from_slice(token.as_bytes());
                    return;
                }
            }
        }
    }
}
