//! A model's weights on the card: where each lies, and how they get there.
//!
//! Matrices are repacked by the rule of their type ([`crate::pack`]), vectors become f32, the embedding table
//! keeps its file layout because its rows are looked up. Loading shares the repacking out over threads, which
//! write into page-locked buffers; finished buffers go to the card while the next are filled.
//!
//! The table of a large model stays in page-locked memory of the host: a step reads a row of 3 KB for each token, which
//! is nothing beside its weights, and the table would take the card's place for tens of thousands of tokens.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use contract::quant::dequantize_row;
use contract::{
    AttentionSpec, DeviceError, DraftSpec, FeedForward, GatedDeltaSpec, LoadProgress, Mixer,
    ModelSpec, QuantType, WeightError, WeightRef, WeightSource,
};

use crate::driver::{Event, Gpu, Pinned};
use crate::memory::Carver;
use crate::pack::{self, Kind};

/// Bytes of one page-locked buffer.
const STAGE: usize = 16 << 20;
/// Copies under way at once; their buffers are not being filled.
const COPIES: usize = 2;
/// More threads do not read a file faster.
const MOST_THREADS: usize = 16;
/// A table stays on the host where all weights are at least so many times as large: rows from there come later by a
/// microsecond or two, which is more of a small model's step.
const LARGE: usize = 16;

/// A matrix `[rows, cols]` in the card's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub(crate) kind: Kind,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) at: u64,
}

/// The embedding in the file's layout, on the card or on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) ty: QuantType,
    pub(crate) at: u64,
}

/// Where everything lies.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) embedding: Table,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: u64,
    pub(crate) head: Matrix,
    pub(crate) draft: Option<DraftWeights>,
    items: Vec<Item>,
}

/// Weights of a draft.
#[derive(Debug, Clone)]
pub(crate) struct DraftWeights {
    pub(crate) fc: Matrix,
    pub(crate) hidden_norm: u64,
    pub(crate) layers: Vec<DraftLayerWeights>,
    pub(crate) final_norm: u64,
}

/// One layer of a draft.
#[derive(Debug, Clone)]
pub(crate) struct DraftLayerWeights {
    pub(crate) attention_norm: u64,
    pub(crate) attention: AttentionWeights,
    pub(crate) ffn: FfnWeights,
}

/// A feed-forward and the norm before it.
#[derive(Debug, Clone)]
pub(crate) struct FfnWeights {
    pub(crate) norm: u64,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

/// One layer. Vectors are addresses of f32 values.
#[derive(Debug, Clone)]
pub(crate) struct LayerWeights {
    pub(crate) mixer_norm: u64,
    pub(crate) mixer: MixerWeights,
    pub(crate) ffn: FfnWeights,
}

/// The mixer of a layer.
#[derive(Debug, Clone)]
pub(crate) enum MixerWeights {
    Attention(AttentionWeights),
    Delta(DeltaWeights),
}

impl MixerWeights {
    /// The matrices that project its input, in the order that the mixer knows them by.
    pub(crate) fn readers(&self) -> Vec<Matrix> {
        match self {
            MixerWeights::Attention(w) => w.readers().to_vec(),
            MixerWeights::Delta(w) => vec![w.qkv, w.z, w.beta, w.alpha],
        }
    }

    /// The output projection.
    pub(crate) fn out(&self) -> Matrix {
        match self {
            MixerWeights::Attention(w) => w.o,
            MixerWeights::Delta(w) => w.out,
        }
    }
}

/// Weights of an attention mixer; a norm that is not there is 0.
#[derive(Debug, Clone)]
pub(crate) struct AttentionWeights {
    pub(crate) q_norm: u64,
    pub(crate) k_norm: u64,
    pub(crate) q: Matrix,
    pub(crate) k: Matrix,
    pub(crate) v: Matrix,
    pub(crate) o: Matrix,
}

impl AttentionWeights {
    /// The matrices that project its input.
    pub(crate) fn readers(&self) -> [Matrix; 3] {
        [self.q, self.k, self.v]
    }
}

/// Weights of a gated-delta mixer.
#[derive(Debug, Clone)]
pub(crate) struct DeltaWeights {
    pub(crate) qkv: Matrix,
    pub(crate) z: Matrix,
    pub(crate) beta: Matrix,
    pub(crate) alpha: Matrix,
    pub(crate) out: Matrix,
    pub(crate) a: u64,
    pub(crate) dt: u64,
    pub(crate) conv: u64,
    pub(crate) norm: u64,
}

/// One weight on its way to the card.
#[derive(Debug, Clone)]
struct Item {
    of: Owner,
    weight: WeightRef,
    at: u64,
    form: Form,
}

/// Whose file a weight is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Target,
    Draft,
    /// The target's too, but it stays on the host.
    Table,
}

