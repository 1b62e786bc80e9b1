//! The formats whose values are a small whole number times a scale of 16 values or more.
//!
//! Devices repack these formats from [`signed_run`], so that the layout of each block is read in
//! one place. The values are exactly those of [`super::dequantize_row`].

use super::quant_type::QuantType;
use super::signed_run::{SignedRun, SixBits};
use super::{fp4, iq1, iq2, iq3, iq4, q23_k, ternary};

/// The reader of a format's runs: the block's bytes and the number of the run.
type ReadRun = fn(&[u8], usize) -> SignedRun;

fn reader(ty: QuantType) -> Option<ReadRun> {
    Some(match ty {
        QuantType::IQ2_XXS => iq2::run_xxs,
        QuantType::IQ2_XS => iq2::run_xs,
        QuantType::IQ2_S => iq2::run_s,
        QuantType::IQ3_XXS => iq3::run_xxs,
        QuantType::IQ3_S => iq3::run_s,
        QuantType::IQ1_S => iq1::run_s,
        QuantType::IQ1_M => iq1::run_m,
        QuantType::IQ4_XS => iq4::run_xs,
        QuantType::TQ1_0 => ternary::run_tq1,
        QuantType::TQ2_0 => ternary::run_tq2,
        QuantType::MXFP4 => fp4::run_mx,
        QuantType::NVFP4 => fp4::run_nv,
        _ => return None,
    })
}

/// Run `run` of 32 values of a block, or `None` for a format of another form.
///
/// # Panics
/// When the block is shorter than the format's or has no such run.
pub fn signed_run(ty: QuantType, block: &[u8], run: usize) -> Option<SignedRun> {
    reader(ty).map(|read| read(block, run))
}

/// Whole rows of a format that [`signed_run`] reads.
pub(super) fn dequantize(ty: QuantType, bytes: &[u8], out: &mut [f32]) {
    let read = reader(ty).expect("only formats of signed runs come here");
    let blocks = bytes.chunks_exact(ty.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(ty.block_values())) {
        for (index, out) in out.chunks_exact_mut(32).enumerate() {
            let run = read(block, index);
            let scales = run.scales();
            for (i, (v, code)) in out.iter_mut().zip(run.codes).enumerate() {
                *v = scales[i / 16] * f32::from(code);
            }
        }
    }
}

/// A block in Q6_K's terms: of Q3_K, IQ3_XXS, IQ3_S, IQ1_S or IQ1_M; `None` for other formats.
///
/// # Panics
/// When the block is shorter than the format's.
pub fn six_bits(ty: QuantType, block: &[u8]) -> Option<SixBits> {
    match ty {
        QuantType::Q3_K => Some(q23_k::six_bits_q3_k(block)),
        QuantType::IQ3_XXS | QuantType::IQ3_S | QuantType::IQ1_S | QuantType::IQ1_M => {
            let read = reader(ty)?;
            let mut six = SixBits {
                codes: [0; 256],
                scales: [0; 16],
                d: 0.0,
            };
            let halves = six.scales.as_chunks_mut::<2>().0;
            let codes = six.codes.as_chunks_mut::<32>().0;
            for (index, (scales, codes)) in halves.iter_mut().zip(codes).enumerate() {
                let run = read(block, index);
                six.d = run.unit;
                *scales = run.factors.map(|factor| factor as i8);
                *codes = run.codes.map(|code| (code + 32).cast_unsigned());
            }
            Some(six)
        }
        _ => None,
    }
}
