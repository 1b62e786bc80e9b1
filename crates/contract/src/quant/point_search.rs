//! The searches that write IQ2 and IQ3 blocks.
//!
//! A run of 16 or 32 values shares a scale. Trial scales put the run's values on levels, and groups
//! of levels that are no point of the set on the best of the near points. The trial that explains
//! most of the weighted values is kept. Sums run left to right in f32, since the bytes depend on
//! it.

use half::f16;

use super::point_block::PointBlock;
use super::point_set::PointSet;
use super::scale_search::{ALL_ZERO_BELOW, nearest};

/// Weights of squared errors without an importance matrix.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum PlainWeights {
    /// As if every value were equally important.
    Even,
    /// The square of the value.
    Square,
    /// The square of the value and a quarter of twice the block's mean square.
    SquareAndMean,
}

/// When the points are chosen again for the scale that was found.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Refit {
    /// Always, and all of them.
    Always,
    /// All of them, when one group had to take a near point.
    AllIfAny,
    /// Those of groups that had to take a near point.
    OffGrid,
}

/// The search of a format with groups of `D` values.
pub(super) struct PointSearch<const D: usize> {
    pub(super) set: fn() -> &'static PointSet<D>,
    /// Values that share a scale: 16 or 32.
    pub(super) run: usize,
    /// Whether the number of minus signs of eight values must be even.
    pub(super) has_even_signs: bool,
    pub(super) plain_weights: PlainWeights,
    /// The block's mean square times this is added to squares under an importance matrix.
    pub(super) mean_factor: f32,
    /// A run whose values are below counts as zero.
    pub(super) zero_below: f32,
    /// Trials `-trials..=trials`, which move the top level by `step` each.
    pub(super) trials: i8,
    pub(super) step: f32,
    pub(super) refit: Refit,
    /// The block's scale is stored times this.
    pub(super) d_factor: f32,
}

/// One run's values on the way: magnitudes, weights and their square roots, `[run]`.
struct Run<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    roots: &'a [f32],
}

/// `sum(w x q)` and `sum(w q^2)`.
#[derive(Clone, Copy)]
struct Sums {
    xq: f32,
    q2: f32,
}

impl<const D: usize> PointSearch<D> {
    /// The highest level's value: 5 or 15.
    fn top(&self) -> f32 {
        if D == 8 { 5.0 } else { 15.0 }
    }

    /// The block for 256 values under their importance.
    pub(super) fn block(&self, x: &[f32; 256], importance: Option<&[f32; 256]>) -> PointBlock {
        let mut block = PointBlock::ZERO;
        let mean = x.iter().fold(0.0, |sum, v| sum + v * v) * self.mean_factor / 256.0;
        let mut fitted = [0.0_f32; 16];
        let per_run = self.run / D;
        for (index, x) in x.chunks_exact(self.run).enumerate() {
            let first = index * self.run;
            let mut weights = [0.0; 32];
            for (i, w) in weights[..self.run].iter_mut().enumerate() {
                let square = x[i] * x[i];
                let even = self.plain_weights == PlainWeights::Even;
                *w = match importance.map(|all| all[first + i]) {
                    Some(importance) => importance * (mean + square).sqrt(),
                    None if even => (mean + square).sqrt(),
                    None if self.plain_weights == PlainWeights::Square => square,
                    None => 0.25 * mean + square,
                };
            }
            let weights = &weights[..self.run];
            let mut magnitudes = [0.0; 32];
            let magnitudes = &mut magnitudes[..self.run];
            let signs = &mut block.signs[first / 8..(first + self.run) / 8];
            for ((signs, m), at) in signs
                .iter_mut()
                .zip(magnitudes.chunks_exact_mut(8))
                .zip(0..)
            {
                let eight = 8 * at..8 * at + 8;
                *signs = self.signs(&x[eight.clone()], &weights[eight], m);
            }
            let mut roots = [0.0; 32];
            for (root, w) in roots.iter_mut().zip(weights) {
                *root = w.sqrt();
            }
            let points = &mut block.points[index * per_run..][..per_run];
            let run = Run {
                x: magnitudes,
                weights,
                roots: &roots[..self.run],
            };
            let Some(mut scale) = self.fit(&run, points) else {
                signs.fill(0);
                continue;
            };
            if scale < 0.0 {
                scale = -scale;
                let mask = if self.has_even_signs { 127 } else { 255 };
                signs.iter_mut().for_each(|signs| *signs = !*signs & mask);
            }
            let same = self.run / 16;
            fitted[index * same..][..same].fill(scale);
        }
        let largest = fitted
            .iter()
            .fold(0.0_f32, |max, &s| if s > max { s } else { max });
        if largest == 0.0 {
            return PointBlock::ZERO;
        }
        let d = largest / 31.0;
        block.d = f16::from_f32(d * self.d_factor);
        let id = 1.0 / d;
        block.scales = fitted.map(|scale| nearest(0.5 * (id * scale - 1.0)).clamp(0, 15) as u8);
        block
    }

