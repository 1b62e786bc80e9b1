//! `kernels/gemm/fused_layer_sm90.cu`: all GEMMs of 64 fused layers, as in a decode step of a 27B
//! hybrid model.
//!
//! Weights are quantised normal values that repeat 256 rows. Each matrix is its own allocation,
//! 15.1 GB in all. Between two fused layers a small kernel makes the input of the next
//! out-projection. The bench checks that a row's bits do not depend on the other rows. Forms of
//! `Bench` are compiled from the same source with more defines and run interleaved.

use std::io::Write;

use anyhow::{Result, ensure};
use contract::QuantType::{self, Q4_K, Q5_K, Q6_K};
use contract::quant::quantize_row;
use cuda::GpuProps;
use cuda::Meter;
use cuda::driver::{Buffer, Gpu};
use cuda::launch::gemm::fused_layer::{
    self, FusedLayer, FusedLayerBuffers, FusedLayerConfig, FusedLayerMatrices, FusedLayerNorms,
    FusedLayerWorkspace, FusedMatrix, MAX_ROWS,
};
use cuda::launch::gemm::small_batch::{GemmScratch, scratch_bytes};
use cuda::launch::norm::{ActivationBuffers, RowSource, convert};
use cuda::launch::{Launch, clocks, step_words};
use cuda::pack::{self, ActivationFormat, WeightKind};

use super::steps::Steps;
use super::{Bench, Defines, Work};

const HIDDEN: usize = 5120;
const FFN: usize = 17408;
const INNER: usize = 6144;
const LAYERS: usize = 64;
const BUCKETS: [usize; 8] = [1, 8, 16, 24, 32, 40, 48, 64];
/// Measurement rounds per form.
const TURNS: usize = 3;
/// Distinct random rows of a matrix. The others repeat them.
const PATTERN_ROWS: usize = 256;
/// Words of a step header.
const HEADER: usize = step_words::STEP;
const EPS: f32 = 1e-6;

/// The bench's random numbers.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// Mean 0, deviation `scale`.
    fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        let normal = |_| (0..4).map(|_| self.unit()).sum::<f32>() - 2.0;
        (0..n).map(normal).map(|v| v * 1.732 * scale).collect()
    }
}

/// Creates matrices and owns their memory.
struct Store<'a> {
    gpu: &'a Gpu,
    random: Random,
    /// Packed rows by type and width.
    patterns: Vec<(QuantType, usize, Buffer<u8>)>,
    memory: Vec<Buffer<u8>>,
    bytes: f64,
    params: f64,
}

impl Store<'_> {
    fn matrix(&mut self, ty: QuantType, rows: usize, cols: usize) -> Result<FusedMatrix> {
        let kind = WeightKind::of(ty);
        let bytes = kind.bytes(rows, cols);
        let memory = self.gpu.alloc::<u8>(bytes)?;
        let known = |p: &(QuantType, usize, Buffer<u8>)| (p.0, p.1) == (ty, cols);
        if !self.patterns.iter().any(known) {
            let mut stored = vec![0; PATTERN_ROWS * ty.row_bytes(cols)];
            for row in stored.chunks_exact_mut(ty.row_bytes(cols)) {
                let values = self.random.normals(cols, 0.7 / (cols as f32).sqrt());
                quantize_row(ty, &values, row);
            }
            let mut packed = vec![0; kind.bytes(PATTERN_ROWS, cols)];
            pack::pack(ty, cols, &stored, &mut packed);
            self.patterns.push((ty, cols, self.gpu.upload(&packed)?));
        }
        if let Some((.., pattern)) = self.patterns.iter().find(|p| known(p)) {
            for start in (0..bytes).step_by(pattern.bytes()) {
                let n = pattern.bytes().min(bytes - start);
                self.gpu
                    .copy_bytes(memory.ptr_at(start), pattern.ptr(), n)?;
            }
        }
        let weight = memory.ptr();
        self.memory.push(memory);
        self.bytes += bytes as f64;
        self.params += (rows * cols) as f64;
        Ok(FusedMatrix {
            kind,
            rows,
            cols,
            weight,
        })
    }
}

/// One layer's matrices. Those of `next` include their outputs.
struct LayerMatrices {
    own: [FusedMatrix; 4],
    next: Vec<(FusedMatrix, u64)>,
}

/// The wider type of half the layers, as in a Q4_K_M file.
fn more(layer: usize) -> QuantType {
    let more = !(8..56).contains(&layer) || (layer - 8) % 3 == 2;
    if more { Q6_K } else { Q4_K }
}

fn layers(store: &mut Store<'_>, outs: &[Buffer<f32>]) -> Result<Vec<LayerMatrices>> {
    let mut all = Vec::new();
    for layer in 0..LAYERS {
        let own = [
            store.matrix(Q4_K, HIDDEN, INNER)?,
            store.matrix(Q4_K, FFN, HIDDEN)?,
            store.matrix(Q4_K, FFN, HIDDEN)?,
            store.matrix(more(layer), HIDDEN, FFN)?,
        ];
        let of_next = (layer + 1) % LAYERS;
        let types = match of_next % 4 {
            3 => vec![(Q4_K, 2 * INNER), (Q4_K, 1024), (more(of_next), 1024)],
            _ => vec![
                (Q5_K, 10240),
                (Q4_K, INNER),
                (QuantType::F32, 48),
                (QuantType::F32, 48),
            ],
        };
        let mut next = Vec::new();
        for ((ty, rows), out) in types.into_iter().zip(outs) {
            next.push((store.matrix(ty, rows, HIDDEN)?, out.ptr()));
        }
        all.push(LayerMatrices { own, next });
    }
    Ok(all)
}

