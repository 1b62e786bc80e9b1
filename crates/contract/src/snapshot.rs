//! Device-neutral byte format of an exported snapshot.
//!
//! ```text
//! magic "HRTHSNAP" | layout u32 | model hash 16 B | k format, v format (name, NUL-padded to 8 B
//! each; a star after the name if rows are rotated although the format does not require it)
//! draft hash 16 B, draft format 8 B (both NUL without a draft)
//! multi-token-prediction head u32: 1 if its state is included, else 0
//! position u64 | section count u32
//! per section: kind u32 | layer u32 | length u64 | checksum u64 | bytes
//! ```
//! Little-endian. The checksum is FNV-1a over the section's bytes, eight at a time; it detects
//! damage, not attacks. Kept by hand: it is five lines, and its values are part of the format.
//! Keys and values: stored rows in position order `[position, n_kv_heads, row]`. Delta states:
//! `[n_v_heads, k_dim, v_dim]` f32. Convolution windows: `[conv_taps - 1, channels]` f32.
//! With a multi-token-prediction head, the layer behind the trunk's last has keys, values and the
//! hidden row: `[hidden]` f32, the last committed position's row after the final norm.
//! Draft keys and values: stored rows `[n, n_kv_heads, row]` of the last `n` positions in position
//! order, where `n` is the smaller of the position and the layer's window.

use std::io::{self, Read, Write};

use crate::{DeviceError, KvFormat, KvFormats, ModelHash};

/// Version of the format. Change it with the meaning of any byte.
pub const LAYOUT_VERSION: u32 = 4;
pub(crate) const MAGIC: &[u8; 8] = b"HRTHSNAP";
/// Bytes of a header.
pub const HEADER_BYTES: usize = 8 + 4 + 16 + 2 * 8 + 16 + 8 + 4 + 8 + 4;
/// Bytes of a section's header.
pub const SECTION_BYTES: usize = 4 + 4 + 8 + 8;
/// Far above any real model; a larger count means damage.
pub(crate) const MAX_SECTIONS: u32 = 1 << 16;

/// Content of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SectionKind {
    /// Cached keys of one layer.
    Keys = 1,
    /// Cached values of one layer.
    Values = 2,
    /// Delta state of one layer.
    DeltaState = 3,
    /// Convolution window of one layer.
    ConvWindow = 4,
    /// Draft keys of one draft layer.
    DraftKeys = 5,
    /// Draft values of one draft layer.
    DraftValues = 6,
    /// Hidden row of the last committed position, for the multi-token-prediction head.
    MtpHidden = 7,
}

impl SectionKind {
    pub(crate) fn from_u32(kind: u32) -> Option<SectionKind> {
        use SectionKind::*;
        [
            Keys,
            Values,
            DeltaState,
            ConvWindow,
            DraftKeys,
            DraftValues,
            MtpHidden,
        ]
        .into_iter()
        .find(|k| *k as u32 == kind)
    }
}

/// Identity of the models and formats that a snapshot belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotIdentity {
    /// Identity of the target model.
    pub model: ModelHash,
    /// KV cache types.
    pub kv: KvFormats,
    /// Whether quantized keys and values are stored Hadamard-rotated ([`crate::quant::hadamard`]).
    pub rotated: bool,
    /// Identity and KV cache type of the draft model, if any.
    pub draft: Option<(ModelHash, KvFormat)>,
    /// Whether the state of the multi-token-prediction head is included.
    pub mtp: bool,
}

/// Header of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotHeader {
    /// Models and formats of the snapshot.
    pub identity: SnapshotIdentity,
    /// Committed tokens.
    pub position: u64,
    /// Number of sections that follow.
    pub sections: u32,
}

/// State of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Content of the section.
    pub kind: SectionKind,
    /// The layer, counted over all layers.
    pub layer: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// Writes the header.
pub fn write_header(sink: &mut dyn Write, header: &SnapshotHeader) -> io::Result<()> {
    sink.write_all(MAGIC)?;
    sink.write_all(&LAYOUT_VERSION.to_le_bytes())?;
    let identity = header.identity;
    sink.write_all(&identity.model.0)?;
    sink.write_all(&storage(identity.kv.k, identity.rotated))?;
    sink.write_all(&storage(identity.kv.v, identity.rotated))?;
    let (draft, format) = identity.draft_bytes();
    sink.write_all(&draft)?;
    sink.write_all(&format)?;
    sink.write_all(&u32::from(identity.mtp).to_le_bytes())?;
    sink.write_all(&header.position.to_le_bytes())?;
    sink.write_all(&header.sections.to_le_bytes())
}

