//! Import of a snapshot from device-neutral bytes.
//!
//! Sections are independent, so several threads import them. Each thread reads a section in pieces,
//! updates its checksum, converts rows to planes in its own page-locked memory, and copies them on
//! its own stream while it reads the next piece. One thread would need a second for the context of
//! an agent.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use contract::DeviceError;
use contract::snapshot::{
    Checksum, ReadAt, SectionHeader, SectionKind, SequentialReader, SnapshotIdentity, read_header,
    read_section_header,
};

use super::neutral::{neutral_bytes, runs, write_neutral, write_states};
use super::non_paged::{NonPagedLayout, PartKind, StateCopy};
use super::page_layout::{GpuPageCopier, PageLayout, Plane};
use super::saved::Snapshot;
use super::sections::{KvSide, expected_bytes, index_of, ring_positions, rings};
use crate::driver::{CopyEngine, Event, Stream};
use crate::pages::PagePool;
use crate::pinned::{PinnedBlock, PinnedPool};
use crate::state::{DeltaGroup, DraftRing, KvGroup, LayerState, PAGE_SIZE, State};

/// Pages per piece. Each thread stages two pieces, so the first import locks little memory.
const PAGES_PER_PIECE: usize = 4;
/// Thread limit. More threads read no faster.
const MAX_WORKERS: usize = 16;

/// What a snapshot is imported for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImportTarget {
    pub(crate) identity: SnapshotIdentity,
    /// The runner's first layer in the whole model.
    pub(crate) first_layer: usize,
    /// The longest sequence.
    pub(crate) context: usize,
}

impl ImportTarget {
    /// The layer of a section among those of the runner or of its draft; `None` if it is below.
    fn own_layer(&self, kind: SectionKind, layer: u32) -> Option<u32> {
        match kind {
            SectionKind::DraftKeys | SectionKind::DraftValues => Some(layer),
            _ => layer.checked_sub(u32::try_from(self.first_layer).ok()?),
        }
    }
}

impl Snapshot {
    /// Reads the bytes that a [`CudaDetachedSnapshot`](super::CudaDetachedSnapshot) wrote on this
    /// or another device. Its pages go to free device pages first, then to the host.
    pub(crate) fn import(
        copier: &GpuPageCopier<'_>,
        pages: &mut PagePool<PinnedBlock>,
        state: &State,
        to: ImportTarget,
        source: &dyn ReadAt,
    ) -> Result<Snapshot, DeviceError> {
        let mut in_order = SequentialReader::new(source);
        let ImportTarget {
            identity, context, ..
        } = to;
        let header = read_header(&mut in_order, identity)?;
        let position = usize::try_from(header.position).unwrap_or(usize::MAX);
        if position > context {
            return Err(invalid_snapshot(format!(
                "its position is {position}, the context is {context}"
            )));
        }
        let sections = sections(state, (position, to), header.sections, &mut in_order)?;
        let mut targets = Vec::new();
        let mut adopted = Vec::new();
        for _ in 0..position.div_ceil(PAGE_SIZE) {
            targets.push(match pages.adopt_on_device() {
                Some((id, index)) => {
                    adopted.push(id);
                    PageTarget::Device(index)
                }
                None => match copier.host.take(copier.page_layout.bytes) {
                    Ok(block) => PageTarget::Host(Mutex::new(block)),
                    Err(error) => {
                        pages.release_snapshot(adopted);
                        return Err(error);
                    }
                },
            });
        }
        let imported = import_sections(copier, state, position, &targets, &sections, source);
        let non_paged = match imported {
            Ok(non_paged) => non_paged,
            Err(error) => {
                pages.release_snapshot(adopted);
                return Err(error);
            }
        };
        let mut device_pages = adopted.into_iter();
        let of_target = |target| match target {
            PageTarget::Device(_) => device_pages.next().expect("each device page has an id"),
            PageTarget::Host(block) => {
                pages.adopt(block.into_inner().unwrap_or_else(PoisonError::into_inner))
            }
        };
        Ok(Snapshot {
            position,
            pages: targets.into_iter().map(of_target).collect(),
            non_paged: Arc::new(StateCopy::Host(non_paged)),
        })
    }
}

