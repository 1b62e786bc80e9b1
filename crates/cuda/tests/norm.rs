//! Norms and gated units match the reference.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "these are tests")]

mod fixtures {
    pub mod gpu;
    pub mod step;
}

use std::time::{Duration, Instant};

use contract::GateActivation;
use cpu::reference::{activation, norm};
use cuda::driver::Buffer;
use cuda::launch::Launch;
use cuda::launch::all_reduce::{self, ExchangeShape};
use cuda::launch::ffn::{self, GateUp};
use cuda::launch::norm::{
    ActivationBuffers, Residual, RmsShape, RowSource, add_normed, convert, rms_norm,
};
use fixtures::gpu::{Random, close, modules, poisoned, ran_in_own_process, same_bits};
use fixtures::step::{KernelDevice, Placed, chain, chunk, star, step};

const EPS: f32 = 1e-6;

/// Reference rows: `x += update`, then the norm.
fn expected(x: &[f32], update: &[f32], weight: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let sum: Vec<f32> = x.iter().zip(update).map(|(a, b)| a + b).collect();
    let mut y = vec![0.0; x.len()];
    let width = weight.len();
    for (x, y) in sum.chunks(width).zip(y.chunks_mut(width)) {
        norm::rms(x, weight, EPS, y);
    }
    (sum, y)
}

#[test]
fn rms_norm_matches_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(1);
    for (width, nodes) in [
        (5120, 24),
        (5120, 1),
        (256, 5),
        (384, 64),
        (1024, 8),
        (17408, 3),
        (263, 2),
    ] {
        let bucket = nodes + 3;
        let head = [Placed {
            slot: 0,
            committed: 7,
            tree: star(nodes),
        }];
        let header = gpu.upload(&step(&head, &[])).unwrap();
        let scale = if nodes == 5 { 1e4 } else { 1.0 };
        let x = random.normals(nodes * width, scale);
        let update = random.normals(nodes * width, 0.5);
        let weight = random.between(width, 0.5, 1.5);
        let (sum, y) = expected(&x, &update, &weight);
        let mut rows = poisoned::<f32>(&gpu, bucket * width);
        rows.upload(&gpu, &x).unwrap();
        let update = gpu.upload(&update).unwrap();
        let weight = gpu.upload(&weight).unwrap();
        let out = poisoned::<f32>(&gpu, bucket * width);
        let shape = RmsShape { width, eps: EPS };
        let residual = Residual {
            rows: rows.ptr(),
            update: update.ptr(),
        };
        let source = RowSource::Step(header.ptr());
        gpu.launch(&[rms_norm(
            shape,
            bucket,
            source,
            residual,
            weight.ptr(),
            ActivationBuffers::f32(out.ptr()),
        )]);
        let found = out.download(&gpu).unwrap();
        close("rms", &found[..nodes * width], &y, 2e-6);
        same_bits(
            "x + update",
            &rows.download(&gpu).unwrap()[..nodes * width],
            &sum,
        );
        assert!(
            found[nodes * width..]
                .iter()
                .all(|v| v.to_bits() == u32::MAX),
            "padding was written"
        );
    }
}

/// What the kernel sums: `rows` rows of two shards.
const SUMS: ExchangeShape = ExchangeShape {
    devices: 2,
    width: 640,
    rows: 64,
};

/// How long a shard waits for the other.
const WATCHDOG: Duration = Duration::from_millis(500);

/// One shard of an all-reduce: its residual stream, its partial sums and its exchange.
struct Shard<'a> {
    gpu: &'a KernelDevice,
    x: Buffer<f32>,
    partial: Buffer<f32>,
    exchange: Buffer<u8>,
    header: Buffer<i32>,
}