/// What becomes of the file's bytes.
#[derive(Debug, Clone, Copy)]
enum Form {
    Packed(Kind),
    Floats,
    Raw,
}

impl Form {
    /// Bytes of `rows` rows on the card.
    fn bytes(self, weight: &WeightRef, rows: usize) -> usize {
        match self {
            Form::Packed(kind) => kind.bytes(rows, weight.cols),
            Form::Floats => 4 * rows * weight.cols,
            Form::Raw => rows * weight.ty.row_bytes(weight.cols),
        }
    }
}

/// Lays weights out one after another.
struct Plan<'a> {
    of: Owner,
    carver: &'a mut Carver,
    items: Vec<Item>,
}

impl Plan<'_> {
    fn item(&mut self, weight: &WeightRef, form: Form) -> u64 {
        let at = self.carver.take(form.bytes(weight, weight.rows));
        self.items.push(Item {
            of: self.of,
            weight: weight.clone(),
            at,
            form,
        });
        at
    }

    fn matrix(&mut self, weight: &WeightRef) -> Matrix {
        let kind = Kind::of(weight.ty);
        Matrix {
            kind,
            rows: weight.rows,
            cols: weight.cols,
            at: self.item(weight, Form::Packed(kind)),
        }
    }

    fn vector(&mut self, weight: &WeightRef) -> u64 {
        self.item(weight, Form::Floats)
    }

    fn ffn(&mut self, norm: &WeightRef, ffn: &FeedForward) -> FfnWeights {
        let FeedForward::Dense { gate, up, down } = ffn;
        FfnWeights {
            norm: self.vector(norm),
            gate: self.matrix(gate),
            up: self.matrix(up),
            down: self.matrix(down),
        }
    }

    fn draft(&mut self, spec: &DraftSpec) -> DraftWeights {
        let layers = spec.layers.iter().map(|layer| DraftLayerWeights {
            attention_norm: self.vector(&layer.attention_norm),
            attention: self.attention(&layer.attention),
            ffn: self.ffn(&layer.ffn_norm, &layer.ffn),
        });
        DraftWeights {
            layers: layers.collect(),
            fc: self.matrix(&spec.fc),
            hidden_norm: self.vector(&spec.hidden_norm),
            final_norm: self.vector(&spec.final_norm),
        }
    }

    fn attention(&mut self, a: &AttentionSpec) -> AttentionWeights {
        AttentionWeights {
            q_norm: a.q_norm.as_ref().map_or(0, |norm| self.vector(norm)),
            k_norm: a.k_norm.as_ref().map_or(0, |norm| self.vector(norm)),
            q: self.matrix(&a.q),
            k: self.matrix(&a.k),
            v: self.matrix(&a.v),
            o: self.matrix(&a.o),
        }
    }

    fn delta(&mut self, d: &GatedDeltaSpec) -> DeltaWeights {
        DeltaWeights {
            qkv: self.matrix(&d.qkv),
            z: self.matrix(&d.z),
            beta: self.matrix(&d.beta),
            alpha: self.matrix(&d.alpha),
            out: self.matrix(&d.out),
            a: self.vector(&d.a),
            dt: self.vector(&d.dt),
            conv: self.vector(&d.conv),
            norm: self.vector(&d.norm),
        }
    }
}

