//! Rows between the GPUs of pipeline stages. The host waits nowhere: copies and passes of both
//! GPUs are ordered by events.
//!
//! A stage queues the copy of the block below it on its own stream, behind the event of the pass
//! that makes it. The stage below overwrites the block only behind the event of that copy: the
//! first with its next pass, others with the rows that they receive for it.

use std::any::Any;
use std::rc::Rc;
use std::time::{Duration, Instant};

use contract::protocol::invalid_call;
use contract::{DeviceError, StageOutput};

use super::Engine;
use super::exchange::ExchangeEnd;
use crate::driver::{CopyEngine, Event, Gpu, Pinned, Stream};
use crate::plan::{BlockPart, PlanKey, Plans, StageBoundary, StageKernels};

/// Copies that the test at start times.
const TIMED_COPIES: usize = 16;

/// The boundaries of a stage: what it receives from below and leaves for the stage above.
pub(crate) struct Boundary {
    stage: StageBoundary,
    /// What the stages of a model must agree on.
    kernels: StageKernels,
    /// The device's name, for messages.
    device: String,
    /// Device address of the block.
    at: u64,
    /// Bytes of the longest block.
    block_bytes: usize,
    copy_engine: CopyEngine,
    /// Recorded behind each pass.
    done: Event,
    /// Recorded by the stage above when it has taken the block.
    taken: Option<Rc<Event>>,
    /// Recorded behind each upload of a header.
    uploaded: Event,
    /// Recorded behind each commit.
    committed: Event,
    /// Rows of the last pass.
    n_rows: usize,
    /// Bucket of the last pass.
    bucket: usize,
    /// Rows that were received for the next pass.
    received_rows: Option<usize>,
    way: Option<Way>,
    /// Page-locked memory of [`StageOutput::read`], as long as its longest call so far.
    read: Option<Pinned<f32>>,
    /// Of a shard of a tensor split.
    exchange: Option<ExchangeEnd>,
}

/// Whether rows may be read from the memory of another GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerAccess {
    /// If the GPUs reach each other; else they go through host memory.
    IfPossible,
    /// They must.
    Required,
    /// They go through host memory.
    Avoided,
}

/// How rows come from the stage below.
struct Way {
    /// Recorded when a block has arrived.
    arrived: Rc<Event>,
    /// Through here, if the GPUs do not reach each other's memory.
    host: Option<HostWay>,
}

/// Page-locked memory between two GPUs.
struct HostWay {
    /// Of the GPU below.
    stream: Stream,
    /// Recorded on it when a block is in host memory, which the stage below waits for.
    staged: Rc<Event>,
    memory: Pinned<u8>,
}

impl Boundary {
    /// Of a stage whose plans are built; its block is at `at`.
    pub(crate) fn new(gpu: &Gpu, plans: &Plans) -> Result<Boundary, DeviceError> {
        Ok(Boundary {
            stage: plans.stage.clone(),
            kernels: plans.kernels,
            device: format!("cuda:{}", gpu.info().ordinal),
            at: plans.addresses.residual,
            block_bytes: plans.block_bytes,
            copy_engine: gpu.copy_engine(),
            done: Event::new(gpu)?,
            taken: None,
            uploaded: Event::new(gpu)?,
            committed: Event::new(gpu)?,
            n_rows: 0,
            bucket: 0,
            received_rows: None,
            way: None,
            read: None,
            exchange: ExchangeEnd::new(gpu, plans),
        })
    }

    /// Notes the upload of a header on the main stream.
    pub(super) fn note_upload(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        gpu.stream().record(&self.uploaded)
    }

    /// Notes a commit on the main stream.
    pub(super) fn note_commit(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        gpu.stream().record(&self.committed)
    }

    /// Waits until the headers uploaded so far have been read.
    pub(super) fn wait_for_uploads(&self) -> Result<(), DeviceError> {
        self.uploaded.sync()
    }

    /// Prepares a pass of `rows` rows: its input was received, or may be written by the first
    /// stage.
    pub(super) fn begin(&mut self, gpu: &Gpu, rows: usize) -> Result<(), DeviceError> {
        if !self.stage.is_first && self.received_rows.take() != Some(rows) {
            let detail = format!("{rows} rows, but the stage below handed over others");
            return Err(invalid_call("a pass of a stage", detail));
        }
        if self.stage.is_first {
            self.wait_until_taken(gpu)?;
        }
        Ok(())
    }