    /// Signs of eight values, a set bit for a minus, and their magnitudes. With even signs, the
    /// value that counts least keeps its minus when there is one too many.
    fn signs(&self, x: &[f32], weights: &[f32], magnitudes: &mut [f32]) -> u8 {
        let mut signs = 0;
        for (i, (m, &v)) in magnitudes.iter_mut().zip(x).enumerate() {
            if v >= 0.0 {
                *m = v;
            } else {
                *m = -v;
                signs |= 1 << i;
            }
        }
        if !self.has_even_signs {
            return signs;
        }
        if signs.count_ones() % 2 == 1 {
            let cost = |i: usize| weights[i] * x[i] * x[i];
            let least = (1..8).fold(0, |least, i| if cost(i) < cost(least) { i } else { least });
            magnitudes[least] = -magnitudes[least];
            signs ^= 1 << least;
        }
        signs & 127
    }

    /// The scale of a run and its points; `None` for a run of zeros.
    fn fit(&self, run: &Run<'_>, points: &mut [u16]) -> Option<f32> {
        let max = run.x[1..]
            .iter()
            .fold(run.x[0], |max, &v| if v > max { v } else { max });
        if max < self.zero_below || max == 0.0 {
            return None;
        }
        let (mut scale, reach) = match self.refit {
            Refit::Always => {
                let scale = unsigned_fit(run);
                (scale, scale * 3.0)
            }
            _ => (max / self.top(), max),
        };
        if reach <= 0.0 {
            return None;
        }
        let mut best = 0.0;
        let mut is_off = [self.refit == Refit::AllIfAny; 8];
        let mut trial = [0; 8];
        for step in -self.trials..=self.trials {
            let id = (self.top() + f32::from(step) * self.step) / reach;
            let mut trial_off = [false; 8];
            for group in 0..points.len() {
                let (point, is_near) = self.choose(run, group, id, 1.0 / id);
                (trial[group], trial_off[group]) = (point, is_near);
            }
            let sums = self.sums(run, &trial[..points.len()]);
            if sums.q2 > 0.0 && sums.xq * sums.xq > best * sums.q2 {
                scale = sums.xq / sums.q2;
                best = scale * sums.xq;
                points.copy_from_slice(&trial[..points.len()]);
                is_off = trial_off;
            }
        }
        let is_any_off = is_off[..points.len()].contains(&true);
        if scale > 0.0 && (is_any_off || self.refit == Refit::Always) {
            for group in 0..points.len() {
                if is_off[group] || self.refit != Refit::OffGrid {
                    points[group] = self.choose(run, group, 1.0 / scale, scale).0;
                }
            }
            let sums = self.sums(run, points);
            if sums.q2 > 0.0 {
                scale = sums.xq / sums.q2;
            }
        }
        Some(scale)
    }