impl Weights {
    /// Lays out every weight of a plan that [`crate::check::plan`] has passed: the target's from `carver`, its table
    /// from `table_carver` if it stays on the host, the draft's from `draft_carver`.
    pub(crate) fn new(
        (spec, carver): (&ModelSpec, &mut Carver),
        table_carver: &mut Carver,
        (draft, draft_carver): (Option<&DraftSpec>, &mut Carver),
    ) -> Weights {
        let mut table = Plan {
            of: Owner::Table,
            carver: table_carver,
            items: Vec::new(),
        };
        let mut plan = Plan {
            of: Owner::Target,
            carver,
            items: Vec::new(),
        };
        let all: usize = spec.weights().into_iter().map(WeightRef::bytes).sum();
        let keeper = match LARGE * spec.embedding.bytes() <= all {
            true => &mut table,
            false => &mut plan,
        };
        let embedding = Table {
            ty: spec.embedding.ty,
            at: keeper.item(&spec.embedding, Form::Raw),
        };
        let layers = spec.layers.iter().map(|layer| LayerWeights {
            mixer_norm: plan.vector(&layer.mixer_norm),
            mixer: match &layer.mixer {
                Mixer::Attention(a) => MixerWeights::Attention(plan.attention(a)),
                Mixer::GatedDelta(d) => MixerWeights::Delta(plan.delta(d)),
            },
            ffn: plan.ffn(&layer.ffn_norm, &layer.ffn),
        });
        let layers = layers.collect();
        let (final_norm, head) = (plan.vector(&spec.final_norm), plan.matrix(&spec.head));
        let mut items = plan.items;
        items.append(&mut table.items);
        let mut plan = Plan {
            of: Owner::Draft,
            carver: draft_carver,
            items: Vec::new(),
        };
        let draft = draft.map(|draft| plan.draft(draft));
        items.append(&mut plan.items);
        Weights {
            embedding,
            layers,
            final_norm,
            head,
            draft,
            items,
        }
    }

    /// The weights of some files, in the order of loading.
    fn of<'a>(&'a self, whose: &'a [Owner]) -> impl Iterator<Item = &'a Item> {
        self.items.iter().filter(|item| whose.contains(&item.of))
    }

    /// Bytes of page-locked memory that loading takes on this machine, given back at its end.
    pub(crate) fn staging_bytes(&self, whose: &[Owner]) -> usize {
        let pieces: Vec<Piece<'_>> = self.of(whose).flat_map(Item::pieces).collect();
        let (threads, largest) = staging(&pieces);
        (threads + COPIES) * largest
    }

