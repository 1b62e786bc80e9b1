//! The hub's names of contents: SHA-256 of large files, Git's blob hash of small ones.

use std::fs::File;
use std::io::{self, Read};

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// Bytes read at once.
const CHUNK: usize = 1 << 20;

/// A content's name, in lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContentId(String);

impl ContentId {
    /// A name of 64 digits (SHA-256) or 40 (Git's SHA-1), possibly in the quotes of an `ETag`.
    pub(crate) fn parse(text: &str) -> Option<ContentId> {
        let text = text.trim_start_matches("W/").trim_matches('"');
        let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        (is_hex && matches!(text.len(), 40 | 64)).then(|| ContentId(text.to_ascii_lowercase()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The name that a file's content has, by the same function; `at` is called with each position.
    pub(crate) fn of_file(
        &self,
        file: &mut File,
        size: u64,
        at: &mut dyn FnMut(u64),
    ) -> io::Result<ContentId> {
        let mut context = if self.0.len() == 64 {
            Context::new(&SHA256)
        } else {
            let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            context.update(format!("blob {size}\0").as_bytes());
            context
        };
        let mut chunk = vec![0; CHUNK];
        let mut done = 0;
        loop {
            let n = file.read(&mut chunk)?;
            if n == 0 {
                break;
            }
            context.update(&chunk[..n]);
            done += n as u64;
            at(done);
        }
        Ok(ContentId(hex(context.finish().as_ref())))
    }
}

/// Hexadecimal digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn check(name: &str) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello\n").unwrap();
        file.rewind().unwrap();
        let name = ContentId::parse(name).unwrap();
        let found = name.of_file(&mut file, 6, &mut |_| {}).unwrap();
        assert_eq!(found, name);
    }

    #[test]
    fn names_are_those_of_git_and_sha256() {
        check("ce013625030ba8dba906f756967f9e9ca394464a");
        check("\"5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03\"");
        assert_eq!(ContentId::parse("../../etc/passwd"), None);
        assert_eq!(ContentId::parse("ce01"), None);
    }
}