    /// The point of a group, and whether its levels were none.
    fn choose(&self, run: &Run<'_>, group: usize, id: f32, scale: f32) -> (u16, bool) {
        let set = (self.set)();
        let x: &[f32; D] = run.x[group * D..].first_chunk().expect("whole groups");
        let most = if D == 8 { 2 } else { 7 };
        let levels = x.map(|v| nearest(0.5 * (id * v - 1.0)).clamp(0, most) as u8);
        let near = match set.find(&levels) {
            Ok(point) => return (point, false),
            Err(near) => near,
        };
        let roots = &run.roots[group * D..];
        let mut best = (f32::MAX, near[0]);
        for &point in near {
            let mut error = 0.0;
            for (i, &level) in set.levels(point).iter().enumerate() {
                let off = scale * f32::from(2 * level + 1) - x[i];
                error += roots[i] * off * off;
            }
            if error < best.0 {
                best = (error, point);
            }
        }
        (best.1, true)
    }

    fn sums(&self, run: &Run<'_>, points: &[u16]) -> Sums {
        let set = (self.set)();
        let mut sums = Sums { xq: 0.0, q2: 0.0 };
        let levels = points.iter().flat_map(|&point| set.levels(point));
        for ((&level, &x), &w) in levels.zip(run.x).zip(run.weights) {
            let q = f32::from(2 * level + 1);
            sums.xq += w * x * q;
            sums.q2 += w * q * q;
        }
        sums
    }
}

/// The scale of 32 magnitudes for codes `0..=4`: the best of nine stretched roundings, then up to
/// five passes that move single codes as long as the fit improves.
fn unsigned_fit(run: &Run<'_>) -> f32 {
    const TOP: f32 = 4.0;
    let max = run
        .x
        .iter()
        .fold(0.0_f32, |max, &v| if v > max { v } else { max });
    if max < ALL_ZERO_BELOW {
        return 0.0;
    }
    let pairs = || run.x.iter().zip(run.weights);
    let mut inverse = TOP / max;
    // The first rounding is not limited, since nothing exceeds the largest value.
    let error = |inverse: f32, most: i32| {
        let scale = 1.0 / inverse;
        pairs().fold(0.0, |sum, (&x, &w)| {
            let off = x - scale * nearest(inverse * x).min(most) as f32;
            sum + w * off * off
        })
    };
    // Codes are bytes there: a negative one, of a value that keeps its minus, wraps.
    let scale = 1.0 / inverse;
    let mut best = pairs().fold(0.0, |sum, (&x, &w)| {
        let off = x - scale * f32::from(nearest(inverse * x) as u8);
        sum + w * off * off
    });
    for step in (-4_i8..=4).filter(|&step| step != 0) {
        let trial = (0.1 * f32::from(step) + TOP) / max;
        let trial_error = error(trial, 4);
        if trial_error < best {
            best = trial_error;
            inverse = trial;
        }
    }
    let mut codes = [0_u8; 32];
    let (mut xl, mut l2) = (0.0, 0.0);
    for (code, (&x, &w)) in codes.iter_mut().zip(pairs()) {
        let l = nearest(inverse * x).min(4);
        *code = l as u8;
        xl += w * x * l as f32;
        l2 += w * l as f32 * l as f32;
    }
    for _ in 0..5 {
        let mut has_moved = false;
        for (code, (&x, &w)) in codes.iter_mut().zip(pairs()) {
            let l = f32::from(*code);
            let (mut without_xl, mut without_l2) = (xl - w * x * l, l2 - w * l * l);
            if without_xl <= 0.0 || without_l2 <= 0.0 {
                continue;
            }
            let better = nearest(x * without_l2 / without_xl).min(4);
            if better == i32::from(*code) {
                continue;
            }
            without_xl += w * x * better as f32;
            without_l2 += w * better as f32 * better as f32;
            if without_xl * without_xl * l2 > xl * xl * without_l2 {
                *code = better as u8;
                (xl, l2) = (without_xl, without_l2);
                has_moved = true;
            }
        }
        if !has_moved {
            break;
        }
    }
    if l2 > 0.0 { xl / l2 } else { 0.0 }
}