    /// Fills the host's memory with what stays there; `base` is its address.
    pub(crate) fn load_table(
        &self,
        sources: Sources<'_>,
        (base, table): (u64, &mut [u8]),
    ) -> Result<(), DeviceError> {
        for item in self.of(&[Owner::Table]) {
            let begin = usize::try_from(item.at - base).unwrap_or(usize::MAX);
            let table = &mut table[begin..][..item.form.bytes(&item.weight, item.weight.rows)];
            let pieces: Vec<Piece<'_>> = item.pieces().collect();
            let threads = staging(&pieces).0.max(1);
            let each = pieces.len().div_ceil(threads).max(1);
            let outcomes = thread::scope(|scope| {
                let mut rest = table;
                let mut hands = Vec::new();
                for share in pieces.chunks(each) {
                    let bytes = share.iter().map(|piece| piece.bytes).sum();
                    let (own, others) = rest.split_at_mut(bytes);
                    rest = others;
                    hands.push(scope.spawn(move || {
                        let mut rest = own;
                        share.iter().try_for_each(|piece| {
                            let (out, others) = std::mem::take(&mut rest).split_at_mut(piece.bytes);
                            rest = others;
                            piece.fill(sources, out)
                        })
                    }));
                }
                let joined = hands.into_iter().map(|hand| hand.join());
                joined.collect::<Vec<_>>()
            });
            for outcome in outcomes {
                // A panic there was told where it happened.
                outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
        }
        Ok(())
    }

    /// Brings the weights of some files to their places on the card. Returns when all have arrived.
    pub(crate) fn load(
        &self,
        gpu: &Gpu,
        (sources, whose): (Sources<'_>, &[Owner]),
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<(), DeviceError> {
        let pieces: Vec<Piece<'_>> = self.of(whose).flat_map(Item::pieces).collect();
        let (threads, largest) = staging(&pieces);
        let copies = gpu.new_stream()?;
        let mut stages = Vec::with_capacity(threads + COPIES);
        for _ in 0..threads + COPIES {
            stages.push(gpu.pinned::<u8>(largest)?);
        }
        let mut at = LoadProgress {
            done_bytes: 0,
            total_bytes: self.of(whose).map(|i| i.weight.bytes() as u64).sum(),
        };
        progress(at);
        let (free, stage) = mpsc::channel::<Pinned<u8>>();
        let stage = Arc::new(Mutex::new(stage));
        let (done, filled) = mpsc::channel();
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..threads {
                let (stage, done, next, pieces) =
                    (Arc::clone(&stage), done.clone(), &next, &pieces);
                scope.spawn(move || {
                    loop {
                        // A buffer first: who holds a piece must be able to fill it.
                        let Ok(buffer) = stage
                            .lock()
                            .map_err(drop)
                            .and_then(|s| s.recv().map_err(drop))
                        else {
                            return;
                        };
                        let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else {
                            return;
                        };
                        let mut buffer = buffer;
                        let result = piece.fill(sources, buffer.as_mut_slice());
                        if done.send((piece, buffer, result)).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(done);
            for buffer in stages {
                let _ = free.send(buffer);
            }
            let mut under_way: VecDeque<(Event, Pinned<u8>)> = VecDeque::new();
            let mut outcome = Ok(());
            for _ in 0..pieces.len() {
                if under_way.len() == COPIES
                    && let Some((event, buffer)) = under_way.pop_front()
                {
                    outcome = event.sync();
                    let _ = free.send(buffer);
                }
                let Ok((piece, buffer, result)) = filled.recv() else {
                    break;
                };
                outcome = outcome.and(result.map_err(DeviceError::from));
                if outcome.is_err() {
                    break;
                }
                // SAFETY: the buffer waits in `under_way` until its event has passed.
                let copied =
                    unsafe { gpu.copy_to_card(&copies, piece.at, &buffer, 0..piece.bytes) };
                outcome = copied.and_then(|()| {
                    let event = Event::new(gpu)?;
                    copies.record(&event)?;
                    under_way.push_back((event, buffer));
                    Ok(())
                });
                if outcome.is_err() {
                    break;
                }
                at.done_bytes += piece.source_bytes();
                progress(at);
            }
            // Ends the threads that wait for a buffer.
            drop(free);
            let arrived = copies.sync();
            outcome.and(arrived)
        })
    }
}

/// Threads that pack pieces, and bytes of the buffer each fills.
fn staging(pieces: &[Piece<'_>]) -> (usize, usize) {
    let largest = pieces.iter().map(|p| p.bytes).max().unwrap_or(0);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    (threads.min(MOST_THREADS).min(pieces.len().max(1)), largest)
}

/// Where the bytes are.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    pub(crate) target: &'a dyn WeightSource,
    pub(crate) draft: Option<&'a dyn WeightSource>,
}

/// Some rows of one weight: what one buffer takes.
struct Piece<'a> {
    item: &'a Item,
    first_row: usize,
    rows: usize,
    at: u64,
    bytes: usize,
}

impl Item {
    /// Cuts the weight at whole row tiles so that each piece fits a buffer.
    fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let (weight, form) = (&self.weight, self.form);
        let step = match form {
            Form::Packed(kind) => kind.row_step(),
            Form::Floats | Form::Raw => 1,
        };
        let step_bytes = form.bytes(weight, step).max(1);
        let per_piece = (STAGE / step_bytes).max(1) * step;
        (0..weight.rows).step_by(per_piece).map(move |first_row| {
            let rows = per_piece.min(weight.rows - first_row);
            Piece {
                item: self,
                first_row,
                rows,
                at: self.at + form.bytes(weight, first_row) as u64,
                bytes: form.bytes(weight, rows),
            }
        })
    }
}

impl Piece<'_> {
    fn source_bytes(&self) -> u64 {
        let weight = &self.item.weight;
        (self.rows * weight.ty.row_bytes(weight.cols)) as u64
    }

    /// Writes the rows as the card wants them to the front of `out`.
    fn fill(&self, sources: Sources<'_>, out: &mut [u8]) -> Result<(), WeightError> {
        let weight = &self.item.weight;
        let source = match (self.item.of, sources.draft) {
            (Owner::Draft, Some(draft)) => draft,
            _ => sources.target,
        };
        let bytes = source.bytes(weight)?;
        if bytes.len() != weight.bytes() {
            return Err(WeightError::Mismatch {
                name: Arc::clone(&weight.name),
                detail: format!("{} bytes, {} expected", bytes.len(), weight.bytes()),
            });
        }
        let row_bytes = weight.ty.row_bytes(weight.cols);
        let bytes = &bytes[self.first_row * row_bytes..][..self.rows * row_bytes];
        let out = &mut out[..self.bytes];
        match self.item.form {
            Form::Raw => out.copy_from_slice(bytes),
            Form::Floats => {
                let mut row = vec![0.0; weight.cols];
                let rows = bytes.chunks_exact(row_bytes);
                for (bytes, out) in rows.zip(out.chunks_exact_mut(4 * weight.cols)) {
                    dequantize_row(weight.ty, bytes, &mut row);
                    for (x, out) in row.iter().zip(out.chunks_exact_mut(4)) {
                        out.copy_from_slice(&x.to_le_bytes());
                    }
                }
            }
            Form::Packed(_) => pack::pack(weight.ty, weight.cols, bytes, out),
        }
        Ok(())
    }
}
