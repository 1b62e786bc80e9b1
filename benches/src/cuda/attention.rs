//! Kernels of `kernels/attn`, at the shape of one attention layer of a 27B hybrid, and of its draft.
//!
//! Every launch of a case works on a cache of its own, as many as it takes to be past any cache of the card.

use anyhow::Result;
use contract::{KvFormat, RopeSpec};
use cuda::compile::Modules;
use cuda::driver::Buffer;
use cuda::launch::attention::{
    Cache, Card, Mask, PAGE, Positions, Projections, Shape, combine, prepare, tree,
};
use cuda::launch::norm::Out;
use cuda::launch::{Launch, Unit};

use super::{Bench, Work};

/// Bytes of caches that a case goes round in.
const ROUND_BYTES: usize = 256 << 20;

/// Times them.
///
/// # Errors
/// Those of the card.
pub fn run(bench: &mut Bench) -> Result<()> {
    use KvFormat::{F16, Q4_0, Q8_0};
    // What `--exact` costs: every row by itself, keys in the order of its path.
    let mut exact = World::new(bench, target(Q8_0), 512)?;
    exact.card.path_order = true;
    exact.run(bench, &[1, 24])?;
    for (context, format, rows) in [
        (512, F16, [1, 24].as_slice()),
        (512, Q8_0, &[1, 8, 24, 64]),
        (4096, Q8_0, &[1, 24]),
        (32_768, Q8_0, &[1, 24]),
        (131_072, Q8_0, &[1, 8, 24, 64]),
        (131_072, F16, &[1, 24]),
        (131_072, Q4_0, &[1, 24]),
    ] {
        World::new(bench, target(format), context)?.run(bench, rows)?;
    }
    let mut shape = target(KvFormat::F16);
    shape.n_heads = 32;
    shape.n_kv_heads = 8;
    shape.head_dim = 128;
    shape.rope.dims = 128;
    shape.gate = false;
    shape.mask = Mask::Full;
    for (window, context) in [(2048, 512), (2048, 4096), (8192, 8192)] {
        shape.window = window;
        World::new(bench, shape, context)?.run(bench, &[16])?;
    }
    Ok(())
}

fn target(format: KvFormat) -> Shape {
    Shape {
        n_heads: 24,
        n_kv_heads: 4,
        head_dim: 256,
        rope: RopeSpec {
            dims: 64,
            theta: 1e7,
        },
        gate: true,
        normed: true,
        k: format,
        v: format,
        turned: true,
        eps: 1e-6,
        scale: 1.0 / 16.0,
        window: 0,
        mask: Mask::Ancestors,
        ring_pages: 0,
    }
}

/// Caches of one shape and context, and the rows of a step.
struct World {
    shape: Shape,
    card: Card,
    context: usize,
    caches: Vec<Cache>,
    q: Buffer<f32>,
    kv: Buffer<f32>,
    norm: Buffer<f32>,
    q16: Buffer<u16>,
    out: Buffer<u8>,
    frequencies: Buffer<f64>,
    /// Owned by the caches above.
    _planes: Vec<Buffer<u16>>,
    _table: Buffer<i32>,
}

/// Halves between 2^-8 and 2^-6 of either sign; as bytes, any codes at all.
fn halves(n: usize) -> Vec<u16> {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as u16
    };
    (0..n).map(|_| 0x1c00 | (next() & 0x87ff)).collect()
}

impl World {
    fn new(bench: &Bench, shape: Shape, context: usize) -> Result<World> {
        let gpu = &bench.gpu;
        let pages = (context + 64).div_ceil(PAGE);
        let rows = pages * shape.n_kv_heads * PAGE;
        let (value_bytes, scales) = match shape.k {
            KvFormat::F16 => (2 * shape.head_dim, 0),
            KvFormat::Q8_0 => (shape.head_dim, shape.head_dim / 32),
            _ => (shape.head_dim / 2, shape.head_dim / 32),
        };
        let layer_bytes = 2 * rows * (value_bytes + 2 * scales);
        let n = (ROUND_BYTES / layer_bytes).clamp(1, 48);
        let table: Vec<i32> = (0..pages as i32).collect();
        let table = gpu.upload(&table)?;
        let piece = halves((1 << 22) + 38);
        let mut planes = Vec::new();
        let mut caches = Vec::new();
        for _ in 0..n {
            let mut addresses = [0; 4];
            for (i, len) in [rows * value_bytes / 2, rows * scales]
                .into_iter()
                .cycle()
                .take(4)
                .enumerate()
            {
                let mut all: Vec<u16> = piece.iter().copied().cycle().skip(i).take(len).collect();
                if i % 2 == 1 {
                    // Scales are positive.
                    all.iter_mut().for_each(|half| *half &= 0x7fff);
                }
                let plane = gpu.upload(&all)?;
                addresses[i] = plane.ptr();
                planes.push(plane);
            }
            let [k, k_scale, v, v_scale] = addresses;
            caches.push(Cache {
                k,
                k_scale,
                v,
                v_scale,
                page_table: table.ptr(),
                max_pages: pages,
            });
        }
        let noise = |n: usize| -> Vec<f32> {
            let half = |h: u16| f32::from((h & 0x3ff) as i16 - 512) / 300.0;
            piece.iter().cycle().take(n).map(|&h| half(h)).collect()
        };
        let width = shape.n_heads * shape.head_dim;
        Ok(World {
            card: Card {
                multiprocessors: gpu.multiprocessors() as usize,
                shared_bytes: gpu.shared_per_block() as usize,
                warpgroups: gpu.arch().to_string() == "sm_90a",
                path_order: false,
                windows: false,
            },
            context,
            caches,
            q: gpu.upload(&noise(64 * 2 * width))?,
            kv: gpu.upload(&noise(64 * shape.n_kv_heads * shape.head_dim))?,
            norm: gpu.upload(&vec![1.0; shape.head_dim])?,
            q16: gpu.filled(64 * width, 0)?,
            out: gpu.alloc(64 * width * 4)?,
            frequencies: gpu.upload(&shape.frequencies())?,
            shape,
            _planes: planes,
            _table: table,
        })
    }