fn invalid_snapshot(detail: String) -> DeviceError {
    DeviceError::InvalidSnapshot { detail }
}

/// The destination of an imported page.
enum PageTarget {
    Device(usize),
    Host(Mutex<PinnedBlock>),
}

/// A section header and the offset of its content.
#[derive(Debug, Clone, Copy)]
struct Section {
    head: SectionHeader,
    at: u64,
}

/// The section headers, checked for missing, duplicate and truncated sections.
fn sections(
    state: &State,
    (position, to): (usize, ImportTarget),
    declared: u32,
    in_order: &mut SequentialReader<'_>,
) -> Result<Vec<Section>, DeviceError> {
    let (n_layers, rings) = (state.n_layers(), rings(state));
    let wanted = 2 * (n_layers + rings.len()) + usize::from(state.hidden.is_some());
    if declared as usize != wanted {
        return Err(invalid_snapshot(format!(
            "{declared} sections, {wanted} expected"
        )));
    }
    let expected = |kind, layer| expected_bytes(state, position, kind, to.own_layer(kind, layer)?);
    // Two halves per layer, then the hidden row.
    let mut seen = vec![false; wanted];
    let mut all = Vec::with_capacity(wanted);
    for _ in 0..wanted {
        let head = read_section_header(in_order, expected)?;
        let head = SectionHeader {
            layer: to.own_layer(head.kind, head.layer).unwrap_or(head.layer),
            ..head
        };
        let layer = head.layer as usize;
        let index = match head.kind {
            SectionKind::Keys | SectionKind::DeltaState => 2 * layer,
            SectionKind::Values | SectionKind::ConvWindow => 2 * layer + 1,
            SectionKind::DraftKeys => 2 * (n_layers + layer),
            SectionKind::DraftValues => 2 * (n_layers + layer) + 1,
            SectionKind::MtpHidden => wanted - 1,
        };
        if std::mem::replace(&mut seen[index], true) {
            return Err(invalid_snapshot(format!(
                "layer {layer} has a section twice"
            )));
        }
        all.push(Section {
            head,
            at: in_order.at(),
        });
        in_order.skip(head.length);
    }
    if let Some(index) = seen.iter().position(|seen| !seen) {
        let layer = index / 2;
        return Err(invalid_snapshot(format!("layer {layer} lacks a section")));
    }
    Ok(all)
}

/// The destination of a section's content.
enum SectionTarget<'a> {
    /// One array of one layer, in the pages of KV group `number`.
    KvArray {
        number: usize,
        group: &'a KvGroup,
        side: KvSide,
        layer: usize,
    },
    /// The states of one layer.
    States(&'a DeltaGroup, &'a mut [u8]),
    /// The convolution window of one layer, or the hidden row: bytes as they are.
    Verbatim(&'a mut [u8]),
    /// One array of a draft layer's ring: values and scales.
    DraftRing(&'a DraftRing, KvSide, [&'a mut [u8]; 2]),
}

