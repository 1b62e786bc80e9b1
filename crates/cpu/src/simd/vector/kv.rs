//! Vector versions of [`crate::reference::kv`].

use half::f16;

use crate::reference::kv as reference;
use crate::simd::lanes::Lanes;

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 34;
const NIBBLE_BYTES: usize = 18;

/// # Safety
/// The instruction set of `L`; so for every function here.
#[inline(always)]
pub(in crate::simd) unsafe fn dot_f16<L: Lanes>(x: &[f32], bytes: &[u8]) -> f32 {
    let n = x.len();
    assert_eq!(bytes.len(), 2 * n);
    if !n.is_multiple_of(4 * L::N) {
        return reference::dot_f16(x, bytes);
    }
    // SAFETY: the caller's instruction set; `n` values and `n` halves.
    unsafe {
        let mut sums = [L::splat(0.0); 4];
        for at in (0..n).step_by(4 * L::N) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = at + i * L::N;
                let key = L::load_f16(bytes.as_ptr().add(2 * at));
                *sum = key.mul_add(L::load(x.as_ptr().add(at)), *sum);
            }
        }
        let [a, b, c, d] = sums;
        a.add(b).add(c.add(d)).sum()
    }
}

/// [`dot_f16`] of queries `[m, dim]`; four queries share each read of the key.
///
/// # Safety
/// As [`dot_f16`].
#[inline(always)]
pub(in crate::simd) unsafe fn dots_f16<L: Lanes>(queries: &[f32], key: &[u8], dots: &mut [f32]) {
    const SHARED: usize = 4;
    let dim = key.len() / 2;
    assert_eq!(queries.len(), dots.len() * dim);
    let mut done = 0;
    if dim.is_multiple_of(4 * L::N) {
        while done + SHARED <= dots.len() {
            // SAFETY: the caller's instruction set; `SHARED` queries of `dim` values from `done`
            // on, and as many halves, whole groups of four vectors.
            unsafe {
                let x = queries.as_ptr().add(done * dim);
                let mut sums = [[L::splat(0.0); 4]; SHARED];
                for at in (0..dim).step_by(4 * L::N) {
                    for i in 0..4 {
                        let at = at + i * L::N;
                        let key = L::load_f16(key.as_ptr().add(2 * at));
                        for (query, sums) in sums.iter_mut().enumerate() {
                            sums[i] = key.mul_add(L::load(x.add(query * dim + at)), sums[i]);
                        }
                    }
                }
                for (sums, dot) in sums.into_iter().zip(&mut dots[done..]) {
                    let [a, b, c, d] = sums;
                    *dot = a.add(b).add(c.add(d)).sum();
                }
            }
            done += SHARED;
        }
    }
    for (query, dot) in queries.chunks_exact(dim).zip(dots).skip(done) {
        // SAFETY: the caller's.
        *dot = unsafe { dot_f16::<L>(query, key) };
    }
}

/// # Safety
/// As [`dot_f16`].
#[inline(always)]
pub(in crate::simd) unsafe fn dot_q8_0<L: Lanes>(x: &[f32], bytes: &[u8]) -> f32 {
    let blocks = x.len() / BLOCK;
    assert!(bytes.len() == blocks * BLOCK_BYTES && x.len() == blocks * BLOCK);
    // SAFETY: the caller's instruction set; `blocks` blocks of 32 values and of 34 bytes.
    unsafe {
        let mut sums = [L::splat(0.0); 2];
        for block in 0..blocks {
            let from = bytes.as_ptr().add(block * BLOCK_BYTES);
            let scale = f16::from_le_bytes([*from, *from.add(1)]).to_f32();
            let mut own = L::splat(0.0);
            for at in (0..BLOCK).step_by(L::N) {
                let key = L::load_i8(from.add(2 + at));
                own = key.mul_add(L::load(x.as_ptr().add(block * BLOCK + at)), own);
            }
            let sum = &mut sums[block % 2];
            *sum = own.mul_add(L::splat(scale), *sum);
        }
        sums[0].add(sums[1]).sum()
    }
}