    /// Has what is queued next come behind the copy of the last block to the stage above.
    fn wait_until_taken(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        match &self.taken {
            Some(taken) => gpu.stream().wait(taken),
            None => Ok(()),
        }
    }

    /// Ends a pass of `rows` rows that was queued as `key`.
    pub(super) fn end(&mut self, gpu: &Gpu, key: PlanKey, rows: usize) -> Result<(), DeviceError> {
        if self.stage.is_last {
            return Ok(());
        }
        let bucket = match key {
            PlanKey::Step { rows, .. } | PlanKey::Chunk(rows) => rows,
            _ => rows,
        };
        (self.n_rows, self.bucket) = (rows, bucket);
        gpu.stream().record(&self.done)
    }
}

impl Way {
    /// Queues the copy of the parts of the block of `below` to the block at `to`.
    fn queue(
        &self,
        gpu: &Gpu,
        copy_engine: &CopyEngine,
        to: u64,
        below: &Boundary,
        parts: &[BlockPart],
    ) -> Result<(), DeviceError> {
        let stream = gpu.stream();
        let Some(host) = &self.host else {
            stream.wait(&below.done)?;
            for part in parts {
                let (to, from) = (to + part.to as u64, below.at + part.from as u64);
                copy_engine.copy_from_device(stream, to, (&below.copy_engine, from), part.bytes)?;
            }
            return stream.record(&self.arrived);
        };
        // The block before has left the host's memory.
        host.stream.wait(&self.arrived)?;
        host.stream.wait(&below.done)?;
        let mut offset = 0;
        for part in parts {
            let staged = host.memory.device_ptr() + offset as u64;
            let from = below.at + part.from as u64;
            // SAFETY: the memory holds the longest block and lives as long as the stream.
            unsafe {
                below
                    .copy_engine
                    .copy(&host.stream, staged, from, part.bytes)
            }?;
            offset += part.bytes;
        }
        host.stream.record(&host.staged)?;
        gpu.make_current()?;
        stream.wait(&host.staged)?;
        let mut offset = 0;
        for part in parts {
            let staged = host.memory.device_ptr() + offset as u64;
            let to = to + part.to as u64;
            // SAFETY: the memory is written again only behind `arrived`, and lives until the engine
            // has been dropped.
            unsafe { copy_engine.copy(stream, to, staged, part.bytes) }?;
            offset += part.bytes;
        }
        stream.record(&self.arrived)
    }

    /// Copies a pattern over the boundary and back to the host. Returns whether it arrived, and the
    /// microseconds of a copy.
    fn test(
        &self,
        gpu: &Gpu,
        stage: &Boundary,
        below: &Boundary,
    ) -> Result<(bool, f64), DeviceError> {
        let bytes = stage.stage.block.part_bytes(1).min(below.block_bytes);
        let mut sent: Pinned<u8> = below.copy_engine.pinned(bytes)?;
        for (i, byte) in sent.as_mut_slice().iter_mut().enumerate() {
            *byte = (i * 7 % 251) as u8;
        }
        let received: Pinned<u8> = stage.copy_engine.pinned(bytes)?;
        let stream = below.copy_engine.stream()?;
        // SAFETY: waited for below.
        unsafe {
            below
                .copy_engine
                .copy(&stream, below.at, sent.device_ptr(), bytes)
        }?;
        stream.sync()?;
        let part = BlockPart {
            from: 0,
            to: 0,
            bytes,
        };
        let mut us = 0.0;
        // The first copy may set up the way.
        for timed in [1, TIMED_COPIES] {
            let begun = Instant::now();
            for _ in 0..timed {
                self.queue(
                    gpu,
                    &stage.copy_engine,
                    stage.at,
                    below,
                    std::slice::from_ref(&part),
                )?;
            }
            gpu.sync()?;
            us = begun.elapsed().as_secs_f64() * 1e6 / timed as f64;
        }
        let stream = stage.copy_engine.stream()?;
        // SAFETY: waited for before it is read.
        unsafe {
            stage
                .copy_engine
                .copy(&stream, received.device_ptr(), stage.at, bytes)
        }?;
        stream.sync()?;
        Ok((received.as_slice() == sent.as_slice(), us))
    }
}