impl Shard<'_> {
    /// Shards that know each other, with `x` as the residual stream of both.
    fn pair<'a>(gpus: [&'a KernelDevice; 2], x: &[f32]) -> [Shard<'a>; 2] {
        let values = SUMS.rows * SUMS.width;
        let mut shards = gpus.map(|gpu| {
            gpu.make_current().unwrap();
            let mut shard = Shard {
                gpu,
                x: poisoned(gpu, values),
                partial: poisoned(gpu, values),
                exchange: poisoned(gpu, SUMS.bytes()),
                header: gpu.upload(&step(&[], &[])).unwrap(),
            };
            let zeros = vec![0; SUMS.zeroed_bytes()];
            shard.exchange.upload_at(gpu, 0, &zeros).unwrap();
            shard.x.upload(gpu, x).unwrap();
            shard
        });
        let exchanges = [shards[0].exchange.ptr(), shards[1].exchange.ptr()];
        for (rank, shard) in shards.iter_mut().enumerate() {
            shard.gpu.make_current().unwrap();
            let table = SUMS.table(rank, &exchanges, WATCHDOG);
            shard.exchange.upload_at(shard.gpu, 0, &table).unwrap();
        }
        shards
    }

    /// Uploads `rows` rows of partial sums.
    fn upload(&mut self, partial: &[f32], rows: usize) {
        self.gpu.make_current().unwrap();
        let head = [Placed {
            slot: 0,
            committed: 0,
            tree: star(rows),
        }];
        self.partial.upload(self.gpu, partial).unwrap();
        self.header.upload(self.gpu, &step(&head, &[])).unwrap();
    }

    fn launch(&self, rows: usize) -> Launch {
        let to = Residual {
            rows: self.x.ptr(),
            update: self.partial.ptr(),
        };
        let source = RowSource::Step(self.header.ptr());
        all_reduce::add(SUMS, rows, source, to, self.exchange.ptr())
    }

    fn check(&self, x: &[f32]) {
        self.gpu.make_current().unwrap();
        same_bits("x", &self.x.download(self.gpu).unwrap(), x);
    }
}

/// `x` with the partial sums of both shards.
fn add_both(x: &mut [f32], parts: &[Vec<f32>; 2]) {
    for (x, (a, b)) in x.iter_mut().zip(parts[0].iter().zip(&parts[1])) {
        *x += a + b;
    }
}

/// On one GPU a launch that waits for another may keep it from starting. So the second shard's rows
/// and flags are there before the first shard runs, and the first shard's before the second does.
#[test]
fn all_reduce_adds_the_sums_of_both_shards() {
    let (Some(gpu), Some(again)) = (KernelDevice::open(), KernelDevice::open()) else {
        return;
    };
    let mut random = Random::new(11);
    let mut x = random.normals(SUMS.rows * SUMS.width, 1.0);
    let mut shards = Shard::pair([&gpu, &again], &x);
    let at = |word: usize| {
        let exchanges = [shards[0].exchange.ptr(), shards[1].exchange.ptr()];
        let table = SUMS.table(0, &exchanges, WATCHDOG);
        let word = u64::from_le_bytes(table[8 * word..][..8].try_into().unwrap());
        (word - exchanges[0]) as usize
    };
    // Pointers of device 0 to its flags and rows; 8 devices, 256 flags of each.
    let (flags, received) = (at(1), at(9));
    for (epoch, rows) in [64, 1, 24, 1, 1, 64, 3].into_iter().enumerate() {
        let epoch = epoch as u32 + 1;
        let parts = [0, 1].map(|_| random.normals(rows * SUMS.width, 1.0));
        for (shard, part) in shards.iter_mut().zip(&parts) {
            shard.upload(part, rows);
        }
        let bytes: Vec<u8> = parts[1].iter().flat_map(|v| v.to_le_bytes()).collect();
        let side = (epoch % 2) as usize * 4 * SUMS.rows * SUMS.width;
        let first = &mut shards[0].exchange;
        first.upload_at(&gpu, received + side, &bytes).unwrap();
        let set: Vec<u8> = (0..256).flat_map(|_| epoch.to_le_bytes()).collect();
        first.upload_at(&gpu, flags + 4 * 256, &set).unwrap();
        for shard in &shards {
            shard.gpu.launch(&[shard.launch(rows)]);
        }
        add_both(&mut x, &parts);
        shards.iter().for_each(|shard| shard.check(&x));
        // The second shard wrote the same rows again.
        let again = shards[0].exchange.download(&gpu).unwrap();
        assert_eq!(again[received + side..][..bytes.len()], bytes);
    }
}