/// Buffers shared by all launches.
struct LayerBuffers {
    props: GpuProps,
    /// Steps of 1, 2, .. rows.
    headers: Buffer<i32>,
    first: Vec<f32>,
    x: Buffer<f32>,
    mixed: Buffer<f32>,
    halves: Buffer<u8>,
    scales: Buffer<f32>,
    norm: Buffer<f32>,
    scratch: Buffer<u8>,
    own: Buffer<u8>,
    memory: FusedLayerBuffers,
    _rest: Vec<Buffer<u8>>,
}

impl LayerBuffers {
    fn new(gpu: &Gpu, random: &mut Random) -> Result<LayerBuffers> {
        let props = gpu.info().props();
        let mut headers = vec![0; (MAX_ROWS + 1) * HEADER];
        for rows in 0..=MAX_ROWS {
            headers[rows * HEADER] = rows as i32;
        }
        let first = random.normals(MAX_ROWS * HIDDEN, 3.0);
        let x = gpu.upload(&first)?;
        let mixed = gpu.upload(&random.normals(MAX_ROWS * INNER, 0.3))?;
        let scales = gpu.upload(&[0.0; MAX_ROWS])?;
        let scratch = gpu.filled(scratch_bytes(props, 2 * MAX_ROWS), 0)?;
        let own = gpu.filled(FusedLayerWorkspace::bytes(HIDDEN, FFN), 0)?;
        let rest = [
            ActivationFormat::F16.bytes(MAX_ROWS, HIDDEN),
            4 * MAX_ROWS * HIDDEN,
            fused_layer::square_sum_bytes(MAX_ROWS, HIDDEN),
            fused_layer::square_sum_bytes(MAX_ROWS, HIDDEN),
        ];
        let rest = rest.iter().map(|&bytes| gpu.filled(bytes, 0));
        let rest: Vec<Buffer<u8>> = rest.collect::<Result<_, _>>()?;
        let next = ActivationBuffers {
            f16: rest[0].ptr(),
            f32: rest[1].ptr(),
        };
        let memory = FusedLayerBuffers {
            residual: x.ptr(),
            workspace: FusedLayerWorkspace::at(own.ptr(), HIDDEN),
            next,
            squares: [rest[2].ptr(), rest[3].ptr()],
            scales: scales.ptr(),
            scratch: GemmScratch(scratch.ptr()),
            exchange: [0; 2],
        };
        let norm: Vec<f32> = (0..HIDDEN).map(|_| 0.5 + random.unit()).collect();
        Ok(LayerBuffers {
            props,
            headers: gpu.upload(&headers)?,
            first,
            x,
            mixed,
            halves: gpu.filled(ActivationFormat::F16.bytes(MAX_ROWS, INNER), 0)?,
            scales,
            norm: gpu.upload(&norm)?,
            scratch,
            own,
            memory,
            _rest: rest,
        })
    }

    /// Restores the initial rows.
    fn begin(&mut self, gpu: &Gpu) -> Result<()> {
        let rows = &self.first;
        let scale = |x: &[f32]| {
            let squares: f32 = x.iter().map(|x| x * x).sum();
            1.0 / (squares / HIDDEN as f32 + EPS).sqrt()
        };
        let scales: Vec<f32> = rows.chunks_exact(HIDDEN).map(scale).collect();
        self.x.upload(gpu, rows)?;
        self.scales.upload(gpu, &scales)?;
        Ok(())
    }

    fn launches(
        &self,
        bucket: usize,
        form: FusedLayerConfig,
        layers: &[LayerMatrices],
        extra: &Defines,
    ) -> Vec<Launch> {
        let norms = FusedLayerNorms {
            ffn: self.norm.ptr(),
            next: self.norm.ptr(),
            eps: EPS,
        };
        let source = RowSource::Step(self.headers.ptr_at(bucket * HEADER));
        let halves = ActivationBuffers {
            f16: self.halves.ptr(),
            ..ActivationBuffers::default()
        };
        let launches = layers.iter().flat_map(|layer| {
            let [out, gate, up, down] = layer.own;
            let products = FusedLayerMatrices {
                out,
                gate,
                up,
                down,
                next: &layer.next,
            };
            let layer = FusedLayer {
                bucket,
                matrices: &products,
                norms,
                buffers: &self.memory,
                mixed: self.halves.ptr(),
            };
            let mut fused = fused_layer::launches(self.props, form, &layer);
            for launch in &mut fused {
                for (name, value) in extra {
                    launch.unit = launch.unit.clone().define(name, value);
                }
            }
            fused.insert(0, convert(INNER, bucket, source, self.mixed.ptr(), halves));
            fused
        });
        launches.collect()
    }
}

