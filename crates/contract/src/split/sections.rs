//! Snapshots of stages as one: the header once, then the sections of all stages.
//!
//! A section names its layer in the whole model, so the bytes do not depend on the placement.

use std::io::{self, Write};
use std::ops::Range;

use crate::snapshot::{
    HEADER_BYTES, LAYOUT_VERSION, MAGIC, MAX_SECTIONS, ReadAt, SECTION_BYTES, SectionKind,
};
use crate::{DetachedSnapshot, DeviceError};

/// Where the number of sections stands in a header: at its end.
const COUNT_AT: usize = HEADER_BYTES - 4;

/// Exports of all stages, bottom to top, as one.
pub(super) struct JoinedSnapshot {
    parts: Vec<Box<dyn DetachedSnapshot>>,
    /// Sections of all parts together.
    sections: u32,
}

impl JoinedSnapshot {
    /// Joins the parts of a snapshot that has so many sections.
    pub(super) fn new(parts: Vec<Box<dyn DetachedSnapshot>>, sections: u32) -> JoinedSnapshot {
        JoinedSnapshot { parts, sections }
    }
}

impl DetachedSnapshot for JoinedSnapshot {
    fn bytes(&self) -> u64 {
        let header = HEADER_BYTES as u64;
        let parts = self.parts.iter().map(|part| part.bytes());
        header + parts.map(|bytes| bytes.saturating_sub(header)).sum::<u64>()
    }

    fn write(&mut self, sink: &mut dyn Write) -> Result<(), DeviceError> {
        let count = self.sections.to_le_bytes();
        for (i, part) in self.parts.iter_mut().enumerate() {
            part.write(&mut BehindHeader {
                sink: &mut *sink,
                header: Vec::with_capacity(HEADER_BYTES),
                count: (i == 0).then_some(count),
            })?;
        }
        Ok(())
    }
}

/// Passes on the sections of an export; its header only with a count.
struct BehindHeader<'a> {
    sink: &'a mut dyn Write,
    /// What has come of the header.
    header: Vec<u8>,
    /// The number of sections to write into the header.
    count: Option<[u8; 4]>,
}

impl Write for BehindHeader<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let lacking = HEADER_BYTES - self.header.len();
        if lacking == 0 {
            return self.sink.write(bytes);
        }
        let taken = lacking.min(bytes.len());
        self.header.extend_from_slice(&bytes[..taken]);
        if let (Some(count), HEADER_BYTES) = (self.count, self.header.len()) {
            self.header[COUNT_AT..].copy_from_slice(&count);
            self.sink.write_all(&self.header)?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// The sections of one stage in a snapshot of the whole model, as a snapshot of their own.
pub(super) struct StageSections<'a> {
    source: &'a dyn ReadAt,
    header: Vec<u8>,
    /// Where its sections are in the source, in order.
    ranges: Vec<Range<u64>>,
    sections: u32,
}

impl<'a> StageSections<'a> {
    /// The sections of each stage; `layers` are those of each. Sections of a multi-token-prediction
    /// head and of a draft belong to the last stage.
    ///
    /// # Errors
    /// [`DeviceError::InvalidSnapshot`] for sections of unknown kinds or lengths. The stages check
    /// the rest.
    pub(super) fn of(
        source: &'a dyn ReadAt,
        layers: &[Range<usize>],
    ) -> Result<Vec<StageSections<'a>>, DeviceError> {
        let mut header = vec![0; HEADER_BYTES];
        read(source, &mut header, 0)?;
        let part = |_| StageSections {
            source,
            header: header.clone(),
            ranges: Vec::new(),
            sections: 0,
        };
        let mut parts: Vec<StageSections<'a>> = layers.iter().map(part).collect();
        let layout = &header[MAGIC.len()..][..4];
        if !header.starts_with(MAGIC) || layout != LAYOUT_VERSION.to_le_bytes().as_slice() {
            // The first stage refuses the header, with the reason.
            return Ok(parts);
        }
        let count = u32_at(&header, COUNT_AT);
        if count > MAX_SECTIONS {
            return Err(refuse("its section count is damaged".to_owned()));
        }
        let mut at = HEADER_BYTES as u64;
        for _ in 0..count {
            let mut head = [0; SECTION_BYTES];
            read(source, &mut head, at)?;
            let (id, layer) = (u32_at(&head, 0), u32_at(&head, 4));
            let length = u64::from(u32_at(&head, 8)) | u64::from(u32_at(&head, 12)) << 32;
            let end = at
                .saturating_add(SECTION_BYTES as u64)
                .saturating_add(length);
            if end > source.length() {
                return Err(refuse("it ends too early".to_owned()));
            }
            let kind = SectionKind::from_u32(id);
            let kind = kind.ok_or_else(|| refuse(format!("unknown section kind {id}")))?;
            let stage = match kind {
                SectionKind::DraftKeys | SectionKind::DraftValues | SectionKind::MtpHidden => None,
                SectionKind::Keys
                | SectionKind::Values
                | SectionKind::DeltaState
                | SectionKind::ConvWindow => {
                    layers.iter().position(|of| of.contains(&(layer as usize)))
                }
            };
            let last = parts.len().saturating_sub(1);
            if let Some(part) = parts.get_mut(stage.unwrap_or(last)) {
                part.push(at..end);
            }
            at = end;
        }
        for part in &mut parts {
            let count = part.sections.to_le_bytes();
            part.header[COUNT_AT..].copy_from_slice(&count);
        }
        Ok(parts)
    }

    fn push(&mut self, section: Range<u64>) {
        self.sections += 1;
        match self.ranges.last_mut() {
            Some(before) if before.end == section.start => before.end = section.end,
            _ => self.ranges.push(section),
        }
    }
}

