//! Prefill kernels at the shapes of a 27B model: the parts of a 2048-token chunk.

use anyhow::Result;
use contract::{KvFormat, RopeSpec};
use cuda::GpuProps;
use cuda::driver::Buffer;
use cuda::launch::attention::{self, Cache, Mask, PAGE, Shape};
use cuda::launch::gemm::panels::{ChunkRows, Panels, PrefillActivations};
use cuda::launch::gemm::prefill::{self as gemm, DequantScratch, PrefillGemmInputs};
use cuda::launch::gemm::small_batch::{GemmEpilogue, GemmMatrix};
use cuda::launch::norm::RmsShape;
use cuda::launch::norm::panels::{self, F32Rows};
use cuda::launch::{CompileUnit, Launch};
use cuda::pack::WeightKind;
use cuda::select::{prefill_attention, prefill_gemm};

use super::{Bench, Work};

const ROWS: usize = 2048;
const HIDDEN: usize = 5120;
const FFN: usize = 17_408;
/// A byte that is finite in every scale and weight format.
const FILL: u8 = 0x2c;

/// Times the kernels.
///
/// # Errors
/// Device errors.
pub fn run(bench: &mut Bench) -> Result<()> {
    forms(bench)?;
    products(bench)?;
    attention(bench)
}

fn header(bench: &Bench, rows: usize, committed: usize) -> Result<Buffer<i32>> {
    let mut words = vec![0_i32; 68 + rows];
    words[0] = i32::try_from(rows)?;
    words[2] = i32::try_from(committed)?;
    Ok(bench.gpu.upload(&words)?)
}

fn units(launches: &[Launch]) -> Vec<CompileUnit> {
    let mut units: Vec<CompileUnit> = launches.iter().map(|launch| launch.unit.clone()).collect();
    units.sort();
    units.dedup();
    units
}

/// Times a group of launches.
fn time(bench: &mut Bench, case: &str, launches: &[Launch], work: Work) -> Result<()> {
    let modules = bench.modules(&units(launches))?;
    let all: Vec<&Launch> = launches.iter().collect();
    bench.sequence("prefill", case, &modules, &all, work)?;
    Ok(())
}

/// Noise rows, so that GEMMs draw realistic power.
fn noise(bench: &Bench, values: usize) -> Result<Buffer<f32>> {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let host: Vec<f32> = (0..values)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Ok(bench.gpu.upload(&host)?)
}

fn chunk(header: &Buffer<i32>) -> ChunkRows {
    ChunkRows {
        header: header.ptr(),
        rows: ROWS,
    }
}

/// Packed noise with small f16 scales: random bytes below 0x2d.
fn weights(bench: &Bench, bytes: usize) -> Result<Buffer<u8>> {
    let mut x = 0x2545_f491_4f6c_dd1d_u64;
    let host: Vec<u8> = (0..bytes)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as u8 % (FILL + 1)
        })
        .collect();
    Ok(bench.gpu.upload(&host)?)
}

fn forms(bench: &mut Bench) -> Result<()> {
    let header = header(bench, ROWS, 0)?;
    let x = noise(bench, ROWS * HIDDEN)?;
    let weight = noise(bench, HIDDEN)?;
    let panels = bench.gpu.alloc::<u8>(Panels::bytes(ROWS, HIDDEN))?;
    let to = PrefillActivations {
        panels: panels.ptr(),
        f32: 0,
    };
    let rms = RmsShape {
        width: HIDDEN,
        eps: 1e-6,
    };
    let norm = panels::rms_norm(rms, chunk(&header), x.ptr(), weight.ptr(), to);
    let bytes = (ROWS * HIDDEN * 6) as f64;
    time(
        bench,
        "norm to panels 2048 x 5120",
        &[norm],
        Work { bytes, flops: 0.0 },
    )
}

/// Buffers of one GEMM shape.
struct GemmBench {
    props: GpuProps,
    header: Buffer<i32>,
    x: Buffer<f32>,
    panels: Buffer<u8>,
    expanded: Buffer<u8>,
    split_k_flags: Buffer<u8>,
    out: Buffer<f32>,
    cols: usize,
}

impl GemmBench {
    fn new(bench: &mut Bench, cols: usize, n_out: usize) -> Result<GemmBench> {
        let bytes = gemm::dequantized_bytes([n_out], cols);
        let data = GemmBench {
            props: bench.gpu.info().props(),
            header: header(bench, ROWS, 0)?,
            x: noise(bench, ROWS * cols)?,
            panels: bench.gpu.alloc(Panels::bytes(ROWS, cols))?,
            expanded: bench.gpu.alloc(bytes)?,
            split_k_flags: bench.gpu.filled(gemm::split_k_flag_bytes(ROWS, bytes), 0)?,
            out: bench.gpu.filled(ROWS * n_out, 0)?,
            cols,
        };
        let to = PrefillActivations {
            panels: data.panels.ptr(),
            f32: 0,
        };
        let x = F32Rows {
            at: data.x.ptr(),
            width: cols,
        };
        let convert = panels::convert(chunk(&data.header), x, to);
        let modules = bench.modules(std::slice::from_ref(&convert.unit))?;
        bench.gpu.run(&modules, &convert)?;
        bench.gpu.sync()?;
        Ok(data)
    }

    fn scratch(&self) -> DequantScratch {
        DequantScratch {
            weights: self.expanded.ptr(),
            weight_bytes: self.expanded.bytes(),
            split_k_flags: self.split_k_flags.ptr(),
        }
    }
}

fn work(n_out: usize, cols: usize) -> Work {
    Work {
        bytes: 0.0,
        flops: 2.0 * (ROWS * n_out * cols) as f64,
    }
}

