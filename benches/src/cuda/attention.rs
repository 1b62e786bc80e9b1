//! Attention kernels at the shape of one attention layer of a 27B hybrid model and of its draft.
//!
//! Each launch of a case uses its own KV cache. Together the caches exceed the L2 cache.

use anyhow::Result;
use contract::{KvFormat, RopeSpec};
use cuda::Numerics;
use cuda::compile::Modules;
use cuda::driver::Buffer;
use cuda::launch::attention::kv_layout::row_bytes;
use cuda::launch::attention::{
    AppendTarget, AttentionConfig, Cache, DecodeBuffers, Mask, PAGE, Positions, Projections, Shape,
    combine, qk_norm_rope_append, tree,
};
use cuda::launch::norm::ActivationBuffers;
use cuda::launch::{CompileUnit, Launch, step_words};
use cuda::select::{StepSize, decode_attention};

use super::{Bench, Work};

/// Total bytes of a case's KV caches.
const ROUND_BYTES: usize = 256 << 20;

/// Times the kernels.
///
/// # Errors
/// Device errors.
pub fn run(bench: &mut Bench) -> Result<()> {
    use KvFormat::{F16, Q4_0, Q8_0};
    for (context, format, rows) in [
        (512, F16, [1, 24].as_slice()),
        (512, Q8_0, &[1, 8, 24, 64]),
        (4096, Q8_0, &[1, 24]),
        (32_768, Q8_0, &[1, 24]),
        (131_072, Q8_0, &[1, 8, 24, 64]),
        (131_072, F16, &[1, 24]),
        (131_072, Q4_0, &[1, 24]),
    ] {
        AttentionBench::new(bench, target(format), (context, context))?.run(bench, rows)?;
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
        AttentionBench::new(bench, shape, (context, context))?.run(bench, &[16])?;
    }
    Ok(())
}

/// Define values to compare in one process.
type Variant = (&'static str, &'static [(&'static str, &'static str)]);
const VARIANTS: &[Variant] = &[(" light items", &[("OVERHEAD", "2")])];

/// Compares the batch-invariant with the fastest order: chains, and binary trees, in sequences that
/// may grow to `room` tokens.
///
/// # Errors
/// Device errors.
pub fn orders(bench: &mut Bench) -> Result<()> {
    use KvFormat::{Q4_0, Q8_0, Tq3_0};
    const DEEP: usize = 131_072;
    let mut worlds = Vec::new();
    for (context, room, format) in [
        (512, 4096, Q8_0),
        (512, DEEP, Q8_0),
        (9000, DEEP, Q8_0),
        (32_768, DEEP, Q8_0),
        (DEEP, DEEP, Q8_0),
        (DEEP, DEEP, Q4_0),
        (DEEP, DEEP, Tq3_0),
    ] {
        worlds.push(AttentionBench::new(bench, target(format), (context, room))?);
    }
    let mut layers = Vec::new();
    for data in &mut worlds {
        for (rows, growth) in [
            (1, Growth::Chain),
            (8, Growth::Chain),
            (24, Growth::Chain),
            (24, Growth::Pairs),
            (48, Growth::Chain),
        ] {
            let often = growth == Growth::Chain && (rows == 1 || rows == 24);
            if data.shape.k != Q8_0 && !often {
                continue;
            }
            data.growth = growth;
            data.config.numerics = Numerics::Fastest;
            layers.push((data.layer(bench, rows)?, data.name(rows, "")));
            data.config.numerics = Numerics::BatchInvariant;
            layers.push((data.layer(bench, rows)?, data.name(rows, " by position")));
            for (name, defines) in VARIANTS {
                let mut layer = data.layer(bench, rows)?;
                layer.vary(defines);
                layers.push((layer, data.name(rows, name)));
            }
        }
    }
    let mut units: Vec<CompileUnit> = Vec::new();
    for unit in layers.iter().flat_map(|(layer, _)| layer.units()) {
        if !units.contains(&unit) {
            units.push(unit);
        }
    }
    let modules = bench.modules(&units)?;
    for (layer, name) in &layers {
        layer.time_alone(bench, &modules, name)?;
    }
    Ok(())
}

/// The shape of a step's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Growth {
    /// Each node has one child.
    Chain,
    /// Each node has two children.
    Pairs,
}

fn target(format: KvFormat) -> Shape {
    Shape {
        n_heads: 24,
        n_kv_heads: 4,
        head_dim: 256,
        rope: RopeSpec::new(64, 1e7),
        gate: true,
        normed: true,
        values_normed: false,
        k: format,
        v: format,
        rotated: true,
        eps: 1e-6,
        scale: 1.0 / 16.0,
        window: 0,
        mask: Mask::Ancestors,
        ring_pages: 0,
    }
}