#[test]
fn all_reduce_adds_on_two_gpus_in_the_order_of_the_shards() {
    let (Some(one), Some(other)) = (KernelDevice::open(), KernelDevice::open_second()) else {
        return;
    };
    let [first, second] = [&one, &other].map(|gpu| gpu.copy_engine());
    assert!(first.enable_peer_access(&second).unwrap());
    assert!(second.enable_peer_access(&first).unwrap());
    let mut random = Random::new(12);
    let mut x = random.normals(SUMS.rows * SUMS.width, 1.0);
    let mut shards = Shard::pair([&one, &other], &x);
    let units = [shards[0].launch(SUMS.rows).unit];
    let ready = [&one, &other].map(|gpu| {
        gpu.make_current().unwrap();
        modules(gpu, &units)
    });
    // Launches of many blocks and of few follow each other.
    for rows in [64, 1, 24, 1, 1, 64, 3] {
        let parts = [0, 1].map(|_| random.normals(rows * SUMS.width, 1.0));
        for (shard, part) in shards.iter_mut().zip(&parts) {
            shard.upload(part, rows);
        }
        for (shard, modules) in shards.iter().zip(&ready) {
            shard.gpu.make_current().unwrap();
            shard.gpu.run(modules, &shard.launch(rows)).unwrap();
        }
        add_both(&mut x, &parts);
        shards.iter().for_each(|shard| shard.check(&x));
    }
}

/// The other shard never arrives: its GPU's launch ends, the host gets an error, and the process
/// goes on.
#[test]
fn all_reduce_without_the_other_shard_ends_with_an_error() {
    if ran_in_own_process("all_reduce_without_the_other_shard_ends_with_an_error") {
        return;
    }
    let (Some(gpu), Some(again)) = (KernelDevice::open(), KernelDevice::open()) else {
        return;
    };
    let x = vec![0.0; SUMS.rows * SUMS.width];
    let mut shards = Shard::pair([&gpu, &again], &x);
    shards[0].upload(&x, SUMS.rows);
    let launch = shards[0].launch(SUMS.rows);
    let ready = modules(&gpu, std::slice::from_ref(&launch.unit));
    let begun = Instant::now();
    gpu.run(&ready, &launch).unwrap();
    let error = gpu.sync().unwrap_err();
    let waited = begun.elapsed();
    eprintln!("after {} ms: {error}", waited.as_millis());
    assert!((WATCHDOG..20 * WATCHDOG).contains(&waited), "{waited:?}");
    let text = error.to_string();
    assert!(
        text.contains("device lost") && text.contains("tensor split"),
        "{text}"
    );
}

#[test]
fn every_norm_output_format_equals_its_f32_rows() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(2);
    for (width, rows) in [(5120, 9), (384, 8), (256, 64)] {
        let tokens = vec![0; rows];
        let requested: Vec<usize> = (0..rows).rev().step_by(2).take(64).collect();
        let header = gpu.upload(&chunk(0, 0, &tokens, &requested)).unwrap();
        let x = gpu.upload(&random.normals(rows * width, 1.0)).unwrap();
        let weight = gpu.upload(&random.between(width, 0.5, 1.5)).unwrap();
        let wide = rows.div_ceil(8) * width.div_ceil(256) * 4096;
        for source in [
            RowSource::Chunk(header.ptr()),
            RowSource::LogitsRowsOfChunk(header.ptr()),
        ] {
            let y = poisoned::<f32>(&gpu, rows * width);
            let forms = |y: u64| {
                let buffer = poisoned::<u8>(&gpu, wide);
                let out = ActivationBuffers {
                    f32: y,
                    f16: buffer.ptr(),
                };
                (buffer, out)
            };
            let (direct, out) = forms(y.ptr());
            let shape = RmsShape { width, eps: EPS };
            gpu.launch(&[rms_norm(
                shape,
                rows,
                source,
                Residual::of(x.ptr()),
                weight.ptr(),
                out,
            )]);
            // The output rows are converted again, unchanged.
            let all = gpu
                .upload(&chunk(
                    0,
                    0,
                    &tokens[..requested_rows(source, rows, &requested)],
                    &[],
                ))
                .unwrap();
            let copy = poisoned::<f32>(&gpu, rows * width);
            let (again, out) = forms(copy.ptr());
            gpu.launch(&[convert(
                width,
                rows,
                RowSource::Chunk(all.ptr()),
                y.ptr(),
                out,
            )]);
            assert_eq!(
                direct.download(&gpu).unwrap(),
                again.download(&gpu).unwrap(),
                "{width} x {rows}"
            );
        }
    }
}

fn requested_rows(source: RowSource, rows: usize, requested: &[usize]) -> usize {
    match source {
        RowSource::Chunk(_) | RowSource::Step(_) => rows,
        _ => requested.len(),
    }
}