/// Imports all sections and returns the non-paged state.
fn import_sections(
    copier: &GpuPageCopier<'_>,
    state: &State,
    position: usize,
    targets: &[PageTarget],
    sections: &[Section],
    source: &dyn ReadAt,
) -> Result<PinnedBlock, DeviceError> {
    let begun = Instant::now();
    // Pre-locking holds the driver for longer than the whole import.
    let _pause = copier.host.pause_prelocking();
    let parts = NonPagedLayout::new(state, position);
    let mut non_paged = copier.host.take(parts.bytes)?;
    // Wait for queued work that uses this memory or these device pages.
    copier.gpu.sync()?;
    let memory_us = begun.elapsed().as_micros() as u64;
    for part in &parts.parts {
        if let PartKind::DraftRing(..) = part.what {
            non_paged.bytes_mut()[part.at..part.at + part.bytes].fill(0);
        }
    }
    let mut targets_by_section = targets_by_section(state, &parts, sections, non_paged.bytes_mut());
    // Workers pop from the end, so the longest section goes last.
    targets_by_section.sort_by_key(|(section, _)| section.head.length);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = cores.min(MAX_WORKERS).min(targets_by_section.len());
    let (targets_by_section, failed) = (Mutex::new(targets_by_section), Mutex::new(None));
    let stop = AtomicBool::new(false);
    let (copy_engine, memory) = (copier.gpu.copy_engine(), (copier.host, copier.page_layout));
    let work = || {
        let mut worker = ImportWorker::new(&copy_engine, memory, position, targets)?;
        while !stop.load(Ordering::Relaxed) {
            let next = targets_by_section
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop();
            let Some((section, goal)) = next else { break };
            worker.import_section(section, goal, source)?;
        }
        worker.stream.sync()
    };
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                if let Err(error) = work() {
                    stop.store(true, Ordering::Relaxed);
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.get_or_insert(error);
                }
            });
        }
    });
    drop(targets_by_section);
    let us = begun.elapsed().as_micros() as u64;
    tracing::debug!(workers, memory_us, us, "sections brought in");
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        None => Ok(non_paged),
        Some(error) => Err(error),
    }
}