/// Writes one section with its checksum.
pub fn write_section(
    sink: &mut dyn Write,
    kind: SectionKind,
    layer: u32,
    bytes: &[u8],
) -> io::Result<()> {
    sink.write_all(&(kind as u32).to_le_bytes())?;
    sink.write_all(&layer.to_le_bytes())?;
    sink.write_all(&(bytes.len() as u64).to_le_bytes())?;
    sink.write_all(&checksum(bytes).to_le_bytes())?;
    sink.write_all(bytes)
}

impl SnapshotIdentity {
    fn draft_bytes(&self) -> ([u8; 16], [u8; 8]) {
        match self.draft {
            Some((hash, format)) => (hash.0, padded(format.name())),
            None => ([0; 16], [0; 8]),
        }
    }
}

/// Reads a header. Refuses a snapshot that does not match `identity`.
pub fn read_header(
    source: &mut dyn Read,
    identity: SnapshotIdentity,
) -> Result<SnapshotHeader, DeviceError> {
    let SnapshotIdentity { model, kv, .. } = identity;
    let refuse = |detail: &str| DeviceError::InvalidSnapshot {
        detail: detail.to_owned(),
    };
    let magic: [u8; 8] = take(source)?;
    if &magic != MAGIC {
        return Err(refuse("the magic number is missing"));
    }
    let layout = u32::from_le_bytes(take(source)?);
    if layout != LAYOUT_VERSION {
        return Err(DeviceError::InvalidSnapshot {
            detail: format!("layout {layout}, expected {LAYOUT_VERSION}"),
        });
    }
    if ModelHash(take(source)?) != model {
        return Err(refuse("it was made with another model"));
    }
    let (k, v): ([u8; 8], [u8; 8]) = (take(source)?, take(source)?);
    if k != storage(kv.k, identity.rotated) || v != storage(kv.v, identity.rotated) {
        return Err(DeviceError::InvalidSnapshot {
            detail: format!(
                "its keys and values are {} and {}, not {} and {}",
                printable(&k),
                printable(&v),
                printable(&storage(kv.k, identity.rotated)),
                printable(&storage(kv.v, identity.rotated))
            ),
        });
    }
    let draft: ([u8; 16], [u8; 8]) = (take(source)?, take(source)?);
    if draft != identity.draft_bytes() {
        return Err(refuse(
            "it was made with another draft, without one, or with other draft storage",
        ));
    }
    if u32::from_le_bytes(take(source)?) != u32::from(identity.mtp) {
        return Err(refuse(if identity.mtp {
            "it was made without the multi-token-prediction head"
        } else {
            "it was made with the multi-token-prediction head"
        }));
    }
    let position = u64::from_le_bytes(take(source)?);
    let sections = u32::from_le_bytes(take(source)?);
    if sections > MAX_SECTIONS {
        return Err(refuse("its section count is damaged"));
    }
    Ok(SnapshotHeader {
        identity,
        position,
        sections,
    })
}

/// Reads one section; `expected_bytes` returns the required length for a kind and layer.
pub fn read_section(
    source: &mut dyn Read,
    expected_bytes: impl Fn(SectionKind, u32) -> Option<usize>,
) -> Result<Section, DeviceError> {
    let head = read_section_header(source, expected_bytes)?;
    let mut bytes = vec![0; head.length];
    read_exact(source, &mut bytes)?;
    if checksum(&bytes) != head.sum {
        return Err(head.corrupt_error());
    }
    Ok(Section {
        kind: head.kind,
        layer: head.layer,
        bytes,
    })
}

/// Header of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectionHeader {
    /// Content of the section.
    pub kind: SectionKind,
    /// The layer, counted over all layers.
    pub layer: u32,
    /// Number of bytes that follow.
    pub length: usize,
    /// Expected [`Checksum`] of the bytes.
    pub sum: u64,
}

impl SectionHeader {
    /// The error for bytes with another checksum.
    pub fn corrupt_error(&self) -> DeviceError {
        let SectionHeader { kind, layer, .. } = self;
        DeviceError::InvalidSnapshot {
            detail: format!("{kind:?} of layer {layer} is damaged"),
        }
    }
}

