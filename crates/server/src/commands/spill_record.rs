//! The record of register spills of compiled kernels, which may only shrink.

use std::collections::BTreeMap;
use std::fmt;

use cuda::compile::Compiled;
use cuda::driver::Arch;

/// The record; its header describes its use.
const RECORD: &str = include_str!("../../../../kernels/spills.txt");

/// A compiled kernel whose spills differ from the record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SpillChange {
    /// Architecture, entry and unit, as in the record.
    form: String,
    recorded: u32,
    found: u32,
}

impl fmt::Display for SpillChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpillChange {
            form,
            recorded,
            found,
        } = self;
        if found > recorded {
            write!(
                f,
                "{form}: spills {found} bytes, kernels/spills.txt allows {recorded}"
            )
        } else if *found == 0 {
            write!(
                f,
                "{form}: no longer spills; remove its line from kernels/spills.txt"
            )
        } else {
            write!(
                f,
                "{form}: spills {found} bytes; lower the {recorded} of its line in kernels/spills.txt"
            )
        }
    }
}

/// Spilled bytes by architecture, entry and unit.
fn parse(record: &str) -> BTreeMap<String, u32> {
    let lines = record.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let mut parts = line.splitn(4, ' ');
            let (arch, entry) = (parts.next()?, parts.next()?);
            let bytes = parts.next()?.parse().ok()?;
            Some((format!("{arch} {entry} {}", parts.next()?), bytes))
        })
        .collect()
}

/// Kernels of `compiled` whose spills differ from the record.
pub(super) fn changes(arch: Arch, compiled: &[Compiled]) -> Vec<SpillChange> {
    let forms = compiled.iter().flat_map(|unit| {
        let form = move |entry: &str| format!("{arch} {entry} {}", unit.unit);
        let entries = unit.entries.iter();
        entries.map(move |entry| (form(&entry.entry), entry.spill_bytes))
    });
    differences(&parse(RECORD), forms)
}

fn differences(
    record: &BTreeMap<String, u32>,
    forms: impl Iterator<Item = (String, u32)>,
) -> Vec<SpillChange> {
    forms
        .filter_map(|(form, found)| {
            let recorded = record.get(&form).copied().unwrap_or(0);
            (recorded != found).then_some(SpillChange {
                form,
                recorded,
                found,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lines_of_the_record_parse() {
        let lines = RECORD.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(parse(RECORD).len(), lines.count());
        assert!(parse(RECORD).values().all(|bytes| *bytes > 0));
    }

    #[test]
    fn spills_that_grow_or_shrink_are_reported() {
        let record = parse("# a comment\nsm_86 f 8 a.cu -DN=1\nsm_86 g 4 a.cu -DN=1\n");
        let found = |bytes: [u32; 3]| {
            let names = [
                "sm_86 f a.cu -DN=1",
                "sm_86 g a.cu -DN=1",
                "sm_90a f a.cu -DN=1",
            ];
            let forms = names.iter().map(|name| (*name).to_owned()).zip(bytes);
            let changes = differences(&record, forms);
            changes
                .iter()
                .map(SpillChange::to_string)
                .collect::<Vec<_>>()
                .join("\n")
        };
        assert_eq!(found([8, 4, 0]), "");
        assert!(found([12, 4, 0]).contains("spills 12 bytes, kernels/spills.txt allows 8"));
        assert!(found([8, 0, 0]).contains("remove its line"));
        assert!(found([6, 4, 0]).contains("lower the 8"));
        assert!(found([8, 4, 2]).starts_with("sm_90a f a.cu"));
    }
}