/// Pairs each section with its destination. Each non-paged section gets its part of `non_paged`.
fn targets_by_section<'a>(
    state: &'a State,
    parts: &NonPagedLayout,
    sections: &[Section],
    non_paged: &'a mut [u8],
) -> Vec<(Section, SectionTarget<'a>)> {
    let ring_at = |section: &Section, side: KvSide| {
        let planes =
            [0, 1].map(|i| PartKind::DraftRing(section.head.layer as usize, side as usize + i));
        planes.map(|what| parts.range(what))
    };
    let layer_at = |what, index: usize, bytes: usize| {
        let begin = parts.range(what).start + index * bytes;
        [begin..begin + bytes, 0..0]
    };
    // Up to two ranges per section, then split off `non_paged` in address order.
    let ranges: Vec<[Range<usize>; 2]> = sections
        .iter()
        .map(|section| match section.head.kind {
            SectionKind::DraftKeys => ring_at(section, KvSide::Keys),
            SectionKind::DraftValues => ring_at(section, KvSide::Values),
            SectionKind::MtpHidden => [parts.range(PartKind::MtpHidden), 0..0],
            kind => match state.layer(section.head.layer as usize) {
                LayerState::Kv(..) => [0..0, 0..0],
                LayerState::Delta(group, index) => {
                    let number = index_of(&state.delta, group);
                    match kind {
                        SectionKind::DeltaState => {
                            layer_at(PartKind::States(number), index, group.state_bytes)
                        }
                        _ => layer_at(PartKind::Windows(number), index, group.window_bytes),
                    }
                }
            },
        })
        .collect();
    let mut order: Vec<(usize, usize)> =
        (0..sections.len()).flat_map(|i| [(i, 0), (i, 1)]).collect();
    order.sort_by_key(|(i, half)| (ranges[*i][*half].start, ranges[*i][*half].end));
    let mut shares: Vec<[&'a mut [u8]; 2]> =
        ranges.iter().map(|_| [&mut [][..], &mut []]).collect();
    let (mut rest, mut at) = (non_paged, 0);
    for (i, half) in order {
        let range = ranges[i][half].clone();
        if range.is_empty() {
            continue;
        }
        let (_, from) = rest.split_at_mut(range.start - at);
        let (share, behind) = from.split_at_mut(range.len());
        shares[i][half] = share;
        (rest, at) = (behind, range.end);
    }
    let goal = |(section, [first, second]): (&Section, [&'a mut [u8]; 2])| {
        let layer = section.head.layer as usize;
        let goal = match section.head.kind {
            SectionKind::DraftKeys => {
                SectionTarget::DraftRing(&rings(state)[layer], KvSide::Keys, [first, second])
            }
            SectionKind::DraftValues => {
                SectionTarget::DraftRing(&rings(state)[layer], KvSide::Values, [first, second])
            }
            SectionKind::MtpHidden => SectionTarget::Verbatim(first),
            kind => match state.layer(layer) {
                LayerState::Kv(group, index) => SectionTarget::KvArray {
                    number: index_of(&state.kv, group),
                    group,
                    side: match kind {
                        SectionKind::Keys => KvSide::Keys,
                        _ => KvSide::Values,
                    },
                    layer: index,
                },
                LayerState::Delta(group, _) => match kind {
                    SectionKind::DeltaState => SectionTarget::States(group, first),
                    _ => SectionTarget::Verbatim(first),
                },
            },
        };
        (*section, goal)
    };
    sections.iter().zip(shares).map(goal).collect()
}

/// State of one worker thread. The stream is dropped first: it waits for copies that read `stage`.
struct ImportWorker<'a> {
    stream: Stream,
    /// Reached when the copy of this half of the stage has finished.
    copied: [Event; 2],
    copy_engine: &'a CopyEngine,
    page_layout: &'a PageLayout,
    targets: &'a [PageTarget],
    position: usize,
    stage: PinnedBlock,
    bytes: Vec<u8>,
}

impl<'a> ImportWorker<'a> {
    fn new(
        copy_engine: &'a CopyEngine,
        (host, page_layout): (&PinnedPool, &'a PageLayout),
        position: usize,
        targets: &'a [PageTarget],
    ) -> Result<ImportWorker<'a>, DeviceError> {
        let stream = copy_engine.stream()?;
        let stage = host.take(2 * PAGES_PER_PIECE * page_layout.max_layer_bytes())?;
        Ok(ImportWorker {
            stream,
            copied: [copy_engine.event()?, copy_engine.event()?],
            copy_engine,
            page_layout,
            targets,
            position,
            stage,
            bytes: Vec::new(),
        })
    }

    fn import_section(
        &mut self,
        section: Section,
        goal: SectionTarget<'_>,
        source: &dyn ReadAt,
    ) -> Result<(), DeviceError> {
        let mut reader = SectionReader {
            section,
            source,
            sum: Checksum::empty(),
            done: 0,
        };
        let whole = section.head.length;
        match goal {
            SectionTarget::KvArray {
                number,
                group,
                side,
                layer,
            } => self.write_rows((number, group), (side, layer), &mut reader)?,
            SectionTarget::States(group, to) => {
                let bytes = reader.next(whole, &mut self.bytes)?;
                write_states(group, bytes, to);
            }
            SectionTarget::Verbatim(to) => {
                to.copy_from_slice(reader.next(whole, &mut self.bytes)?);
            }
            SectionTarget::DraftRing(ring, side, planes) => {
                let bytes = reader.next(whole, &mut self.bytes)?;
                write_ring((ring, side), self.position, bytes, planes);
            }
        }
        reader.finish()
    }

    /// Writes the neutral rows of one array of one layer to its pages, [`PAGES_PER_PIECE`] at a
    /// time.
    fn write_rows(
        &mut self,
        (number, group): (usize, &KvGroup),
        (side, layer): (KvSide, usize),
        reader: &mut SectionReader<'_>,
    ) -> Result<(), DeviceError> {
        let array = side.array(group);
        let planes = [0, 1].map(|i| self.page_layout.groups[number][side as usize + i]);
        let half_bytes = PAGES_PER_PIECE * self.page_layout.max_layer_bytes();
        let all: Vec<_> = runs(0..self.position, usize::MAX).collect();
        for (turn, pages) in all.chunks(PAGES_PER_PIECE).enumerate() {
            let rows = pages.iter().map(|(_, within)| within.len()).sum();
            let neutral = reader.next(neutral_bytes(group, array, rows), &mut self.bytes)?;
            let half = turn % 2;
            self.copied[half].sync()?;
            let stage = &mut self.stage.bytes_mut()[half * half_bytes..][..half_bytes];
            // All values before all scales, so adjacent pages need one copy.
            let (values, scales) = stage.split_at_mut(pages.len() * planes[0].width);
            let mut rest = neutral;
            for (i, (_, within)) in pages.iter().enumerate() {
                let n = neutral_bytes(group, array, within.len());
                let (rows, behind) = rest.split_at(n);
                rest = behind;
                let of_page = (
                    &mut values[i * planes[0].width..][..planes[0].width],
                    &mut scales[i * planes[1].width..][..planes[1].width],
                );
                if within.len() < PAGE_SIZE {
                    of_page.0.fill(0);
                    of_page.1.fill(0);
                }
                write_neutral((group, array), within.clone(), rows, of_page);
            }
            let first = turn * PAGES_PER_PIECE;
            let targets = &self.targets[first..][..pages.len()];
            let mut at = half * half_bytes;
            for plane in planes {
                self.copy_plane(targets, plane, layer, at)?;
                at += pages.len() * plane.width;
            }
            self.stream.record(&self.copied[half])?;
        }
        Ok(())
    }

    /// Copies one plane of staged pages, from offset `at` of the stage, to their destinations.
    fn copy_plane(
        &self,
        targets: &[PageTarget],
        plane: Plane,
        layer: usize,
        at: usize,
    ) -> Result<(), DeviceError> {
        let mut i = 0;
        while i < targets.len() {
            let from = at + i * plane.width;
            match &targets[i] {
                PageTarget::Host(block) => {
                    let mut block = block.lock().unwrap_or_else(PoisonError::into_inner);
                    let bytes = &self.stage.bytes()[from..from + plane.width];
                    block.bytes_mut()[plane.of(layer)].copy_from_slice(bytes);
                    i += 1;
                }
                PageTarget::Device(index) => {
                    let beside = |n: &usize| {
                        let next = targets.get(i + n);
                        matches!(next, Some(PageTarget::Device(other)) if *other == index + n)
                    };
                    let n = 1 + (1..).take_while(beside).count();
                    let to = plane.page(*index) + (layer * plane.pitch) as u64;
                    let from = self.stage.address() + from as u64;
                    // SAFETY: this half of the stage is written again only after the event behind
                    // the copy, and the stream is synchronised before the stage is freed.
                    unsafe {
                        self.copy_engine
                            .copy(&self.stream, to, from, n * plane.width)
                    }?;
                    i += n;
                }
            }
        }
        Ok(())
    }
}

/// A section read in order, with its running checksum.
struct SectionReader<'a> {
    section: Section,
    source: &'a dyn ReadAt,
    sum: Checksum,
    done: usize,
}

