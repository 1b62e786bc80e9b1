//! Conversion of rows and states between the device layout and the device-neutral layout.
//!
//! Device: one page of a layer is `[kv head][256][row]`, with scales apart from values. Neutral:
//! `[position, kv head, row]`, with each block's scale before its values, as the KV format defines.

use std::ops::Range;

use crate::launch::attention::kv_layout::{from_planes, to_planes};
use crate::state::{DeltaGroup, KvArray, KvGroup, PAGE_SIZE};

/// Splits positions at page boundaries into `(page, positions in the page)`. Pages wrap after
/// `pages`.
pub(crate) fn runs(
    positions: Range<usize>,
    pages: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let whole = positions.start / PAGE_SIZE..positions.end.div_ceil(PAGE_SIZE);
    whole.map(move |page| {
        let begin = positions.start.max(page * PAGE_SIZE) - page * PAGE_SIZE;
        let end = positions.end.min((page + 1) * PAGE_SIZE) - page * PAGE_SIZE;
        (page % pages, begin..end)
    })
}

/// Neutral size of an array at `n` positions, in bytes.
pub(crate) fn neutral_bytes(group: &KvGroup, array: &KvArray, n: usize) -> usize {
    n * group.n_kv_heads * array.format.bytes(group.head_dim)
}

/// Row indices of a page of one layer, in neutral order.
fn rows(group: &KvGroup, within: Range<usize>) -> impl Iterator<Item = usize> + use<> {
    let heads = group.n_kv_heads;
    within.flat_map(move |position| (0..heads).map(move |head| head * PAGE_SIZE + position))
}

/// Appends the neutral rows of positions `within`, read from the planes of a page.
pub(crate) fn append_neutral(
    (group, array): (&KvGroup, &KvArray),
    within: Range<usize>,
    (values, scales): (&[u8], &[u8]),
    out: &mut Vec<u8>,
) {
    for row in rows(group, within) {
        let values = &values[row * array.value_bytes..][..array.value_bytes];
        let scales = &scales[row * array.scale_bytes..][..array.scale_bytes];
        from_planes(array.format, group.head_dim, (values, scales), out);
    }
}

/// Writes the neutral rows of positions `within` to the planes of a page.
pub(crate) fn write_neutral(
    (group, array): (&KvGroup, &KvArray),
    within: Range<usize>,
    neutral: &[u8],
    (values, scales): (&mut [u8], &mut [u8]),
) {
    let mut stored = neutral.chunks_exact(array.format.bytes(group.head_dim));
    for row in rows(group, within) {
        let values = &mut values[row * array.value_bytes..][..array.value_bytes];
        let scales = &mut scales[row * array.scale_bytes..][..array.scale_bytes];
        let stored = stored.next().expect("section lengths are checked before");
        to_planes(array.format, stored, values, scales);
    }
}

/// Transposes device states `[head][v][k]` to `[head][k][v]`.
pub(crate) fn neutral_states(group: &DeltaGroup, bytes: &[u8]) -> Vec<u8> {
    transposed(bytes, group.spec.v_dim, group.spec.k_dim)
}

/// Transposes neutral states `[head][k][v]` to `[head][v][k]`.
pub(crate) fn write_states(group: &DeltaGroup, bytes: &[u8], to: &mut [u8]) {
    transpose_into(bytes, (group.spec.k_dim, group.spec.v_dim), to);
}

/// Transposes consecutive `[rows][cols]` matrices of 4-byte values on several threads.
fn transposed(bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let mut out = vec![0; bytes.len()];
    let size = 4 * rows * cols;
    let each = (bytes.len() / size).div_ceil(threads()).max(1) * size;
    std::thread::scope(|scope| {
        for (from, to) in bytes.chunks(each).zip(out.chunks_mut(each)) {
            scope.spawn(move || transpose_into(from, (rows, cols), to));
        }
    });
    out
}

/// Transposes consecutive matrices on this thread.
fn transpose_into(from: &[u8], (rows, cols): (usize, usize), to: &mut [u8]) {
    let size = 4 * rows * cols;
    for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
        for (col, to) in to.chunks_exact_mut(4 * rows).enumerate() {
            let values = from.chunks_exact(4 * cols);
            for (row, to) in values.zip(to.chunks_exact_mut(4)) {
                to.copy_from_slice(&row[4 * col..4 * col + 4]);
            }
        }
    }
}

/// Threads for transposing states.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(8))
}

#[cfg(test)]
mod tests {
    use contract::KvFormat;

    use super::*;

    #[test]
    fn runs_split_at_pages_and_wrap() {
        let cut = |positions, pages| runs(positions, pages).collect::<Vec<_>>();
        assert_eq!(cut(0..PAGE_SIZE + 7, 9), [(0, 0..PAGE_SIZE), (1, 0..7)]);
        assert_eq!(
            cut(PAGE_SIZE + 9..3 * PAGE_SIZE + 5, 2),
            [(1, 9..PAGE_SIZE), (0, 0..PAGE_SIZE), (1, 0..5)]
        );
        assert_eq!(cut(0..0, 2), []);
    }

    #[test]
    fn neutral_rows_round_trip() {
        for format in [KvFormat::F16, KvFormat::Q8_0, KvFormat::Q5_1] {
            let array = KvArray::new(format, 64);
            let group = KvGroup {
                n_kv_heads: 3,
                head_dim: 64,
                k: array,
                v: array,
                layers: vec![0],
                pages: 2,
            };
            for within in [0..PAGE_SIZE, 7..100] {
                let bytes = neutral_bytes(&group, &array, within.len());
                let neutral: Vec<u8> = (0..bytes).map(|i| (i * 37 % 251) as u8).collect();
                let mut values = vec![0; group.page_rows() * array.value_bytes];
                let mut scales = vec![0; group.page_rows() * array.scale_bytes];
                let planes = (&mut values[..], &mut scales[..]);
                write_neutral((&group, &array), within.clone(), &neutral, planes);
                let mut again = Vec::new();
                append_neutral((&group, &array), within, (&values, &scales), &mut again);
                assert!(again == neutral, "{}", format.name());
            }
        }
    }

    #[test]
    fn transposing_twice_is_identity() {
        let bytes: Vec<u8> = (0..2 * 4 * 6).collect();
        let once = transposed(&bytes, 2, 3);
        assert_eq!(once[4..8], bytes[12..16]);
        assert_eq!(transposed(&once, 3, 2), bytes);
    }
}