/// Reads a section's header. Refuses kinds and layers for which `expected_bytes` returns `None`.
pub fn read_section_header(
    source: &mut dyn Read,
    expected_bytes: impl Fn(SectionKind, u32) -> Option<usize>,
) -> Result<SectionHeader, DeviceError> {
    let kind_id = u32::from_le_bytes(take(source)?);
    let layer = u32::from_le_bytes(take(source)?);
    let length = u64::from_le_bytes(take(source)?);
    let sum = u64::from_le_bytes(take(source)?);
    let refuse = |what: String| DeviceError::InvalidSnapshot { detail: what };
    let kind = SectionKind::from_u32(kind_id)
        .ok_or_else(|| refuse(format!("unknown section kind {kind_id}")))?;
    let expected = expected_bytes(kind, layer)
        .ok_or_else(|| refuse(format!("layer {layer} has no {kind:?} section")))?;
    if length != expected as u64 {
        return Err(refuse(format!(
            "{kind:?} of layer {layer} has {length} bytes, not {expected}"
        )));
    }
    Ok(SectionHeader {
        kind,
        layer,
        length: expected,
        sum,
    })
}

/// Random-access bytes that several threads may read at once.
pub trait ReadAt: Sync {
    /// Number of bytes.
    fn length(&self) -> u64;

    /// Fills `into` with the bytes from offset `at`.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] beyond the end; others from the medium.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;
}

impl ReadAt for Vec<u8> {
    fn length(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let begin = usize::try_from(at).unwrap_or(usize::MAX);
        let end = begin.saturating_add(into.len());
        let bytes = self.get(begin..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        into.copy_from_slice(bytes);
        Ok(())
    }
}

/// Sequential reader over random-access bytes.
pub struct SequentialReader<'a> {
    source: &'a dyn ReadAt,
    at: u64,
}

impl<'a> SequentialReader<'a> {
    /// Starts at offset 0.
    pub fn new(source: &'a dyn ReadAt) -> SequentialReader<'a> {
        SequentialReader { source, at: 0 }
    }

    /// Offset of the next byte.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Skips `bytes` bytes.
    pub fn skip(&mut self, bytes: usize) {
        self.at = self.at.saturating_add(bytes as u64);
    }
}

impl Read for SequentialReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.source.length().saturating_sub(self.at);
        let n = usize::try_from(left).unwrap_or(usize::MAX).min(into.len());
        self.source.read_at(&mut into[..n], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

fn take<const N: usize>(source: &mut dyn Read) -> Result<[u8; N], DeviceError> {
    let mut bytes = [0; N];
    read_exact(source, &mut bytes)?;
    Ok(bytes)
}

/// A short read means a truncated file: a cache miss, not an I/O fault.
fn read_exact(source: &mut dyn Read, bytes: &mut [u8]) -> Result<(), DeviceError> {
    source
        .read_exact(bytes)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => DeviceError::InvalidSnapshot {
                detail: "it ends too early".to_owned(),
            },
            _ => DeviceError::from(error),
        })
}

/// The name of a format, with a star if rows are rotated where rotation is optional.
fn storage(format: KvFormat, rotated: bool) -> [u8; 8] {
    let always = matches!(
        format,
        KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 | KvFormat::Tq3_0
    );
    if rotated && !always {
        padded(&format!("{}*", format.name()))
    } else {
        padded(format.name())
    }
}

fn padded(name: &str) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

fn printable(name: &[u8; 8]) -> String {
    String::from_utf8_lossy(name)
        .trim_end_matches('\0')
        .to_owned()
}

fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::empty();
    sum.add(bytes);
    sum.finish()
}

/// FNV-1a over little-endian 64-bit words in eight lanes, the tail zero-padded, then over the lanes
/// and the length. A single lane would be bound by multiplication latency and slower than memory.
#[derive(Debug, Clone)]
pub struct Checksum {
    lanes: [u64; LANES],
    length: u64,
    /// Zero-padded rest of the last chunk.
    tail: [u8; Checksum::BLOCK],
}

const PRIME: u64 = 0x0000_0100_0000_01b3;
const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const LANES: usize = 8;

impl Checksum {
    /// Every added chunk but the last must have a multiple of this many bytes.
    pub const BLOCK: usize = 8 * LANES;

    /// Checksum of no bytes.
    pub fn empty() -> Checksum {
        Checksum {
            lanes: [BASIS; LANES],
            length: 0,
            tail: [0; Checksum::BLOCK],
        }
    }

    /// Adds the next chunk.
    ///
    /// # Panics
    /// If the previous chunk's length was not a multiple of [`Checksum::BLOCK`].
    pub fn add(&mut self, bytes: &[u8]) {
        let whole = self.length.is_multiple_of(Checksum::BLOCK as u64);
        assert!(whole, "a chunk follows the last one");
        let (blocks, rest) = bytes.as_chunks::<{ Checksum::BLOCK }>();
        blocks.iter().for_each(|block| add(&mut self.lanes, block));
        self.tail[..rest.len()].copy_from_slice(rest);
        self.length += bytes.len() as u64;
    }