impl SectionReader<'_> {
    /// The next `n` bytes, in the reused buffer `bytes`.
    fn next<'b>(&mut self, n: usize, bytes: &'b mut Vec<u8>) -> Result<&'b [u8], DeviceError> {
        if bytes.len() < n {
            bytes.resize(n, 0);
        }
        let bytes = &mut bytes[..n];
        let at = self.section.at + self.done as u64;
        self.source
            .read_at(bytes, at)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    invalid_snapshot("it ends too early".to_owned())
                }
                _ => DeviceError::from(error),
            })?;
        self.sum.add(bytes);
        self.done += n;
        Ok(bytes)
    }

    /// Rejects a corrupt section. The caller then drops the whole snapshot.
    fn finish(self) -> Result<(), DeviceError> {
        let Section { head, .. } = self.section;
        if self.done == head.length && self.sum.finish() == head.sum {
            Ok(())
        } else {
            Err(head.corrupt_error())
        }
    }
}

/// Writes neutral rows to their positions in a ring.
fn write_ring(
    (ring, side): (&DraftRing, KvSide),
    position: usize,
    neutral: &[u8],
    [values, scales]: [&mut [u8]; 2],
) {
    let (group, array) = (&ring.rows, side.array(&ring.rows));
    let mut rest = neutral;
    for (page, within) in runs(ring_positions(ring, position), ring.pages) {
        let n = neutral_bytes(group, array, within.len());
        let (rows, behind) = rest.split_at(n);
        let page_bytes = [array.value_bytes, array.scale_bytes].map(|n| n * group.page_rows());
        let planes = (
            &mut values[page * page_bytes[0]..][..page_bytes[0]],
            &mut scales[page * page_bytes[1]..][..page_bytes[1]],
        );
        write_neutral((group, array), within, rows, planes);
        rest = behind;
    }
}