/// Name, columns, rows and kind of each matrix, and the epilogue.
type Product = (
    &'static str,
    usize,
    &'static [(usize, WeightKind)],
    GemmEpilogue,
);

fn products(bench: &mut Bench) -> Result<()> {
    let cases: [Product; 6] = [
        (
            "qkv|z|beta|alpha of a delta layer",
            HIDDEN,
            &[
                (10_240, WeightKind::Q5K),
                (6144, WeightKind::Q4K),
                (48, WeightKind::F32),
                (48, WeightKind::F32),
            ],
            GemmEpilogue::Store,
        ),
        (
            "out of a delta layer",
            6144,
            &[(HIDDEN, WeightKind::Q4K)],
            GemmEpilogue::Add,
        ),
        (
            "q|k|v of an attention layer",
            HIDDEN,
            &[
                (12_288, WeightKind::Q4K),
                (1024, WeightKind::Q4K),
                (1024, WeightKind::Q6K),
            ],
            GemmEpilogue::Store,
        ),
        ("down", FFN, &[(HIDDEN, WeightKind::Q4K)], GemmEpilogue::Add),
        ("down", FFN, &[(HIDDEN, WeightKind::Q6K)], GemmEpilogue::Add),
        ("down", FFN, &[(HIDDEN, WeightKind::F16)], GemmEpilogue::Add),
    ];
    for (name, cols, matrices, write) in cases {
        let n_out: usize = matrices.iter().map(|m| m.0).sum();
        let data = GemmBench::new(bench, cols, n_out)?;
        let packed: Vec<Buffer<u8>> = matrices
            .iter()
            .map(|&(rows, kind)| weights(bench, kind.bytes(rows, cols)))
            .collect::<Result<_>>()?;
        let segments: Vec<GemmMatrix> = matrices
            .iter()
            .zip(&packed)
            .map(|(&(rows, kind), weight)| GemmMatrix {
                kind,
                rows,
                weight: weight.ptr(),
                out: data.out.ptr(),
                stride: n_out,
                write,
            })
            .collect();
        let inputs = PrefillGemmInputs {
            panels: data.panels.ptr(),
            f32: data.x.ptr(),
        };
        let launches = gemm::gemm(
            prefill_gemm(data.props).kernel,
            chunk(&data.header),
            cols,
            &segments,
            inputs,
            data.scratch(),
        );
        parts(
            bench,
            &format!("{name}, {:?}", matrices[0].1),
            &launches,
            work(n_out, cols),
        )?;
    }
    let data = GemmBench::new(bench, HIDDEN, 2 * FFN)?;
    let packed = weights(bench, WeightKind::Q4K.bytes(FFN, HIDDEN))?;
    let pair = gemm::SwiGluMatrices {
        cols: data.cols,
        ffn: FFN,
        gate: (WeightKind::Q4K, packed.ptr()),
        up: (WeightKind::Q4K, packed.ptr()),
    };
    let launches = gemm::gemm_swiglu(
        prefill_gemm(data.props).kernel,
        chunk(&data.header),
        pair,
        data.panels.ptr(),
        data.scratch(),
        data.out.ptr(),
    );
    parts(
        bench,
        "gate and up, gated, Q4K",
        &launches,
        work(2 * FFN, HIDDEN),
    )
}

/// Times the whole, then each launch alone.
fn parts(bench: &mut Bench, name: &str, launches: &[Launch], work: Work) -> Result<()> {
    time(bench, name, launches, work)?;
    for launch in launches {
        let alone = match launch.entry {
            "prefill_gemm" | "prefill_gemm_swiglu" => work,
            _ => Work::default(),
        };
        time(
            bench,
            &format!("  {}", launch.entry),
            std::slice::from_ref(launch),
            alone,
        )?;
    }
    Ok(())
}

fn attention(bench: &mut Bench) -> Result<()> {
    let props = bench.gpu.info().props();
    for format in [KvFormat::F16, KvFormat::Q8_0, KvFormat::Q4_0] {
        for committed in [0, 6144, 129_024] {
            let shape = Shape {
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
                mask: Mask::Causal,
                ring_pages: 0,
            };
            let pages = (committed + ROWS).div_ceil(PAGE);
            let table: Vec<i32> = (0..i32::try_from(pages)?).collect();
            let table = bench.gpu.upload(&table)?;
            let values = weights(bench, pages * PAGE * shape.n_kv_heads * shape.head_dim * 2)?;
            let header = header(bench, ROWS, committed)?;
            let q = noise(bench, ROWS * shape.n_heads * shape.q_stride())?;
            let width = shape.n_heads * shape.head_dim;
            let panels = bench.gpu.alloc::<u8>(Panels::bytes(ROWS, width))?;
            let cache = Cache {
                k: values.ptr(),
                k_scale: values.ptr(),
                v: values.ptr(),
                v_scale: values.ptr(),
                page_table: table.ptr(),
                max_pages: pages,
            };
            let to = PrefillActivations {
                panels: panels.ptr(),
                f32: 0,
            };
            let launch = attention::prefill(
                prefill_attention(&shape, props).kernel,
                &shape,
                chunk(&header),
                q.ptr(),
                cache,
                to,
            );
            let keys = ROWS * committed + ROWS * (ROWS + 1) / 2;
            let flops = 4.0 * (keys * width) as f64;
            let name = format!("attention of 2048 rows at {committed}, {}", format.name());
            time(bench, &name, &[launch], Work { bytes: 0.0, flops })?;
        }
    }
    Ok(())
}
