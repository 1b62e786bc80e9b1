//! A cache of CUBINs, one file each.
//!
//! A file name holds the hash of everything that decides the bytes, and the compiler version:
//! `<hash of expanded source, options, defines, architecture, format>-<NVRTC version>.cubin`. A
//! file ends with a checksum, so a corrupt file counts as absent. Without NVRTC, the newest
//! compiler version wins.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::nvrtc_library::Nvrtc;

/// A new number invalidates all older files.
const FORMAT_VERSION: u32 = 1;
/// The first bytes of a file.
const MAGIC: &[u8; 8] = b"HEARTHCU";
/// Size of the trailing checksum in bytes.
const CHECKSUM: usize = 32;

/// The cache folder, if any.
pub(super) struct Cache {
    folder: Option<PathBuf>,
    /// Version of the available compiler.
    version: Option<(i32, i32)>,
}

/// A valid cache entry.
pub(super) struct CacheHit {
    pub(super) cubin: Vec<u8>,
    /// The compiler's log.
    pub(super) log: String,
    pub(super) file: PathBuf,
}

impl Cache {
    /// A cache in `folder` for the compiler `library`.
    pub(super) fn new(folder: Option<&Path>, library: Option<&Nvrtc>) -> Cache {
        Cache {
            folder: folder.map(Path::to_path_buf),
            version: library.map(|library| library.version),
        }
    }

    /// The file name for `flags` and `source`, without the compiler version.
    pub(super) fn key(&self, source: &str, flags: &[String]) -> String {
        let mut hash = blake3::Hasher::new();
        hash.update(&FORMAT_VERSION.to_le_bytes());
        for part in flags.iter().map(String::as_str).chain([source]) {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.finalize().to_hex()[..40].to_owned()
    }

    /// The entry of `key`, if present and valid.
    pub(super) fn get(&self, key: &str) -> Option<CacheHit> {
        let folder = self.folder.as_deref()?;
        let file = match self.version {
            Some(version) => folder.join(name(key, version)),
            None => newest(folder, key)?,
        };
        let bytes = match fs::read(&file) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(file = %file.display(), %error, "cached kernel unreadable");
                }
                return None;
            }
        };
        let Some((cubin, log)) = unpack(&bytes) else {
            tracing::warn!(file = %file.display(), "cached kernel corrupt, compiling again");
            return None;
        };
        Some(CacheHit { cubin, log, file })
    }

    /// Stores an entry. A failure is only a warning, since it costs time and nothing else.
    pub(super) fn put(&self, key: &str, cubin: &[u8], log: &str) {
        let (Some(folder), Some(version)) = (&self.folder, self.version) else {
            return;
        };
        let file = folder.join(name(key, version));
        if let Err(error) = write(folder, &file, &pack(cubin, log)) {
            tracing::warn!(file = %file.display(), %error, "a compiled kernel cannot be cached");
        }
    }
}

fn name(key: &str, (major, minor): (i32, i32)) -> String {
    format!("{key}-{major}.{minor}.cubin")
}