    /// Times the kernels of a layer for several row counts.
    fn run(&self, bench: &mut Bench, rows: &[usize]) -> Result<()> {
        let layers: Vec<Layer> = rows
            .iter()
            .map(|&rows| self.layer(bench, rows))
            .collect::<Result<_>>()?;
        let units: Vec<Unit> = layers.iter().flat_map(Layer::units).collect();
        let modules = bench.modules(&units)?;
        layers
            .iter()
            .try_for_each(|layer| layer.time(bench, &modules, self))
    }

    /// Bytes of the committed keys and values.
    fn bytes(&self) -> f64 {
        let seen = match self.shape.window {
            0 => self.context,
            window => self.context.min(window),
        };
        let per_row = |format: KvFormat| format.bytes(self.shape.n_kv_heads * self.shape.head_dim);
        (seen * (per_row(self.shape.k) + per_row(self.shape.v))) as f64
    }

    fn flops(&self, rows: usize) -> f64 {
        let seen = self.bytes()
            / (self
                .shape
                .k
                .bytes(self.shape.n_kv_heads * self.shape.head_dim)
                * 2) as f64;
        4.0 * seen * (rows * self.shape.n_heads * self.shape.head_dim) as f64
    }
}

/// A `Step` of one chain of `rows` nodes, as `kernels/common/step.cuh` has it.
fn header(rows: usize, committed: usize) -> Vec<i32> {
    let mut words = vec![0_i32; 532];
    words[0] = rows as i32;
    words[1] = 1;
    words[4..8].copy_from_slice(&[0, committed as i32, 0, rows as i32]);
    for row in 0..64 {
        let real = row < rows;
        words[84 + row] = (committed + row) as i32;
        words[148 + row] = if real { 0 } else { -1 };
        words[276 + row] = row as i32;
        let ancestors = u64::MAX >> (63 - row);
        words[340 + 2 * row] = ancestors as i32;
        words[341 + 2 * row] = (ancestors >> 32) as i32;
    }
    words
}

/// The launches of a layer, each for every cache.
struct Layer {
    rows: usize,
    prepares: Vec<Launch>,
    trees: Vec<Launch>,
    combine: Launch,
    /// Read by the launches.
    _step: Buffer<i32>,
    _scratch: Buffer<u8>,
}

impl World {
    fn layer(&self, bench: &Bench, rows: usize) -> Result<Layer> {
        let (shape, card) = (&self.shape, self.card);
        let step = bench.gpu.upload(&header(rows, self.context))?;
        let room = (rows, self.caches[0].max_pages * PAGE);
        let scratch = bench.gpu.filled::<u8>(shape.scratch_bytes(card, room), 0)?;
        let from = Projections {
            q: self.q.ptr(),
            k: self.kv.ptr(),
            v: self.kv.ptr(),
            kv_stride: shape.n_kv_heads * shape.head_dim,
            q_norm: self.norm.ptr(),
            k_norm: self.norm.ptr(),
            frequencies: self.frequencies.ptr(),
        };
        let out = Out {
            f16: self.out.ptr(),
            ..Out::default()
        };
        let (at, q16) = (step.ptr(), self.q16.ptr());
        Ok(Layer {
            rows,
            prepares: self
                .caches
                .iter()
                .map(|&cache| prepare(shape, rows, Positions::Step(at), from, (cache, q16)))
                .collect(),
            trees: self
                .caches
                .iter()
                .map(|&cache| tree(shape, card, rows, (at, q16), (cache, scratch.ptr())))
                .collect(),
            combine: combine(shape, card, room, (at, self.q.ptr(), scratch.ptr()), out),
            _step: step,
            _scratch: scratch,
        })
    }
}

impl Layer {
    fn units(&self) -> [Unit; 3] {
        [&self.prepares[0], &self.trees[0], &self.combine].map(|launch| launch.unit.clone())
    }

    fn time(&self, bench: &mut Bench, modules: &Modules, world: &World) -> Result<()> {
        let shape = &world.shape;
        let name = format!(
            "{} rows, {} keys, {}x{} {}{}",
            self.rows,
            world.context,
            shape.n_heads,
            shape.head_dim,
            shape.k.name(),
            match world.card.path_order {
                true => ", path order",
                false => "",
            }
        );
        let work = Work {
            bytes: world.bytes(),
            flops: world.flops(self.rows),
        };
        for (kernel, launches, work) in [
            ("prepare", self.prepares.iter().collect(), Work::default()),
            ("tree", self.trees.iter().collect(), work),
            ("combine", vec![&self.combine], Work::default()),
        ] as [(&str, Vec<&Launch>, Work); 3]
        {
            let case = format!("{kernel}, {name}");
            bench.case("attention", &case, modules, &launches, work)?;
        }
        // A layer as it is run: the three behind one another.
        let layer: Vec<&Launch> = self
            .prepares
            .iter()
            .zip(&self.trees)
            .flat_map(|(prepare, tree)| [prepare, tree, &self.combine])
            .collect();
        let timing = bench.gpu.time_graph(modules, &layer, 3, 20)?;
        let layers = self.trees.len() as f64;
        bench.line("attention", &format!("layer, {name}"), timing, layers, work)?;
        Ok(())
    }
}
