//! Names and part numbers of split files: `<prefix>-00001-of-00004.gguf` and its siblings.

use std::path::{Path, PathBuf};

use crate::{GgufError, Meta};

/// A file's part number and count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SplitInfo {
    /// Index of the part, from 0.
    pub(crate) no: u64,
    /// Number of parts; 1 for a file that is not split.
    pub(crate) count: u64,
    /// Number of tensors in all parts, if given.
    pub(crate) tensors: Option<u64>,
}

impl SplitInfo {
    /// Reads the split keys of `file`.
    ///
    /// # Errors
    /// [`GgufError::Split`] if one of them is not an integer.
    pub(crate) fn read(file: &str, meta: &Meta) -> Result<SplitInfo, GgufError> {
        let number = |key: &str| {
            meta.integer(key).map_err(|e| GgufError::Split {
                file: file.to_owned(),
                detail: e.to_string(),
            })
        };
        Ok(SplitInfo {
            no: number("split.no")?.unwrap_or(0),
            count: number("split.count")?.unwrap_or(1).max(1),
            tensors: number("split.tensors.count")?,
        })
    }
}

/// The paths of all parts, from the path of the first.
///
/// # Errors
/// [`GgufError::Split`] if the name does not match the pattern, or has another number of parts.
pub(crate) fn part_paths(first: &Path, count: u64) -> Result<Vec<PathBuf>, GgufError> {
    let refuse = |detail: String| GgufError::Split {
        file: first.display().to_string(),
        detail,
    };
    let name = first
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("");
    let Some((prefix, no, of)) = pattern(name) else {
        return Err(refuse(format!(
            "one of {count} parts, but its name is not <prefix>-00001-of-{count:05}.gguf, \
             so the other parts cannot be found"
        )));
    };
    if no != 1 || of != count {
        return Err(refuse(format!(
            "the name says part {no} of {of}, the file says part 1 of {count}"
        )));
    }
    Ok((1..=count)
        .map(|i| first.with_file_name(format!("{prefix}-{i:05}-of-{count:05}.gguf")))
        .collect())
}

/// `(prefix, number from 1, count)` of a name that matches the pattern.
fn pattern(name: &str) -> Option<(&str, u64, u64)> {
    let (rest, of) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, no) = rest.rsplit_once('-')?;
    let five = |digits: &str| {
        let valid = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        valid.then(|| digits.parse().ok()).flatten()
    };
    Some((prefix, five(no)?, five(of)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_names_follow_from_the_first() {
        let paths = part_paths(Path::new("dir/m-of-x-00001-of-00003.gguf"), 3).unwrap();
        let expected =
            [1, 2, 3].map(|i| PathBuf::from(format!("dir/m-of-x-0000{i}-of-00003.gguf")));
        assert_eq!(paths, expected);
    }

    #[test]
    fn names_outside_the_pattern_are_refused() {
        for name in [
            "m.gguf",
            "m-1-of-2.gguf",
            "m-00002-of-00003.gguf",
            "m-00001-of-00004.gguf",
        ] {
            let error = part_paths(Path::new(name), 3).unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }
}