/// The entry of `key` from the newest compiler.
fn newest(folder: &Path, key: &str) -> Option<PathBuf> {
    let version = |path: &Path| -> Option<(i32, i32)> {
        let name = path.file_name()?.to_str()?;
        let (major, minor) = name
            .strip_prefix(key)?
            .strip_prefix('-')?
            .strip_suffix(".cubin")?
            .split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    fs::read_dir(folder)
        .ok()?
        .filter_map(Result::ok)
        .filter_map(|entry| Some((version(&entry.path())?, entry.path())))
        .max()
        .map(|(_, path)| path)
}

/// Writes a temporary file in `folder` and renames it to `file`, so readers never see a part.
fn write(folder: &Path, file: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    // Readable by others as the umask allows: a cache may be shared.
    let mode = fs::Permissions::from_mode(0o666);
    let mut draft = tempfile::Builder::new()
        .permissions(mode)
        .tempfile_in(folder)?;
    draft.write_all(bytes)?;
    draft.persist(file)?;
    Ok(())
}

/// Magic, CUBIN length, CUBIN, log, checksum.
fn pack(cubin: &[u8], log: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend((cubin.len() as u64).to_le_bytes());
    bytes.extend(cubin);
    bytes.extend(log.as_bytes());
    let checksum = *blake3::hash(&bytes).as_bytes();
    bytes.extend(checksum);
    bytes
}

/// The CUBIN and log of a valid file.
fn unpack(bytes: &[u8]) -> Option<(Vec<u8>, String)> {
    let (body, checksum) = bytes.split_at_checked(bytes.len().checked_sub(CHECKSUM)?)?;
    if blake3::hash(body).as_bytes().as_slice() != checksum {
        return None;
    }
    let body = body.strip_prefix(MAGIC.as_slice())?;
    let (len, body) = body.split_first_chunk::<8>()?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
    let (cubin, log) = body.split_at_checked(len)?;
    Some((cubin.to_vec(), String::from_utf8_lossy(log).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path, version: Option<(i32, i32)>) -> Cache {
        Cache {
            folder: Some(folder.to_path_buf()),
            version,
        }
    }

    #[test]
    fn stored_entry_is_found_and_corrupt_entry_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), Some((13, 0)));
        let key = cache.key("int a;", &["-DN=1".to_owned()]);
        assert!(cache.get(&key).is_none());
        cache.put(&key, b"machine code", "a log");
        let found = cache.get(&key).unwrap();
        assert_eq!(
            (found.cubin.as_slice(), found.log.as_str()),
            (&b"machine code"[..], "a log")
        );
        let whole = fs::read(&found.file).unwrap();
        for cut in [0, 7, 31, whole.len() - 1] {
            fs::write(&found.file, &whole[..cut]).unwrap();
            assert!(cache.get(&key).is_none(), "cut at {cut}");
        }
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            assert!(unpack(&bad).is_none(), "flipped at {at}");
        }
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "no half-written file stays");
    }

    #[test]
    fn key_covers_source_and_flags() {
        let cache = cache(Path::new("nowhere"), None);
        let flags = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let key = cache.key("a", &flags("sm_90a -DN=1"));
        assert_eq!(key, cache.key("a", &flags("sm_90a -DN=1")));
        for other in [
            cache.key("b", &flags("sm_90a -DN=1")),
            cache.key("a", &flags("sm_86 -DN=1")),
            cache.key("a", &flags("sm_90a -DN=2")),
            cache.key("a", &flags("sm_90a -DN= 1")),
        ] {
            assert_ne!(key, other);
        }
    }

    #[test]
    fn entries_are_per_compiler_version_and_newest_wins_without_nvrtc() {
        let folder = tempfile::tempdir().unwrap();
        let of = |version| cache(folder.path(), version);
        let key = of(None).key("a", &[]);
        of(Some((12, 9))).put(&key, b"old", "");
        of(Some((13, 0))).put(&key, b"new", "");
        assert!(of(Some((12, 8))).get(&key).is_none());
        assert_eq!(of(Some((12, 9))).get(&key).unwrap().cubin, b"old");
        assert_eq!(of(None).get(&key).unwrap().cubin, b"new");
    }

    #[test]
    fn concurrent_readers_never_see_partial_entries() {
        let folder = tempfile::tempdir().unwrap();
        let cubin = vec![7_u8; 1 << 20];
        let writer = |_| {
            let cache = cache(folder.path(), Some((13, 0)));
            let key = cache.key("a", &[]);
            for _ in 0..20 {
                cache.put(&key, &cubin, "log");
                assert_eq!(cache.get(&key).unwrap().cubin.len(), cubin.len());
            }
        };
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..4).map(|i| scope.spawn(move || writer(i))).collect();
            all.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
