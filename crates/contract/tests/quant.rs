//! Codecs against the format's own implementation (`conformance/fixtures/quant`), and properties on
//! any input.

use std::fs;
use std::path::PathBuf;

use contract::QuantType;
use contract::quant::{dequantize_row, quantize_row, quantize_row_weighted};
use contract::quant::{signed_run, six_bits};
use proptest::prelude::*;

fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../conformance/fixtures/quant")
        .join(name);
    fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn header(bytes: &[u8]) -> [usize; 4] {
    let (words, _) = bytes[..16].as_chunks::<4>();
    [0, 1, 2, 3].map(|i| u32::from_le_bytes(words[i]) as usize)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    words.iter().map(|w| f32::from_le_bytes(*w)).collect()
}

fn check_dequantize(ty: QuantType) {
    let file = fixture(&format!("dequantize_{}.bin", ty.name().to_lowercase()));
    let [n_blocks, block_values, block_bytes, id] = header(&file);
    assert_eq!(
        (ty.block_values(), ty.block_bytes(), ty.id() as usize),
        (block_values, block_bytes, id)
    );
    let (blocks, values) = file[16..].split_at(n_blocks * block_bytes);
    let expected = floats(values);
    assert!(n_blocks > 0 && expected.len() == n_blocks * block_values);
    let mut got = vec![0.0; expected.len()];
    dequantize_row(ty, blocks, &mut got);
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        assert_eq!(
            g.to_bits(),
            e.to_bits(),
            "{} value {i}: {g} is not {e}",
            ty.name()
        );
    }
}

fn check_quantize(ty: QuantType) {
    let file = fixture(&format!("quantize_{}.bin", ty.name().to_lowercase()));
    let [n_rows, n_cols, id, row_bytes] = header(&file);
    assert_eq!((ty.id() as usize, ty.row_bytes(n_cols)), (id, row_bytes));
    let (input, expected) = file[16..].split_at(4 * n_rows * n_cols);
    assert!(n_rows > 0 && expected.len() == n_rows * row_bytes);
    let mut got = vec![0; row_bytes];
    for (row, (x, expected)) in floats(input)
        .chunks(n_cols)
        .zip(expected.chunks(row_bytes))
        .enumerate()
    {
        quantize_row(ty, x, &mut got);
        let differs = got.iter().zip(expected).position(|(g, e)| g != e);
        assert_eq!(
            differs,
            None,
            "{} row {row}: first differing byte",
            ty.name()
        );
    }
}