impl ReadAt for StageSections<'_> {
    fn length(&self) -> u64 {
        let sections = self.ranges.iter().map(|range| range.end - range.start);
        HEADER_BYTES as u64 + sections.sum::<u64>()
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let (mut into, mut at) = (into, at);
        if let Some(header) = self.header.get(usize::try_from(at).unwrap_or(usize::MAX)..) {
            let n = header.len().min(into.len());
            into[..n].copy_from_slice(&header[..n]);
            (into, at) = (&mut into[n..], at + n as u64);
        }
        let mut begin = HEADER_BYTES as u64;
        for range in &self.ranges {
            let end = begin + (range.end - range.start);
            if !into.is_empty() && at < end {
                let n = usize::try_from(end - at)
                    .unwrap_or(usize::MAX)
                    .min(into.len());
                self.source
                    .read_at(&mut into[..n], range.start + (at - begin))?;
                (into, at) = (&mut into[n..], at + n as u64);
            }
            begin = end;
        }
        match into {
            [] => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn refuse(detail: String) -> DeviceError {
    DeviceError::InvalidSnapshot { detail }
}

/// Bytes from a snapshot, whose end may be missing.
fn read(source: &dyn ReadAt, into: &mut [u8], at: u64) -> Result<(), DeviceError> {
    source
        .read_at(into, at)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => refuse("it ends too early".to_owned()),
            _ => DeviceError::from(error),
        })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{
        SnapshotHeader, SnapshotIdentity, read_header, read_section, write_header, write_section,
    };
    use crate::{KvFormat, KvFormats, ModelHash};

    const IDENTITY: SnapshotIdentity = SnapshotIdentity {
        model: ModelHash([7; 16]),
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        rotated: false,
        draft: None,
        mtp: true,
    };

    /// A snapshot with these sections, each of three bytes.
    fn snapshot(sections: &[(SectionKind, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let header = SnapshotHeader {
            identity: IDENTITY,
            position: 3,
            sections: sections.len() as u32,
        };
        write_header(&mut bytes, &header).unwrap();
        for (kind, layer) in sections {
            let content = [*kind as u8, *layer as u8, 9];
            write_section(&mut bytes, *kind, *layer, &content).unwrap();
        }
        bytes
    }

    const LOWER: [(SectionKind, u32); 2] = [(SectionKind::Keys, 0), (SectionKind::Values, 0)];
    const UPPER: [(SectionKind, u32); 3] = [
        (SectionKind::DeltaState, 1),
        (SectionKind::MtpHidden, 2),
        (SectionKind::DraftKeys, 0),
    ];

    #[test]
    fn joined_parts_have_the_bytes_of_one_snapshot() {
        let parts = [&LOWER[..], &UPPER]
            .map(|part| -> Box<dyn DetachedSnapshot> { Box::new(snapshot(part)) });
        let mut joined = JoinedSnapshot::new(parts.into(), 5);
        let mut bytes = Vec::new();
        joined.write(&mut bytes).unwrap();
        assert_eq!(bytes, snapshot(&[&LOWER[..], &UPPER].concat()));
        assert_eq!(joined.bytes(), bytes.len() as u64);
    }

    #[test]
    fn stages_read_their_own_sections_wherever_these_stand() {
        let mixed = [UPPER[0], LOWER[1], UPPER[2], UPPER[1], LOWER[0]];
        let bytes = snapshot(&mixed);
        let parts = StageSections::of(&bytes, &[0..1, 1..2]).unwrap();
        let own = [vec![LOWER[1], LOWER[0]], vec![UPPER[0], UPPER[2], UPPER[1]]];
        for (part, own) in parts.iter().zip(own) {
            let mut whole = vec![0; part.length() as usize];
            part.read_at(&mut whole, 0).unwrap();
            assert_eq!(whole, snapshot(&own));
            let mut source = &whole[..];
            let header = read_header(&mut source, IDENTITY).unwrap();
            assert_eq!(header.sections as usize, own.len());
            for (kind, layer) in own {
                let found = read_section(&mut source, |_, _| Some(3)).unwrap();
                assert_eq!((found.kind, found.layer), (kind, layer));
            }
            // Any piece of it, across sections.
            for at in 0..whole.len() {
                let mut piece = vec![0; (whole.len() - at).min(40)];
                part.read_at(&mut piece, at as u64).unwrap();
                assert_eq!(piece, whole[at..][..piece.len()]);
            }
            let beyond = part.read_at(&mut [0; 2], whole.len() as u64 - 1);
            assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn truncated_snapshots_are_refused() {
        let bytes = snapshot(&LOWER);
        for cut in 0..bytes.len() {
            let cut = bytes[..cut].to_vec();
            let found = StageSections::of(&cut, &[0..1, 1..2]);
            assert!(matches!(
                found.err(),
                Some(DeviceError::InvalidSnapshot { .. })
            ));
        }
    }
}