impl StageOutput for Boundary {
    /// For a stage that is no GPU.
    fn read(&mut self, rows: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let block = self.stage.block;
        let width = rows * block.hidden;
        let n_parts = 1 + self.stage.handed_over.len();
        if rows != self.n_rows || out.len() != n_parts * width {
            let detail = format!("{rows} rows, but the last pass had {}", self.n_rows);
            return Err(invalid_call("reading the rows of a stage", detail));
        }
        self.done.sync()?;
        let memory = match self.read.take() {
            Some(memory) if memory.as_slice().len() >= out.len() => memory,
            _ => self.copy_engine.pinned(out.len())?,
        };
        let stream = self.copy_engine.stream()?;
        for i in 0..n_parts {
            let offset = match i {
                0 => 0,
                i => self.stage.captured(self.bucket, i - 1),
            };
            let to = memory.device_ptr() + 4 * (i * width) as u64;
            // SAFETY: waited for before it is read.
            unsafe {
                self.copy_engine
                    .copy(&stream, to, self.at + offset as u64, 4 * width)
            }?;
        }
        stream.sync()?;
        out.copy_from_slice(&memory.as_slice()[..out.len()]);
        self.read = Some(memory);
        Ok(())
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Engine {
    /// The boundaries of a stage; `None` for a whole model.
    pub(crate) fn boundary(&mut self) -> Option<&mut Boundary> {
        self.boundary.as_mut()
    }

    /// Whether it runs a shard of a tensor split.
    pub(crate) fn is_shard(&self) -> bool {
        self.exchange.is_some()
    }

    /// Lets this shard, the last of two, and the one before it write in each other's memory, and
    /// wait for each other for `watchdog` at most.
    ///
    /// # Errors
    /// Those of [`ExchangeEnd::connect`].
    pub(crate) fn connect_shards(
        &mut self,
        below: &Boundary,
        watchdog: Duration,
    ) -> Result<(), DeviceError> {
        let (Some(this), Some(other)) = (&self.exchange, &below.exchange) else {
            let detail = "one of the stages is no shard".to_owned();
            return Err(invalid_call("connect", detail));
        };
        this.connect(other, watchdog)?;
        self.gpu.make_current()
    }

    /// Chooses how rows come from `below`, by a test, and logs it.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for stages that differ in their kernels, or without peer access
    /// if that is required.
    pub(crate) fn connect(
        &mut self,
        below: &mut Boundary,
        peer_access: PeerAccess,
    ) -> Result<(), DeviceError> {
        let Engine { gpu, boundary, .. } = self;
        let Some(stage) = boundary else {
            return Err(invalid_call(
                "connect",
                "a whole model is no stage".to_owned(),
            ));
        };
        let unsupported = |what: String, instead: &str| DeviceError::Unsupported {
            what,
            device: stage.device.clone(),
            instead: instead.to_owned(),
        };
        let alike = |of: &Boundary| (of.stage.block, of.kernels);
        if !stage.stage.is_draft() && alike(stage) != alike(below) {
            return Err(unsupported(
                format!(
                    "layers above those of {}, which runs other kernels,",
                    below.device
                ),
                "name GPUs of one architecture with --target-devices, or another --target-layer-split",
            ));
        }
        let same = stage.copy_engine.is_same_device(&below.copy_engine);
        let reaches = peer_access != PeerAccess::Avoided
            && stage.copy_engine.enable_peer_access(&below.copy_engine)?;
        let mut way = None;
        if reaches {
            let direct = Way {
                arrived: Rc::new(Event::new(gpu)?),
                host: None,
            };
            let (arrived, us) = direct.test(gpu, stage, below)?;
            if arrived {
                let kind = if same {
                    "within the GPU"
                } else {
                    "by peer access"
                };
                log_way(stage, below, kind, us);
                way = Some(direct);
            } else {
                tracing::warn!(
                    device = %stage.device,
                    from = %below.device,
                    "peer access gives wrong bytes; rows go through host memory"
                );
            }
        }
        let way = match way {
            Some(way) => way,
            None if peer_access == PeerAccess::Required => {
                return Err(unsupported(
                    format!("--peer-access: reading the memory of {}", below.device),
                    "remove --peer-access, and rows go through host memory",
                ));
            }
            None => {
                let through_host = Way {
                    arrived: Rc::new(Event::new(gpu)?),
                    host: Some(HostWay {
                        stream: below.copy_engine.stream()?,
                        staged: Rc::new(below.copy_engine.event()?),
                        memory: below.copy_engine.pinned(below.block_bytes)?,
                    }),
                };
                gpu.make_current()?;
                let (arrived, us) = through_host.test(gpu, stage, below)?;
                if !arrived {
                    return Err(DeviceError::DeviceLost {
                        during: "a copy between GPUs",
                        detail: format!("wrong bytes from {} on {}", below.device, stage.device),
                    });
                }
                log_way(stage, below, "through host memory", us);
                through_host
            }
        };
        below.taken = Some(match &way.host {
            Some(host) => Rc::clone(&host.staged),
            None => Rc::clone(&way.arrived),
        });
        stage.way = Some(way);
        Ok(())
    }

    /// Queues the copy of the rows of the last pass of `below`, behind that of the stage's own last
    /// block to the stage above.
    pub(crate) fn receive(&mut self, below: &Boundary, rows: usize) -> Result<(), DeviceError> {
        let Engine { gpu, boundary, .. } = self;
        let Some((stage, way)) = boundary.as_mut().and_then(|stage| {
            let way = stage.way.take()?;
            Some((stage, way))
        }) else {
            return Err(invalid_call(
                "receive",
                "the stages are not connected".to_owned(),
            ));
        };
        let parts = below
            .stage
            .handed_over_parts(&stage.stage, below.bucket, below.n_rows);
        let queued = stage
            .wait_until_taken(gpu)
            .and_then(|()| way.queue(gpu, &stage.copy_engine, stage.at, below, &parts));
        stage.way = Some(way);
        stage.received_rows = Some(rows).filter(|rows| *rows == below.n_rows);
        queued
    }

    /// Whether it is a stage without the LM head.
    pub(super) fn hands_over(&self) -> bool {
        self.boundary.as_ref().is_some_and(|of| !of.stage.has_head)
    }

    /// Waits until nothing queued reads a header any more.
    pub(super) fn wait_for_headers(&mut self) -> Result<(), DeviceError> {
        match &self.boundary {
            _ if !self.headers.in_flight => Ok(()),
            // The next chunk of a stage is queued while this one runs.
            Some(boundary) => boundary.wait_for_uploads(),
            None => self.sync(),
        }
    }

    /// Waits until nothing queued reads the header of a commit any more, or that of the rows of a
    /// multi-token-prediction head behind it.
    ///
    /// A stage commits one group of sequences while it works on another.
    pub(super) fn wait_for_commit_header(&mut self, has_mtp: bool) -> Result<(), DeviceError> {
        match &self.boundary {
            Some(boundary) if !has_mtp => boundary.committed.sync(),
            _ => self.wait_for_headers(),
        }
    }

    /// Notes an upload on the main stream.
    pub(super) fn note_upload(&self) -> Result<(), DeviceError> {
        match &self.boundary {
            Some(boundary) => boundary.note_upload(&self.gpu),
            None => Ok(()),
        }
    }

    /// Prepares a pass of a stage.
    pub(super) fn begin_pass(&mut self, rows: usize) -> Result<(), DeviceError> {
        match &mut self.boundary {
            Some(boundary) => boundary.begin(&self.gpu, rows),
            None => Ok(()),
        }
    }

    /// Ends a pass of a stage.
    pub(super) fn end_pass(&mut self, key: PlanKey, rows: usize) -> Result<(), DeviceError> {
        match &mut self.boundary {
            Some(boundary) => boundary.end(&self.gpu, key, rows),
            None => Ok(()),
        }
    }
}

fn log_way(stage: &Boundary, below: &Boundary, way: &str, us: f64) {
    tracing::info!(
        device = %stage.device,
        from = %below.device,
        way,
        row_us = us.round(),
        "rows of the layers below are received"
    );
}
