//! Random draws by position.
//!
//! A counter-based generator has no state: the draw for position `p` under seed `s` is the same in
//! any batch, order or process. Kept by hand: it is 20 lines, and its bits are part of the output.

/// The draw for the token at absolute position `position`, in `[0, 1)` with 53 random bits.
pub(crate) fn uniform(seed: u64, position: u64) -> f64 {
    let words = philox(halves(position, 0), [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

fn halves(low: u64, high: u64) -> [u32; 4] {
    [
        low as u32,
        (low >> 32) as u32,
        high as u32,
        (high >> 32) as u32,
    ]
}

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
/// 2011).
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const ROUNDS: usize = 10;
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut c, mut k) = (counter, key);
    for _ in 0..ROUNDS {
        let (high_0, low_0) = wide_product(MULTIPLIERS[0], c[0]);
        let (high_1, low_1) = wide_product(MULTIPLIERS[1], c[2]);
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

fn wide_product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_published_vectors() {
        // From the known-answer file of the authors' Random123 library, `philox4x32 10`.
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn draws_are_uniform_and_differ_by_seed_and_position() {
        const N: u64 = 20_000;
        let mut buckets = [0_u32; 16];
        for position in 0..N {
            let draw = uniform(7, position);
            assert!((0.0..1.0).contains(&draw));
            buckets[(draw * 16.0) as usize] += 1;
        }
        let expected = N as f64 / 16.0;
        let chi: f64 = buckets
            .iter()
            .map(|b| (f64::from(*b) - expected).powi(2) / expected)
            .sum();
        // 15 degrees of freedom: 37.7 is passed once in a thousand.
        assert!(chi < 37.7, "{chi}");
        assert_ne!(uniform(1, 5), uniform(2, 5));
        assert_ne!(uniform(1, 5), uniform(1, 6));
        assert_ne!(uniform(1 << 32, 5), uniform(0, 5));
        assert_ne!(uniform(1, 1 << 32), uniform(1, 0));
    }
}
