//! Tests: every vector function against its reference, at multiples of the vector length and at
//! other lengths.

use crate::kernels::Kernels;
use crate::reference::delta::{Columns, PendingUpdate, Token};
use crate::reference::kv;
use crate::simd::dispatch::Dispatch;
use contract::KvFormat;

/// Pseudo-random values in `-1..1`.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Runs `on` with the reference table and every other table, and compares the results.
fn check(tolerance: f32, on: impl Fn(&Kernels) -> Vec<f32>) {
    let expected = on(&Kernels::scalar());
    for dispatch in Dispatch::all_fast() {
        let found = on(&Kernels::of(dispatch));
        assert_eq!(found.len(), expected.len());
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let slack = tolerance * expected.abs().max(1.0);
            let close = (found - expected).abs() <= slack || found == expected;
            assert!(close, "{} {i}: {found} for {expected}", dispatch.name());
        }
    }
}

const LENGTHS: [usize; 8] = [1, 7, 8, 16, 31, 64, 128, 259];

#[test]
fn norms_agree() {
    for n in LENGTHS {
        let (x, w, z) = (noise(1, n), noise(2, n), noise(3, n));
        check(2e-6, |kernels| {
            let mut out = vec![0.0; n];
            (kernels.rms)(&x, &w, 1e-6, &mut out);
            let (mut a, mut b, mut c) = (x.clone(), x.clone(), x.clone());
            (kernels.rms_in_place)(&mut a, &w, 1e-6);
            (kernels.gated_rms)(&mut b, &w, &z, 1e-6);
            (kernels.l2)(&mut c, 1e-6, 0.25);
            [out, a, b, c].concat()
        });
    }
}

#[test]
fn activations_agree() {
    for n in LENGTHS {
        let x: Vec<f32> = noise(4, n).iter().map(|x| 30.0 * x).collect();
        let y = noise(5, n);
        check(1e-6, |kernels| {
            let mut out = vec![0.0; n];
            (kernels.swiglu)(&x, &y, &mut out);
            let mut with_gelu = vec![0.0; n];
            (kernels.geglu)(&x, &y, &mut with_gelu);
            let (mut a, mut b) = (y.clone(), y.clone());
            (kernels.sigmoid_gate)(&mut a, &x);
            (kernels.add)(&mut b, &x);
            let mut weights = x.clone();
            let sum = (kernels.exp_sum)(&mut weights, 30.0);
            let row = [(kernels.max)(&x), (kernels.sum_exp)(&x, 30.0), sum];
            [out, with_gelu, a, b, weights, row.to_vec()].concat()
        });
    }
}

#[test]
fn exponentials_are_within_two_ulp() {
    let inputs: Vec<f32> = (0..400_000).map(|i| i as f32 * 5e-4 - 104.5).collect();
    for dispatch in Dispatch::all_fast() {
        let kernels = Kernels::of(dispatch);
        let mut found = inputs.clone();
        (kernels.exp_sum)(&mut found, 0.0);
        for (&x, &found) in inputs.iter().zip(&found) {
            let exact = f64::from(x).exp();
            let nearest = exact as f32;
            if nearest.is_infinite() || found.is_infinite() {
                assert!(x > 88.7, "{} e^{x} is {found}", dispatch.name());
                continue;
            }
            let unit = f64::from(f32::from_bits(nearest.to_bits() + 1) - nearest);
            let error = (f64::from(found) - exact).abs() / unit;
            assert!(error <= 2.0, "{} e^{x}: {error} units", dispatch.name());
        }
    }
}

#[test]
fn nan_handling_matches_the_reference() {
    let bad = [f32::NAN, f32::NEG_INFINITY, 1.0, 1e30, -1e30];
    for dispatch in Dispatch::all_fast() {
        let kernels = Kernels::of(dispatch);
        for pad in [0, 16] {
            let mut x = bad.to_vec();
            x.extend(vec![0.0; pad]);
            let mut weights = x.clone();
            let sum = (kernels.exp_sum)(&mut weights, 1e30);
            assert_eq!(
                (weights[0], weights[1], weights[3], sum),
                (0.0, 0.0, 1.0, 1.0)
            );
            assert_eq!((kernels.max)(&x), 1e30);
            assert_eq!((kernels.sum_exp)(&x, 1e30), 1.0);
            let mut out = vec![1.0; x.len()];
            (kernels.swiglu)(&x, &vec![1.0; x.len()], &mut out);
            assert!(out[0].is_nan() && out[3] == 1e30 && out[4] == 0.0);
        }
    }
}

#[test]
fn convolutions_agree() {
    for (taps, n) in [(1, 5), (4, 16), (4, 97), (3, 256)] {
        let rows = noise(6, taps * n);
        let inputs: Vec<&[f32]> = rows.chunks(n).collect();
        let weights = noise(7, taps * n);
        check(1e-6, |kernels| {
            let mut out = vec![0.0; n];
            (kernels.conv_row)(&inputs, &weights, &mut out);
            out
        });
    }
}

#[test]
fn delta_steps_agree() {
    for (k_dim, v_dim) in [(128, 128), (16, 64), (5, 24), (3, 7)] {
        let (state, q, k) = (noise(8, k_dim * v_dim), noise(9, k_dim), noise(10, k_dim));
        let v = noise(11, v_dim);
        let token = Token {
            q: &q,
            k: &k,
            v: &v,
            decay: 0.83,
            beta: 0.4,
        };
        check(2e-5, |kernels| {
            let (mut u, mut o) = (vec![0.0; v_dim], vec![0.0; v_dim]);
            (kernels.delta_read_out)(&state, token, &mut u, &mut o);
            let mut folded = state.clone();
            (kernels.delta_update)(&mut folded, &k, &u, 0.83);
            [u, o, folded].concat()
        });
    }
}

