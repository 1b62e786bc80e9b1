//! What the tests of prefill's products share: every kernel of them compiled, matrices and rows on the card.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use std::ops::Deref;

use contract::QuantType;
use contract::quant::{dequantize_row, quantize_row};
use cuda::compile::Modules;
use cuda::driver::Buffer;
use cuda::launch::matmul::{Segment, Write};
use cuda::launch::prefill::product::{self, Inputs, Scratch};
use cuda::launch::prefill::{Card, Out, Panels, rows};
use cuda::launch::{Launch, Unit};
use cuda::pack::{WeightKind, pack};
use half::f16;

use crate::card::{self, Random, poisoned};
use crate::step_world::{Device, chunk};

/// The card as prefill sees it, and as a card without warpgroup products would.
pub fn cards(gpu: &Device) -> Vec<Card> {
    let card = |warpgroups| Card {
        multiprocessors: gpu.multiprocessors() as usize,
        warpgroups,
    };
    match gpu.arch().to_string() == "sm_90a" {
        true => vec![card(true), card(false)],
        false => vec![card(false)],
    }
}

/// A card with every kernel of these products compiled, and [`rows`] of some widths.
pub struct PrefillFixture {
    pub gpu: Device,
    pub modules: Modules,
}

impl PrefillFixture {
    pub fn open(widths: &[usize]) -> Option<PrefillFixture> {
        let gpu = Device::open()?;
        let mut units: Vec<Unit> = widths
            .iter()
            .map(|width| Unit::new("prefill/rows.cu").define("WIDTH", width))
            .collect();
        let kinds = WeightKind::ALL
            .into_iter()
            .filter(|&kind| kind != WeightKind::F32);
        units.extend(
            kinds.map(|kind| Unit::new("prefill/dequant.cu").define("WEIGHT_KIND", kind as u32)),
        );
        let file = |card: &Card| match card.warpgroups {
            true => "prefill/gemm_sm90.cu",
            false => "prefill/gemm.cu",
        };
        for file in cards(&gpu).iter().map(file) {
            units.extend([0, 1].map(|gated| Unit::new(file).define("SWIGLU", gated)));
        }
        units.push(Unit::new("prefill/sgemm.cu"));
        let modules = card::modules(&gpu, &units);
        Some(PrefillFixture { gpu, modules })
    }

    /// Runs them in order, and waits.
    pub fn launch(&self, launches: &[Launch]) {
        for launch in launches {
            self.gpu.run(&self.modules, launch).unwrap();
        }
        self.gpu.sync().unwrap();
    }
}

impl Deref for PrefillFixture {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.gpu
    }
}

/// Tokens of a chunk do not matter here.
pub fn header(gpu: &Device, rows: usize) -> Buffer<i32> {
    gpu.upload(&chunk(0, 0, &vec![0; rows], &[])).unwrap()
}

/// f32 rows from panels.
pub fn from_panels(panels: &[u16], cap: usize, rows: usize, width: usize) -> Vec<f32> {
    let at =
        |row: usize, k: usize| (k / 64 * cap + row) * 64 + ((k % 64 / 8) ^ (row % 8)) * 8 + k % 8;
    (0..rows * width)
        .map(|i| f16::from_bits(panels[at(i / width, i % width)]).to_f32())
        .collect()
}

/// A matrix on the card, and its values.
pub struct Matrix {
    pub kind: WeightKind,
    pub rows: usize,
    pub weight: Buffer<u8>,
    pub values: Vec<f32>,
}

impl Matrix {
    pub fn random(
        gpu: &Device,
        random: &mut Random,
        ty: QuantType,
        rows: usize,
        cols: usize,
    ) -> Matrix {
        let scale = 1.0 / (cols as f32).sqrt();
        // A few hundred different rows are as good as all, and quick to make.
        let made = rows.min(160);
        let mut bytes = vec![0; ty.row_bytes(cols) * rows];
        let mut values = vec![0.0; rows * cols];
        for row in 0..rows {
            let own = row * ty.row_bytes(cols)..(row + 1) * ty.row_bytes(cols);
            if row < made {
                quantize_row(ty, &random.normals(cols, scale), &mut bytes[own.clone()]);
                dequantize_row(ty, &bytes[own], &mut values[row * cols..][..cols]);
            } else {
                let like = random.below(made);
                bytes.copy_within(
                    like * ty.row_bytes(cols)..(like + 1) * ty.row_bytes(cols),
                    own.start,
                );
                values.copy_within(like * cols..(like + 1) * cols, row * cols);
            }
        }
        let kind = WeightKind::of(ty);
        let mut packed = vec![0; kind.bytes(rows, cols)];
        pack(ty, cols, &bytes, &mut packed);
        Matrix {
            kind,
            rows,
            weight: gpu.upload(&packed).unwrap(),
            values,
        }
    }
}

/// Rows in the forms that products read.
pub struct Rows {
    pub panels: Buffer<u16>,
    pub f32: Buffer<f32>,
}

impl Rows {
    pub fn inputs(&self) -> Inputs {
        Inputs {
            panels: self.panels.ptr(),
            f32: self.f32.ptr(),
        }
    }
}

/// `x` on the card; what is beyond it is NaN.
pub fn rows_of(
    gpu: &PrefillFixture,
    x: &[f32],
    n: usize,
    cap: usize,
    header: &Buffer<i32>,
) -> Rows {
    let width = x.len() / n;
    let mut plain = poisoned::<f32>(gpu, cap * width);
    plain.upload(gpu, x).unwrap();
    let made = Rows {
        panels: poisoned(gpu, Panels::bytes(cap, width) / 2),
        f32: plain,
    };
    let out = Out {
        panels: made.panels.ptr(),
        f32: 0,
    };
    gpu.launch(&[rows::convert(
        width,
        width,
        cap,
        header.ptr(),
        made.f32.ptr(),
        out,
    )]);
    made
}

/// Scratch of a size in bytes, and its turns.
pub struct ZeroedScratch {
    pub weights: Buffer<u8>,
    pub turns: Buffer<u8>,
}

impl ZeroedScratch {
    pub fn new(gpu: &Device, bytes: usize, rows: usize) -> ZeroedScratch {
        ZeroedScratch {
            weights: poisoned(gpu, bytes),
            turns: gpu.filled(product::turn_bytes(rows, bytes), 0).unwrap(),
        }
    }

    pub fn scratch(&self) -> Scratch {
        Scratch {
            weights: self.weights.ptr(),
            weight_bytes: self.weights.bytes(),
            turns: self.turns.ptr(),
        }
    }

    pub fn is_left_zero(&self, gpu: &Device) {
        assert!(
            self.turns
                .download(gpu)
                .unwrap()
                .iter()
                .all(|&byte| byte == 0)
        );
    }
}

/// A matrix of a launch.
pub fn segment(matrix: &Matrix, out: &Buffer<f32>, stride: usize, write: Write) -> Segment {
    Segment {
        kind: matrix.kind,
        rows: matrix.rows,
        weight: matrix.weight.ptr(),
        out: out.ptr(),
        stride,
        write,
    }
}