    /// Checksum of all chunks.
    pub fn finish(mut self) -> u64 {
        add(&mut self.lanes, &self.tail);
        let over = self.lanes.into_iter().chain([self.length]);
        over.fold(BASIS, |hash, word| (hash ^ word).wrapping_mul(PRIME))
    }
}

fn add(lanes: &mut [u64; LANES], block: &[u8; Checksum::BLOCK]) {
    let (words, _) = block.as_chunks::<8>();
    for (lane, word) in lanes.iter_mut().zip(words) {
        *lane = (*lane ^ u64::from_le_bytes(*word)).wrapping_mul(PRIME);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvFormat;

    const IDENTITY: SnapshotIdentity = SnapshotIdentity {
        model: ModelHash([7; 16]),
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::Q8_0,
        },
        rotated: true,
        draft: Some((ModelHash([9; 16]), KvFormat::F16)),
        mtp: true,
    };

    fn sample() -> Vec<u8> {
        let mut bytes = Vec::new();
        let header = SnapshotHeader {
            identity: IDENTITY,
            position: 3,
            sections: 1,
        };
        write_header(&mut bytes, &header).unwrap();
        write_section(&mut bytes, SectionKind::Keys, 1, b"eleven byte").unwrap();
        bytes
    }

    fn read(bytes: &[u8]) -> Result<(SnapshotHeader, Section), DeviceError> {
        let mut source = bytes;
        let header = read_header(&mut source, IDENTITY)?;
        let expected = |kind, layer| (kind == SectionKind::Keys && layer == 1).then_some(11);
        Ok((header, read_section(&mut source, expected)?))
    }

    #[test]
    fn written_snapshots_read_back() {
        let (header, section) = read(&sample()).unwrap();
        let content = section.bytes.len();
        assert_eq!(sample().len(), HEADER_BYTES + SECTION_BYTES + content);
        assert_eq!(
            header,
            SnapshotHeader {
                identity: IDENTITY,
                position: 3,
                sections: 1
            }
        );
        assert_eq!(section.bytes, b"eleven byte");
    }

    #[test]
    fn checksum_of_chunks_equals_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..1000_u32).map(|i| (i * 7 % 251) as u8).collect();
        for length in [0, 1, 63, 64, 65, 128, 640, 1000] {
            let mut sum = Checksum::empty();
            bytes[..length].chunks(128).for_each(|piece| sum.add(piece));
            assert_eq!(sum.finish(), checksum(&bytes[..length]), "{length} bytes");
        }
        // Values since layout version 3.
        assert_eq!(checksum(b""), 0x2762_5cb0_67ba_a0a7);
        assert_eq!(checksum(&bytes), 0x9385_7821_3bc9_0794);
    }

    #[test]
    fn random_access_and_sequential_reads_agree() {
        let bytes = sample();
        let mut source = SequentialReader::new(&bytes);
        let mut all = Vec::new();
        source.read_to_end(&mut all).unwrap();
        assert_eq!((all, source.at()), (bytes.clone(), bytes.len() as u64));
        let mut source = SequentialReader::new(&bytes);
        read_header(&mut source, IDENTITY).unwrap();
        let head = read_section_header(&mut source, |_, _| Some(11)).unwrap();
        assert_eq!(
            (head.kind, head.layer, head.length),
            (SectionKind::Keys, 1, 11)
        );
        assert_eq!(head.sum, checksum(b"eleven byte"));
        let mut content = [0; 11];
        bytes.read_at(&mut content, source.at()).unwrap();
        assert_eq!(&content, b"eleven byte");
        let error = bytes.read_at(&mut content, source.at() + 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        source.skip(11);
        assert_eq!(source.read(&mut content).unwrap(), 0);
    }

    #[test]
    fn truncated_or_bit_flipped_snapshots_are_refused() {
        let good = sample();
        for cut in 0..good.len() {
            assert!(matches!(
                read(&good[..cut]),
                Err(DeviceError::InvalidSnapshot { .. })
            ));
        }
        // Position and section count have no checksum; the device checks them by use.
        let unguarded = 72..84;
        for bit in 0..good.len() * 8 {
            if unguarded.contains(&(bit / 8)) {
                continue;
            }
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(read(&bad), Err(DeviceError::InvalidSnapshot { .. })),
                "bit {bit}"
            );
        }
    }
}