/// # Safety
/// As [`dot_f16`].
#[inline(always)]
pub(in crate::simd) unsafe fn decode_f16<L: Lanes>(bytes: &[u8], values: &mut [f32]) {
    let n = values.len();
    assert_eq!(bytes.len(), 2 * n);
    let whole = n / L::N * L::N;
    for at in (0..whole).step_by(L::N) {
        // SAFETY: the caller's instruction set; at least `whole` halves and values.
        unsafe { L::load_f16(bytes.as_ptr().add(2 * at)).store(values.as_mut_ptr().add(at)) }
    }
    reference::decode_f16(&bytes[2 * whole..], &mut values[whole..]);
}

/// # Safety
/// As [`dot_f16`].
#[inline(always)]
pub(in crate::simd) unsafe fn decode_q8_0<L: Lanes>(bytes: &[u8], values: &mut [f32]) {
    let blocks = values.len() / BLOCK;
    assert!(bytes.len() == blocks * BLOCK_BYTES && values.len() == blocks * BLOCK);
    for block in 0..blocks {
        // SAFETY: the caller's instruction set; `blocks` blocks of 34 bytes and of 32 values.
        unsafe {
            let from = bytes.as_ptr().add(block * BLOCK_BYTES);
            let scale = f16::from_le_bytes([*from, *from.add(1)]).to_f32();
            for at in (0..BLOCK).step_by(L::N) {
                let lanes = L::load_i8(from.add(2 + at)).mul(L::splat(scale));
                lanes.store(values.as_mut_ptr().add(block * BLOCK + at));
            }
        }
    }
}

/// # Safety
/// As [`dot_f16`].
#[inline(always)]
pub(in crate::simd) unsafe fn dot_q4_0<L: Lanes>(x: &[f32], bytes: &[u8]) -> f32 {
    let (blocks, rest) = bytes.as_chunks::<NIBBLE_BYTES>();
    assert!(rest.is_empty() && x.len() == blocks.len() * BLOCK);
    // SAFETY: the caller's instruction set; 32 values and 32 codes a block.
    unsafe {
        let mut sums = [L::splat(0.0); 2];
        for (i, [low, high, nibbles @ ..]) in blocks.iter().enumerate() {
            let scale = f16::from_le_bytes([*low, *high]).to_f32();
            let codes = reference::codes_q4_0(nibbles);
            let mut own = L::splat(0.0);
            for at in (0..BLOCK).step_by(L::N) {
                let key = L::load_i8(codes.as_ptr().cast::<u8>().add(at));
                own = key.mul_add(L::load(x.as_ptr().add(i * BLOCK + at)), own);
            }
            let sum = &mut sums[i % 2];
            *sum = own.mul_add(L::splat(scale), *sum);
        }
        sums[0].add(sums[1]).sum()
    }
}

/// # Safety
/// As [`dot_f16`].
#[inline(always)]
pub(in crate::simd) unsafe fn decode_q4_0<L: Lanes>(bytes: &[u8], values: &mut [f32]) {
    let (blocks, rest) = bytes.as_chunks::<NIBBLE_BYTES>();
    assert!(rest.is_empty() && values.len() == blocks.len() * BLOCK);
    for (i, [low, high, nibbles @ ..]) in blocks.iter().enumerate() {
        let scale = f16::from_le_bytes([*low, *high]).to_f32();
        let codes = reference::codes_q4_0(nibbles);
        // SAFETY: the caller's instruction set; 32 codes and 32 values a block.
        unsafe {
            for at in (0..BLOCK).step_by(L::N) {
                let lanes = L::load_i8(codes.as_ptr().cast::<u8>().add(at)).mul(L::splat(scale));
                lanes.store(values.as_mut_ptr().add(i * BLOCK + at));
            }
        }
    }
}