/// Times the fused layers.
///
/// # Errors
/// Device errors.
pub fn run(bench: &mut Bench) -> Result<()> {
    if bench.gpu.arch().number != 90 {
        return Ok(());
    }
    let mut random = Random(1);
    let mut room = LayerBuffers::new(&bench.gpu, &mut random)?;
    let outs = [2 * INNER, INNER, 1024, 48].map(|n| bench.gpu.alloc::<f32>(MAX_ROWS * n));
    let outs: Vec<Buffer<f32>> = outs.into_iter().collect::<Result<_, _>>()?;
    let (layers, work) = {
        let mut store = Store {
            gpu: &bench.gpu,
            random,
            patterns: Vec::new(),
            memory: Vec::new(),
            bytes: 0.0,
            params: 0.0,
        };
        let layers = layers(&mut store, &outs)?;
        (layers, (store.bytes, store.params, store.memory))
    };
    let kinds = [
        WeightKind::Q4K,
        WeightKind::Q5K,
        WeightKind::Q6K,
        WeightKind::F32,
    ];
    let Some(form) = FusedLayerConfig::new(room.props, MAX_ROWS, &kinds) else {
        return Ok(());
    };
    let buckets = match bench.rows.as_slice() {
        [] => BUCKETS.to_vec(),
        rows => rows.to_vec(),
    };
    ensure!(
        buckets.iter().all(|rows| (1..=MAX_ROWS).contains(rows)),
        "chains are for 1 to {MAX_ROWS} rows, not {buckets:?}"
    );
    // The shipped form first.
    let mut forms = vec![Defines::new()];
    forms.extend_from_slice(&bench.forms);
    let name_of = |form: &Defines| -> String {
        let define = |(name, value): &(&str, String)| format!(", {name}={value}");
        form.iter().map(define).collect()
    };
    let names: Vec<String> = forms.iter().map(name_of).collect();
    let of = |variant, bucket| room.launches(bucket, form, &layers, variant);
    let cases: Vec<(usize, Vec<Vec<Launch>>)> = buckets
        .iter()
        .map(|&bucket| (bucket, forms.iter().map(|f| of(f, bucket)).collect()))
        .collect();
    let lists = || cases.iter().flat_map(|(_, forms)| forms);
    let mut units: Vec<_> = lists()
        .flat_map(|l| l[..2].iter().map(|l| l.unit.clone()))
        .collect();
    units.push(clocks::unit());
    let modules = bench.modules(&units)?;
    let mut most: Vec<f32> = Vec::new();
    for (bucket, forms) in cases.iter().rev() {
        for (name, list) in names.iter().zip(forms) {
            // Four layers from the initial rows.
            room.begin(&bench.gpu)?;
            for launch in &list[..8] {
                bench.gpu.run(&modules, launch)?;
            }
            let x = room.x.download_range(&bench.gpu, 0..bucket * HIDDEN)?;
            ensure!(
                x.iter().all(|x| x.is_finite()),
                "n={bucket}{name}: not finite"
            );
            if most.len() < x.len() {
                let same = same_bits(&x, &most);
                ensure!(same, "n={bucket}{name}: other bits than among fewer rows");
                most = x;
            } else {
                let same = same_bits(&x, &most);
                ensure!(same, "n={bucket}{name}: other bits than among more rows");
            }
        }
    }
    writeln!(
        std::io::stdout(),
        "bits of row 0 after four layers: {:016x}",
        hash(&most[..HIDDEN])
    )?;
    let meter = Meter::open(bench.gpu.info());
    for (bucket, forms) in &cases {
        room.begin(&bench.gpu)?;
        let steps = forms.iter().map(|l| Steps::new(bench, &modules, l));
        let mut steps: Vec<Steps> = steps.collect::<Result<_>>()?;
        for turn in 0..TURNS {
            // Forward and backward order, so that every form runs at the same temperature.
            for i in 0..steps.len() {
                let form = if turn % 2 == 0 {
                    i
                } else {
                    steps.len() - 1 - i
                };
                room.begin(&bench.gpu)?;
                steps[form].turn(bench, meter.as_ref())?;
            }
        }
        for (name, steps) in names.iter().zip(steps) {
            let work = Work {
                bytes: work.0,
                flops: 2.0 * work.1 * *bucket as f64,
            };
            steps.report(bench, "chain", &format!("layers n={bucket}{name}"), work)?;
        }
    }
    for left in [&room.scratch, &room.own] {
        let left = left.download(&bench.gpu)?;
        ensure!(
            left[FusedLayerWorkspace::bytes(0, 0)..]
                .iter()
                .all(|&b| b == 0),
            "a chain left something behind"
        );
    }
    Ok(())
}

/// Whether the common values are bit-identical.
fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// FNV-1a of the bits, to compare builds.
fn hash(values: &[f32]) -> u64 {
    let step = |h: u64, v: &f32| (h ^ u64::from(v.to_bits())).wrapping_mul(0x0000_0100_0000_01b3);
    values.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