#[test]
fn gathered_norm_takes_the_requested_rows() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(3);
    let (width, nodes) = (512, 12);
    let requested = [11, 0, 5];
    let head = [Placed {
        slot: 0,
        committed: 7,
        tree: chain(nodes),
    }];
    let header = gpu.upload(&step(&head, &requested)).unwrap();
    let x = random.normals(nodes * width, 1.0);
    let weight = random.between(width, 0.5, 1.5);
    let gathered: Vec<f32> = requested
        .iter()
        .flat_map(|r| x[r * width..][..width].to_vec())
        .collect();
    let (_, y) = expected(&gathered, &vec![0.0; gathered.len()], &weight);
    let (x, weight) = (gpu.upload(&x).unwrap(), gpu.upload(&weight).unwrap());
    let out = poisoned::<f32>(&gpu, nodes * width);
    let shape = RmsShape { width, eps: EPS };
    let source = RowSource::LogitsRowsOfStep(header.ptr());
    gpu.launch(&[rms_norm(
        shape,
        nodes,
        source,
        Residual::of(x.ptr()),
        weight.ptr(),
        ActivationBuffers::f32(out.ptr()),
    )]);
    let found = out.download(&gpu).unwrap();
    close("gathered", &found[..3 * width], &y, 2e-6);
    assert!(found[3 * width..].iter().all(|v| v.is_nan()));
}

#[test]
fn gated_units_match_the_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(4);
    for (width, rows, packed) in [(17408, 24, true), (512, 3, false), (17408, 1, true)] {
        let header = gpu.upload(&chunk(0, 0, &vec![0; rows], &[])).unwrap();
        let mut gate = random.normals(rows * width, 3.0);
        gate[0] = -1e30;
        gate[1] = 90.0;
        let up = random.normals(rows * width, 1.0);
        let [mut silu, mut gelu] = [(); 2].map(|()| vec![0.0; rows * width]);
        activation::swiglu(&gate, &up, &mut silu);
        activation::geglu(&gate, &up, &mut gelu);
        let both: Vec<f32> = (0..rows)
            .flat_map(|r| {
                [&gate, &up]
                    .map(|m| m[r * width..][..width].to_vec())
                    .concat()
            })
            .collect();
        let (a, b, c) = (
            gpu.upload(&both).unwrap(),
            gpu.upload(&gate).unwrap(),
            gpu.upload(&up).unwrap(),
        );
        let (gate, up, stride) = if packed {
            (a.ptr(), a.ptr_at(width), 2 * width)
        } else {
            (b.ptr(), c.ptr(), width)
        };
        let from = GateUp { gate, up, stride };
        let source = RowSource::Chunk(header.ptr());
        for (activation, expected) in [
            (GateActivation::Silu, &silu),
            (GateActivation::GeluTanh, &gelu),
        ] {
            let out = poisoned::<f32>(&gpu, rows * width);
            let to = ActivationBuffers::f32(out.ptr());
            gpu.launch(&[ffn::gated_unit((width, rows), source, from, activation, to)]);
            let found = out.download(&gpu).unwrap();
            close("a gated unit", &found, expected, 1e-6);
        }
    }
}

#[test]
fn norms_behind_a_block_match_the_reference() {
    let Some(gpu) = KernelDevice::open() else {
        return;
    };
    let mut random = Random::new(14);
    for (width, rows) in [(640, 5), (5120, 2), (36, 3)] {
        let header = gpu.upload(&chunk(0, 0, &vec![0; rows], &[])).unwrap();
        let (mut x, update) = (
            random.normals((rows + 1) * width, 1.0),
            random.normals((rows + 1) * width, 3.0),
        );
        let weight = random.between(width, 0.5, 1.5);
        let (to, from, of) = (
            gpu.upload(&x).unwrap(),
            gpu.upload(&update).unwrap(),
            gpu.upload(&weight).unwrap(),
        );
        // The row behind those of the header stays as it is.
        for row in 0..rows {
            let mut normed = vec![0.0; width];
            norm::rms(&update[row * width..][..width], &weight, 1e-6, &mut normed);
            activation::add(&mut x[row * width..][..width], &normed);
        }
        let rms = RmsShape { width, eps: 1e-6 };
        let residual = Residual {
            rows: to.ptr(),
            update: from.ptr(),
        };
        let source = RowSource::Chunk(header.ptr());
        gpu.launch(&[add_normed(rms, rows + 1, source, residual, of.ptr())]);
        close("add_normed", &to.download(&gpu).unwrap(), &x, 2e-6);
    }
}