/// KV caches of one shape and context, and the rows of a step.
struct AttentionBench {
    shape: Shape,
    config: AttentionConfig,
    growth: Growth,
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

/// f16 values between 2^-8 and 2^-6 of either sign. Their bytes are arbitrary codes.
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

impl AttentionBench {
    /// Sequences of `context` tokens that may grow to `room`.
    fn new(bench: &Bench, shape: Shape, (context, room): (usize, usize)) -> Result<AttentionBench> {
        let gpu = &bench.gpu;
        let pages = (context + 64).div_ceil(PAGE);
        let max_pages = (room + 64).div_ceil(PAGE);
        let rows = pages * shape.n_kv_heads * PAGE;
        let (value_bytes, scale_bytes) = row_bytes(shape.k, shape.head_dim);
        let scales = scale_bytes / 2;
        let layer_bytes = 2 * rows * (value_bytes + scale_bytes);
        let n = (ROUND_BYTES / layer_bytes).clamp(1, 48);
        let table: Vec<i32> = (0..max_pages).map(|page| (page % pages) as i32).collect();
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
                max_pages,
            });
        }
        let noise = |n: usize| -> Vec<f32> {
            let half = |h: u16| f32::from((h & 0x3ff) as i16 - 512) / 300.0;
            piece.iter().cycle().take(n).map(|&h| half(h)).collect()
        };
        let width = shape.n_heads * shape.head_dim;
        Ok(AttentionBench {
            config: AttentionConfig {
                gpu: gpu.info().props(),
                numerics: Numerics::Fastest,
                tree_windows: false,
            },
            growth: Growth::Chain,
            context,
            caches,
            q: gpu.upload(&noise(64 * 2 * width))?,
            kv: gpu.upload(&noise(64 * shape.n_kv_heads * shape.head_dim))?,
            norm: gpu.upload(&vec![1.0; shape.head_dim])?,
            q16: gpu.filled(64 * width, 0)?,
            out: gpu.alloc(64 * width * 4)?,
            frequencies: gpu.upload(&shape.frequencies(&[]))?,
            shape,
            _planes: planes,
            _table: table,
        })
    }

    /// Times a layer's kernels for several row counts.
    fn run(&self, bench: &mut Bench, rows: &[usize]) -> Result<()> {
        let layers: Vec<LayerLaunches> = rows
            .iter()
            .map(|&rows| self.layer(bench, rows))
            .collect::<Result<_>>()?;
        let units: Vec<CompileUnit> = layers.iter().flat_map(LayerLaunches::units).collect();
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

impl AttentionBench {
    /// The name of a case of `rows` rows in one order.
    fn name(&self, rows: usize, order: &str) -> String {
        let growth = match self.growth {
            Growth::Chain => "",
            Growth::Pairs => " in pairs",
        };
        let room = self.caches[0].max_pages * PAGE / 1024;
        let format = self.shape.k.name();
        format!(
            "{rows} {format}{growth}, {} of {room}k{order}",
            self.context
        )
    }
}

/// A `Step` of one tree of `rows` nodes, laid out as in `kernels/common/step.cuh`.
fn header(rows: usize, committed: usize, growth: Growth) -> Vec<i32> {
    let mut words = vec![0_i32; step_words::STEP];
    words[0] = rows as i32;
    words[1] = 1;
    words[4..8].copy_from_slice(&[0, committed as i32, 0, rows as i32]);
    let mut ancestors = [0_u64; 64];
    for row in 0..64_usize {
        let parent = match growth {
            Growth::Chain => row.checked_sub(1),
            Growth::Pairs => row.checked_sub(1).map(|before| before / 2),
        };
        ancestors[row] = parent.map_or(0, |parent| ancestors[parent]) | 1 << row;
        let depth = ancestors[row].count_ones() as i32 - 1;
        let real = row < rows;
        words[step_words::POSITION + row] = committed as i32 + depth;
        words[step_words::TREE_OF + row] = if real { 0 } else { -1 };
        words[step_words::PARENT + row] =
            parent.filter(|_| real).map_or(-1, |parent| parent as i32);
        words[step_words::DEPTH + row] = depth;
        words[step_words::ANCESTORS + 2 * row] = ancestors[row] as i32;
        words[step_words::ANCESTORS + 1 + 2 * row] = (ancestors[row] >> 32) as i32;
    }
    words
}

/// The launches of a layer, one per cache.
struct LayerLaunches {
    rows: usize,
    work: Work,
    prepares: Vec<Launch>,
    trees: Vec<Launch>,
    combine: Launch,
    /// Read by the launches.
    _step: Buffer<i32>,
    _scratch: Buffer<u8>,
}

impl AttentionBench {
    fn layer(&self, bench: &Bench, rows: usize) -> Result<LayerLaunches> {
        let (shape, config) = (&self.shape, self.config);
        let step = bench.gpu.upload(&header(rows, self.context, self.growth))?;
        let size = StepSize {
            rows,
            trees: 1,
            tokens: self.caches[0].max_pages * PAGE,
        };
        let selected = decode_attention(shape, config, size).kernel;
        let scratch = bench.gpu.filled::<u8>(selected.scratch_bytes(shape), 0)?;
        let from = Projections {
            q: self.q.ptr(),
            k: self.kv.ptr(),
            v: self.kv.ptr(),
            kv_stride: shape.n_kv_heads * shape.head_dim,
            q_norm: self.norm.ptr(),
            k_norm: self.norm.ptr(),
            frequencies: self.frequencies.ptr(),
            biases: [0; 3],
        };
        let out = ActivationBuffers {
            f16: self.out.ptr(),
            ..ActivationBuffers::default()
        };
        let (at, q16) = (step.ptr(), self.q16.ptr());
        let buffers = |cache: Cache| DecodeBuffers {
            step: at,
            projection: self.q.ptr(),
            queries: q16,
            cache,
            sinks: 0,
            scratch: scratch.ptr(),
        };
        Ok(LayerLaunches {
            rows,
            work: Work {
                bytes: self.bytes(),
                flops: self.flops(rows),
            },
            prepares: self
                .caches
                .iter()
                .map(|&cache| {
                    let to = AppendTarget {
                        cache,
                        f16_queries: q16,
                    };
                    qk_norm_rope_append(shape, rows, Positions::Step(at), from, to)
                })
                .collect(),
            trees: self
                .caches
                .iter()
                .map(|&cache| tree(shape, &selected, &buffers(cache)))
                .collect(),
            combine: combine(shape, &selected, &buffers(self.caches[0]), out),
            _step: step,
            _scratch: scratch,
        })
    }
}

impl LayerLaunches {
    fn units(&self) -> [CompileUnit; 3] {
        [&self.prepares[0], &self.trees[0], &self.combine].map(|launch| launch.unit.clone())
    }

    /// Times tree attention alone and with the split combination.
    fn time_alone(&self, bench: &mut Bench, modules: &Modules, name: &str) -> Result<()> {
        let trees: Vec<&Launch> = self.trees.iter().collect();
        bench.case("tree", name, modules, &trees, self.work)?;
        let both: Vec<&Launch> = trees.iter().flat_map(|t| [*t, &self.combine]).collect();
        let timing = bench.gpu.time_graph(modules, &both, 3, 20)?;
        bench.line("+merge", name, timing, trees.len() as f64, self.work)?;
        Ok(())
    }

    /// Replaces define values of the kernels.
    fn vary(&mut self, defines: &[(&'static str, &str)]) {
        for launch in self.trees.iter_mut().chain([&mut self.combine]) {
            for (name, value) in defines {
                let found = launch.unit.defines.iter_mut().find(|(n, _)| n == name);
                match found {
                    Some(define) => define.1 = (*value).to_owned(),
                    None => launch.unit.defines.push((name, (*value).to_owned())),
                }
            }
        }
    }

    fn time(&self, bench: &mut Bench, modules: &Modules, data: &AttentionBench) -> Result<()> {
        let shape = &data.shape;
        let name = format!(
            "{} rows, {} keys, {}x{} {}",
            self.rows,
            data.context,
            shape.n_heads,
            shape.head_dim,
            shape.k.name(),
        );
        let work = self.work;
        for (kernel, launches, work) in [
            (
                "qk_norm_rope_append",
                self.prepares.iter().collect(),
                Work::default(),
            ),
            ("tree", self.trees.iter().collect(), work),
            ("combine", vec![&self.combine], Work::default()),
        ] as [(&str, Vec<&Launch>, Work); 3]
        {
            let case = format!("{kernel}, {name}");
            bench.case("attention", &case, modules, &launches, work)?;
        }
        // A layer's three launches in sequence.
        let layer: Vec<&Launch> = self
            .prepares
            .iter()
            .zip(&self.trees)
            .flat_map(|(qk_norm_rope_append, tree)| [qk_norm_rope_append, tree, &self.combine])
            .collect();
        let timing = bench.gpu.time_graph(modules, &layer, 3, 20)?;
        let layers = self.trees.len() as f64;
        bench.line("attention", &format!("layer, {name}"), timing, layers, work)?;
        Ok(())
    }
}
