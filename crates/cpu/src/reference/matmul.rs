//! Products of f32 matrices.

/// `out[n, rows] = x[n, cols] · weight[rows, cols]^T`, each sum in index order.
pub fn linear(weight: &[f32], x: &[f32], cols: usize, out: &mut [f32]) {
    let rows = weight.len() / cols;
    for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(rows)) {
        for (w, o) in weight.chunks_exact(cols).zip(out) {
            *o = dot(w, x);
        }
    }
}

/// `sum a * b`, each `[n]`, in index order.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `c[m, n] += a[m, k] · b[k, n]`, all dense; `m = c.len() / n`, `k = b.len() / n`.
///
/// Each element adds its `k` products in index order to the existing value, so a row's result does
/// not depend on the number of rows.
pub fn accumulate(a: &[f32], b: &[f32], n: usize, c: &mut [f32]) {
    let k = b.len() / n;
    assert!(b.len() == k * n && a.len() * n == c.len() * k);
    for (a, c) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (&a, b) in a.iter().zip(b.chunks_exact(n)) {
            for (c, &b) in c.iter_mut().zip(b) {
                *c += a * b;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accumulate_adds_the_product() {
        let mut c = [1.0, 0.0, 0.0, 1.0];
        accumulate(
            &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
            2,
            &mut c,
        );
        assert_eq!(c, [5.0, 5.0, 10.0, 12.0]);
    }
}
