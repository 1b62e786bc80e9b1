//! The byte alphabet: 256 printable letters, one per byte.

/// Both directions of the byte map used by byte-level BPE vocabularies.
///
/// Printable ASCII and most of Latin-1 stand for themselves; the remaining 68 bytes, in increasing
/// order, are U+0100, U+0101 and so on.
pub(super) struct ByteAlphabet {
    letters: [char; 256],
    /// Byte of each letter below U+0144, or none.
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

    /// Replaces `mapped` by the letters of `text`'s bytes.
    pub(super) fn map(&self, text: &str, mapped: &mut String) {
        mapped.clear();
        mapped.extend(text.bytes().map(|byte| self.letter(byte)));
    }

    /// Appends the bytes `token` stands for; a token with a letter outside the alphabet stands for
    /// its own UTF-8.
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