/// One test per type, so that a failure names it.
macro_rules! matches_reference_codec {
    ($($name:ident $ty:ident;)*) => {
        mod dequantize_is_bit_equal {
            use super::*;
            $(#[test] fn $name() { check_dequantize(QuantType::$ty); })*
        }
        mod quantize_is_bit_equal {
            use super::*;
            $(#[test] fn $name() { check_quantize(QuantType::$ty); })*
            #[test] fn f16() { check_quantize(QuantType::F16); }
            #[test] fn bf16() { check_quantize(QuantType::BF16); }
        }
    };
}

matches_reference_codec! {
    q8_0 Q8_0; q4_0 Q4_0; q4_1 Q4_1; q5_0 Q5_0; q5_1 Q5_1; q2_k Q2_K; q3_k Q3_K; q4_k Q4_K;
    q5_k Q5_K; q6_k Q6_K; iq4_nl IQ4_NL; iq4_xs IQ4_XS; tq1_0 TQ1_0; tq2_0 TQ2_0; mxfp4 MXFP4;
    nvfp4 NVFP4;
}

mod dequantize_of_point_sets_is_bit_equal {
    use super::*;

    macro_rules! tests {
        ($($name:ident $ty:ident;)*) => {
            $(#[test] fn $name() { check_dequantize(QuantType::$ty); })*
        };
    }

    tests! {
        iq2_xxs IQ2_XXS; iq2_xs IQ2_XS; iq2_s IQ2_S; iq3_xxs IQ3_XXS; iq3_s IQ3_S; iq1_s IQ1_S;
        iq1_m IQ1_M;
    }
}

/// Every point, sign and scale of the formats, over 512 blocks of a generator that the fixture's
/// writer has as well; the fixture holds a hash of the values' bits.
#[test]
fn every_point_dequantizes_bit_equal() {
    let text = String::from_utf8(fixture("dequantize_hashes.txt")).unwrap();
    let mut types = 0;
    for line in text.lines() {
        let (name, expected) = line.split_once(' ').unwrap();
        let ty = QuantType::ALL
            .into_iter()
            .find(|ty| ty.name().eq_ignore_ascii_case(name))
            .unwrap();
        let mut state = 0_u64;
        let bytes: Vec<u8> = (0..512 * ty.block_bytes())
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let mut values = vec![0.0; 512 * ty.block_values()];
        dequantize_row(ty, &bytes, &mut values);
        // FNV-1a over 32-bit words; every NaN counts as the same.
        let hash = values.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, v| {
            let bits = if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() };
            (hash ^ u64::from(bits)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        assert_eq!(format!("{hash:016x}"), expected, "{name}");
        types += 1;
    }
    assert_eq!(types, 11);
}

/// Rows of the formats of points, with and without an importance matrix, by a hash of the bytes.
#[test]
fn points_are_chosen_bit_equal() {
    let file = fixture("points_values.bin");
    let [n_rows, n_cols, ..] = header(&file);
    let all = floats(&file[16..]);
    let (values, importance) = all.split_at(n_rows * n_cols);
    let text = String::from_utf8(fixture("points_hashes.txt")).unwrap();
    let (mut compared, mut wrong) = (0, Vec::new());
    for line in text.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [name, kind, row, expected] = fields[..] else {
            panic!("{line}");
        };
        let row: usize = row.parse().unwrap();
        let ty = QuantType::ALL
            .into_iter()
            .find(|ty| ty.name().eq_ignore_ascii_case(name))
            .unwrap();
        let x = &values[row * n_cols..][..n_cols];
        let mut got = vec![0; ty.row_bytes(n_cols)];
        match kind {
            "plain" => quantize_row(ty, x, &mut got),
            _ => quantize_row_weighted(ty, x, importance, &mut got),
        }
        let hash = got.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        compared += 1;
        if format!("{hash:016x}") != expected {
            wrong.push(format!("{name} {kind} {row}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {compared}: {wrong:#?}",
        wrong.len()
    );
    assert!(compared > 200, "{compared}");
}

/// What devices repack from has the values of the format.
#[test]
fn signed_runs_and_six_bits_are_the_stored_values() {
    let mut state = 5_u64;
    let mut runs = 0;
    for ty in QuantType::ALL {
        let bytes: Vec<u8> = (0..16 * ty.block_bytes())
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let mut expected = vec![0.0; 16 * ty.block_values()];
        dequantize_row(ty, &bytes, &mut expected);
        let blocks = bytes.chunks_exact(ty.block_bytes());
        for (block, expected) in blocks.zip(expected.chunks_exact(ty.block_values())) {
            for (index, expected) in expected.chunks_exact(32).enumerate() {
                let Some(run) = signed_run(ty, block, index) else {
                    continue;
                };
                runs += 1;
                for (i, e) in expected.iter().enumerate() {
                    let value = run.scales()[i / 16] * f32::from(run.codes[i]);
                    assert!(value == *e || e.is_nan(), "{} {index} {i}", ty.name());
                }
            }
            let Some(six) = six_bits(ty, block) else {
                continue;
            };
            runs += 1;
            for (i, e) in expected.iter().enumerate() {
                let value =
                    six.d * f32::from(six.scales[i / 16]) * (f32::from(six.codes[i]) - 32.0);
                assert!(value == *e || e.is_nan(), "{} six {i}", ty.name());
            }
        }
    }
    assert!(runs > 1000, "{runs}");
}

/// Worst error of a stored value, as a share of the largest magnitude in its row.
fn tolerance(ty: QuantType) -> f32 {
    match ty {
        QuantType::F32 => 0.0,
        QuantType::F16 => 1e-3,
        QuantType::BF16 => 5e-3,
        QuantType::Q8_0 => 0.006,
        QuantType::Q6_K => 0.05,
        QuantType::Q5_K | QuantType::Q5_0 | QuantType::Q5_1 => 0.08,
        QuantType::Q4_0 | QuantType::Q4_1 | QuantType::Q4_K => 0.15,
        QuantType::IQ4_NL | QuantType::IQ4_XS => 0.2,
        QuantType::Q3_K => 0.35,
        QuantType::Q2_K => 0.8,
        QuantType::IQ3_S => 0.6,
        QuantType::IQ2_S => 0.9,
        // The sign of one value in eight may be wrong.
        QuantType::IQ3_XXS | QuantType::IQ2_XS | QuantType::IQ2_XXS => 2.0,
        QuantType::IQ1_S | QuantType::IQ1_M => 2.0,
        QuantType::TQ1_0 | QuantType::TQ2_0 => 0.51,
        QuantType::MXFP4 | QuantType::NVFP4 => 0.26,
    }
}

/// Worst error of any value, however small its row: scales have a smallest step.
fn floor(ty: QuantType) -> f32 {
    match ty {
        // Half of the smallest scale, 2^-9, times the largest code.
        QuantType::NVFP4 => 6.0 / 1024.0,
        _ => 0.0,
    }
}

fn any_type() -> impl Strategy<Value = QuantType> {
    prop::sample::select(QuantType::ALL.to_vec())
}

proptest! {
    #[test]
    fn quantized_rows_stay_within_the_formats_error(
        ty in any_type(),
        x in prop::collection::vec(-1.0f32..1.0, 256),
        exponent in -8i32..8,
    ) {
        let x: Vec<f32> = x.iter().map(|v| v * 2f32.powi(exponent)).collect();
        let mut bytes = vec![0; ty.row_bytes(256)];
        quantize_row(ty, &x, &mut bytes);
        let mut back = vec![0.0; 256];
        dequantize_row(ty, &bytes, &mut back);
        let largest = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (i, (b, v)) in back.iter().zip(&x).enumerate() {
            let off = (b - v).abs();
            let allowed = tolerance(ty) * largest + floor(ty);
            prop_assert!(off <= allowed, "{} value {i}: {b} for {v}", ty.name());
        }
    }

    #[test]
    fn codecs_accept_any_floats_and_any_bytes(
        ty in any_type(),
        bits in prop::collection::vec(any::<u32>(), 256),
        noise in prop::collection::vec(any::<u8>(), 4 * 256),
    ) {
        let x: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
        let mut bytes = vec![0; ty.row_bytes(256)];
        quantize_row(ty, &x, &mut bytes);
        let mut back = vec![0.0; 256];
        dequantize_row(ty, &bytes, &mut back);
        dequantize_row(ty, &noise[..ty.row_bytes(256)], &mut back);
    }

    #[test]
    fn blocks_are_quantized_independently(
        ty in any_type(),
        x in prop::collection::vec(-4.0f32..4.0, 768),
    ) {
        let mut whole = vec![0; ty.row_bytes(768)];
        quantize_row(ty, &x, &mut whole);
        let mut alone = vec![0; ty.row_bytes(256)];
        quantize_row(ty, &x[256..512], &mut alone);
        prop_assert_eq!(&whole[alone.len()..2 * alone.len()], &alone[..]);
    }
}

#[test]
fn f16_and_bf16_round_trip_exactly() {
    for ty in [QuantType::F16, QuantType::BF16] {
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut values = vec![0.0; 65_536];
        dequantize_row(ty, &every, &mut values);
        let mut back = vec![0; every.len()];
        quantize_row(ty, &values, &mut back);
        for (i, (b, e)) in back.chunks(2).zip(every.chunks(2)).enumerate() {
            // A signalling NaN may come back quiet; everything else is the same bits.
            assert!(
                values[i].is_nan() || b == e,
                "{} pattern {i:#06x}",
                ty.name()
            );
        }
    }
}

#[test]
#[should_panic(expected = "a Q4_K row of 255 values does not have 144 bytes")]
fn rows_of_a_wrong_length_panic() {
    dequantize_row(QuantType::Q4_K, &[0; 144], &mut [0.0; 255]);
}