#[test]
fn fused_update_and_read_out_is_bit_identical_to_separate_steps() {
    for (k_dim, v_dim, width) in [
        (128, 128, 128),
        (128, 128, 32),
        (9, 64, 16),
        (5, 24, 24),
        (3, 9, 7),
    ] {
        let (q, k, v) = (noise(9, k_dim), noise(10, k_dim), noise(11, width));
        let token = Token {
            q: &q,
            k: &k,
            v: &v,
            decay: 0.83,
            beta: 0.4,
        };
        let (keys, us) = (noise(12, 3 * k_dim), noise(13, 3 * width));
        let all: Vec<PendingUpdate<'_>> = (0..3)
            .map(|i| PendingUpdate {
                k: &keys[i * k_dim..][..k_dim],
                u: &us[i * width..][..width],
                decay: 0.9 - 0.1 * i as f32,
            })
            .collect();
        for kernels in Dispatch::all_fast()
            .into_iter()
            .map(Kernels::of)
            .chain([Kernels::scalar()])
        {
            for updates in [&all[..0], &all[..1], &all[..3]] {
                let state = noise(8, k_dim * v_dim);
                let mut dense: Vec<f32> = state
                    .chunks(v_dim)
                    .flat_map(|row| &row[..width])
                    .copied()
                    .collect();
                let before = dense.clone();
                for w in updates {
                    (kernels.delta_update)(&mut dense, w.k, w.u, w.decay);
                }
                let (mut u, mut o) = (vec![0.0; width], vec![0.0; width]);
                (kernels.delta_read_out)(&dense, token, &mut u, &mut o);
                let expected = [&dense[..], &u, &o].concat();
                let (mut own, mut copy) = (state.clone(), vec![0.0; dense.len()]);
                let columns = Columns {
                    values: &mut own,
                    stride: v_dim,
                };
                (kernels.delta_update_columns)(
                    columns,
                    updates,
                    &mut copy,
                    token,
                    [&mut u, &mut o],
                );
                assert_eq!([&copy[..], &u, &o].concat(), expected);
                for ((row, old), new) in own
                    .chunks(v_dim)
                    .zip(state.chunks(v_dim))
                    .zip(copy.chunks(width))
                {
                    assert_eq!((&row[..width], &row[width..]), (new, &old[width..]));
                }
                let [update] = updates else {
                    continue;
                };
                let (mut here, mut there) = (before.clone(), vec![0.0; before.len()]);
                for (from, state) in [(None, &mut here), (Some(&before[..]), &mut there)] {
                    (kernels.delta_update_read_out)(from, state, *update, token, [&mut u, &mut o]);
                    assert_eq!([&state[..], &u, &o].concat(), expected);
                }
            }
        }
    }
}

#[test]
fn products_agree_and_rows_are_independent() {
    for (m, k, n) in [
        (64, 128, 64),
        (9, 5, 128),
        (1, 63, 256),
        (3, 7, 37),
        (5, 64, 16),
    ] {
        let (a, b, c) = (noise(12, m * k), noise(13, k * n), noise(14, m * n));
        check(1e-5, |kernels| {
            let mut all = c.clone();
            (kernels.accumulate)(&a, &b, n, &mut all);
            for (i, row) in c.chunks(n).enumerate() {
                let mut alone = row.to_vec();
                (kernels.accumulate)(&a[i * k..][..k], &b, n, &mut alone);
                assert_eq!(alone, all[i * n..][..n]);
            }
            all
        });
    }
}

#[test]
fn multi_query_dots_are_bit_identical_to_single_dots() {
    for (m, n) in [(1, 256), (3, 128), (7, 64), (12, 256), (5, 40)] {
        let (queries, row) = (noise(17, m * n), noise(18, n));
        let mut key = vec![0; 2 * n];
        kv::encode(kv::Codec::new(KvFormat::F16, false), &row, &mut key);
        for kernels in Dispatch::all_fast().into_iter().map(Kernels::of) {
            let mut dots = vec![0.0; m];
            (kernels.dots_f16)(&queries, &key, &mut dots);
            let alone = queries
                .chunks(n)
                .map(|query| (kernels.dot_f16)(query, &key));
            assert!(dots.iter().copied().eq(alone), "{m} x {n}");
        }
    }
}

#[test]
fn cached_rows_agree() {
    for n in [32, 96, 128, 256] {
        let (x, row) = (noise(15, n), noise(16, n));
        let stored = |format: KvFormat| {
            let mut bytes = vec![0; format.bytes(n)];
            kv::encode(kv::Codec::new(format, false), &row, &mut bytes);
            bytes
        };
        let (half, byte) = (stored(KvFormat::F16), stored(KvFormat::Q8_0));
        let nibble = stored(KvFormat::Q4_0);
        check(1e-5, |kernels| {
            vec![
                (kernels.dot_f16)(&x, &half),
                (kernels.dot_q8_0)(&x, &byte),
                (kernels.dot_q4_0)(&x, &nibble),
            ]
        });
        check(0.0, |kernels| {
            let [mut a, mut b, mut c] = [0, 1, 2].map(|_| vec![0.0; n]);
            (kernels.decode_f16)(&half, &mut a);
            (kernels.decode_q8_0)(&byte, &mut b);
            (kernels.decode_q4_0)(&nibble, &mut c);
            [a, b, c].concat()
        });
    }
}
