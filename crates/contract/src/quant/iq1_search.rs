//! The searches that write IQ1 blocks.
//!
//! With three levels, the best split of a run's sorted values into three parts is found by trying
//! all of them. Groups whose levels are no point then take the best of the near points. Sums run
//! left to right in f32, since the bytes depend on it.

use half::f16;

use super::point_block::PointBlock;
use super::point_set::PointSet;
use super::scale_search::nearest;

/// The three levels when they are moved up, and down.
const UP: [f32; 3] = [-0.875, 0.125, 1.125];
const DOWN: [f32; 3] = [-1.125, -0.125, 0.875];

/// What the search found for a run: its scale and, per group of eight, its levels.
struct Fit {
    scale: f32,
    levels: [u8; 32],
    /// Whether the levels of each group are moved down.
    is_down: [bool; 4],
}

/// The best split so far, by the share of the values that it explains.
struct Best {
    score: f32,
    scale: f32,
    /// Where the second and third part begin, and which levels were used.
    split: Option<(usize, usize, usize)>,
}

impl Best {
    fn new(max: f32) -> Best {
        Best {
            score: -f32::MAX,
            scale: max,
            split: None,
        }
    }

    fn offer(&mut self, xq: f32, q2: f32, split: (usize, usize, usize)) {
        if q2 > 0.0 && xq * xq > self.score * q2 {
            self.scale = xq / q2;
            self.score = self.scale * xq;
            self.split = Some(split);
        }
    }
}

fn shifted(is_down: bool) -> &'static [f32; 3] {
    if is_down { &DOWN } else { &UP }
}

/// Indices of the values in rising order; both zeros are equal.
fn sorted(x: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| (x[a] + 0.0).total_cmp(&(x[b] + 0.0)));
    order
}

fn largest(x: &[f32]) -> f32 {
    x.iter()
        .fold(0.0_f32, |max, v| if v.abs() > max { v.abs() } else { max })
}

/// Levels of the values by the split of their order.
fn levels_of(order: &[usize], (second, third): (usize, usize), is_negative: bool) -> [u8; 32] {
    let mut levels = [0; 32];
    for (at, &i) in order.iter().enumerate() {
        let level = u8::from(at >= second) + u8::from(at >= third);
        levels[i] = if is_negative { 2 - level } else { level };
    }
    levels
}

/// 32 values that move together.
fn fit_s(x: &[f32], weights: &[f32]) -> Option<Fit> {
    let n = x.len();
    let max = largest(x);
    if max < 1e-12 {
        return None;
    }
    let order = sorted(x);
    let (mut sum_x, mut sum_w) = (vec![0.0_f32; n + 1], vec![0.0_f32; n + 1]);
    for (j, &i) in order.iter().enumerate() {
        sum_x[j + 1] = sum_x[j] + weights[i] * x[i];
        sum_w[j + 1] = sum_w[j] + weights[i];
    }
    let mut best = Best::new(max);
    for second in 0..=n {
        for third in second..=n {
            let parts = |sums: &[f32]| {
                let (low, high) = (sums[second], sums[third]);
                [low - sums[0], high - low, sums[n] - high]
            };
            let (px, pw) = (parts(&sum_x), parts(&sum_w));
            for (which, level) in [&UP, &DOWN].into_iter().enumerate() {
                let xq = px[0] * level[0] + px[1] * level[1] + px[2] * level[2];
                let q2 = pw[0] * level[0] * level[0]
                    + pw[1] * level[1] * level[1]
                    + pw[2] * level[2] * level[2];
                best.offer(xq, q2, (second, third, which));
            }
        }
    }
    let (second, third, which) = best.split?;
    let is_negative = best.scale < 0.0;
    Some(Fit {
        scale: best.scale.abs(),
        levels: levels_of(&order, (second, third), is_negative),
        is_down: [(which == 1) != is_negative; 4],
    })
}

/// 16 values of which each half moves by itself.
fn fit_m(x: &[f32], weights: &[f32]) -> Option<Fit> {
    let n = x.len();
    let max = largest(x);
    if max < 1e-7 {
        return None;
    }
    let order = sorted(x);
    // Sums up to each place of the order, of the values of each half.
    let (mut sum_x, mut sum_w) = ([[0.0_f32; 17]; 2], [[0.0_f32; 17]; 2]);
    for (j, &i) in order.iter().enumerate() {
        let half = usize::from(i >= n / 2);
        for h in 0..2 {
            (sum_x[h][j + 1], sum_w[h][j + 1]) = (sum_x[h][j], sum_w[h][j]);
        }
        sum_x[half][j + 1] += weights[i] * x[i];
        sum_w[half][j + 1] += weights[i];
    }
    let mut best = Best::new(max);
    for second in 0..=n {
        for third in second..=n {
            // Neighbouring levels differ by one, so sums need only the highest level and the two
            // places of the split.
            let of_half = |half: usize, level: &[f32; 3]| {
                let (x, w) = (&sum_x[half], &sum_w[half]);
                let xq = x[n] * level[2] - (x[second] + x[third]);
                let q2 = w[n] * level[2] * level[2]
                    + w[second] * (level[0] * level[0] - level[1] * level[1])
                    + w[third] * (level[1] * level[1] - level[2] * level[2]);
                (xq, q2)
            };
            let halves = [0, 1].map(|half| [of_half(half, &UP), of_half(half, &DOWN)]);
            for which in 0..4 {
                let (first, last) = (halves[0][which / 2], halves[1][which % 2]);
                best.offer(first.0 + last.0, first.1 + last.1, (second, third, which));
            }
        }
    }
    let (second, third, which) = best.split?;
    let is_negative = best.scale < 0.0;
    let is_down = [which / 2 == 1, which % 2 == 1].map(|down| down != is_negative);
    Some(Fit {
        scale: best.scale.abs(),
        levels: levels_of(&order, (second, third), is_negative),
        is_down: [is_down[0], is_down[1], false, false],
    })
}

/// The points of a run's groups; the scale is fitted again when a group's levels are no point.
fn place(set: &PointSet<8>, x: &[f32], weights: &[f32], fit: &mut Fit, points: &mut [u16]) {
    let mut is_any_off = false;
    for (group, point) in points.iter_mut().enumerate() {
        let levels = fit.levels[8 * group..].first_chunk().expect("whole groups");
        let near = match set.find(levels) {
            Ok(found) => {
                *point = found;
                continue;
            }
            Err(near) => near,
        };
        is_any_off = true;
        let values = shifted(fit.is_down[group]);
        let mut best = (f32::MAX, near[0]);
        for &candidate in near {
            let mut error = 0.0;
            for (i, &level) in set.levels(candidate).iter().enumerate() {
                let off = fit.scale * values[usize::from(level)] - x[8 * group + i];
                error += weights[8 * group + i] * off * off;
            }
            if error < best.0 {
                best = (error, candidate);
            }
        }
        *point = best.1;
    }
    if !is_any_off {
        return;
    }
    let (xq, q2) = sums(set, (x, weights), points, &fit.is_down, 1.0);
    if xq > 0.0 && q2 > 0.0 {
        fit.scale = xq / q2;
    }
}

/// `sum(w q x)` and `sum(w q^2)` of a run whose values are `factor` times their levels, added to
/// nothing.
fn sums(
    set: &PointSet<8>,
    (x, weights): (&[f32], &[f32]),
    points: &[u16],
    is_down: &[bool; 4],
    factor: f32,
) -> (f32, f32) {
    let mut totals = (0.0, 0.0);
    add_sums(set, (x, weights), points, is_down, factor, &mut totals);
    totals
}

fn add_sums(
    set: &PointSet<8>,
    (x, weights): (&[f32], &[f32]),
    points: &[u16],
    is_down: &[bool; 4],
    factor: f32,
    totals: &mut (f32, f32),
) {
    for (group, &point) in points.iter().enumerate() {
        let values = shifted(is_down[group]);
        for (i, &level) in set.levels(point).iter().enumerate() {
            let at = 8 * group + i;
            let q = values[usize::from(level)] * factor;
            totals.0 += weights[at] * q * x[at];
            totals.1 += weights[at] * q * q;
        }
    }
}

/// Weights of a block's values: their importance times the root of a mean of squares, or their
/// squares.
fn weights(x: &[f32; 256], importance: Option<&[f32; 256]>) -> [f32; 256] {
    let mean = 2.0 * x.iter().fold(0.0, |sum, v| sum + v * v) / 256.0;
    std::array::from_fn(|i| match importance {
        Some(importance) => importance[i] * (mean + x[i] * x[i]).sqrt(),
        None => x[i] * x[i],
    })
}

/// The 3-bit scale of a run.
fn stored_scale(id: f32, scale: f32) -> u8 {
    nearest(0.5 * (id * scale - 1.0)).clamp(0, 7) as u8
}

fn top(fitted: &[f32]) -> f32 {
    fitted
        .iter()
        .fold(0.0_f32, |max, &s| if s > max { s } else { max })
}

/// An IQ1_S block. Without importance, all values are equally important.
pub(super) fn block_s(
    set: &PointSet<8>,
    x: &[f32; 256],
    importance: Option<&[f32; 256]>,
) -> PointBlock {
    let weights = weights(x, Some(importance.unwrap_or(&[1.0; 256])));
    let mut block = PointBlock::ZERO;
    let mut fitted = [0.0; 8];
    for (index, fitted) in fitted.iter_mut().enumerate() {
        let (x, w) = (&x[32 * index..][..32], &weights[32 * index..][..32]);
        let Some(mut fit) = fit_s(x, w) else { continue };
        place(set, x, w, &mut fit, &mut block.points[4 * index..][..4]);
        *fitted = fit.scale;
        block.signs[4 * index..][..4].fill(u8::from(fit.is_down[0]));
    }
    let max = top(&fitted);
    if max == 0.0 {
        return PointBlock::ZERO;
    }
    let d = max / 15.0;
    block.d = f16::from_f32(d * 1.125);
    for (index, scale) in fitted.into_iter().enumerate() {
        block.scales[2 * index..][..2].fill(stored_scale(1.0 / d, scale));
    }
    block
}

/// An IQ1_M block. Without importance, a value's weight is its square.
pub(super) fn block_m(
    set: &PointSet<8>,
    x: &[f32; 256],
    importance: Option<&[f32; 256]>,
) -> PointBlock {
    let weights = weights(x, importance);
    let mut block = PointBlock::ZERO;
    let mut fitted = [0.0; 16];
    let mut is_down = [[false; 4]; 16];
    for (index, fitted) in fitted.iter_mut().enumerate() {
        let (x, w) = (&x[16 * index..][..16], &weights[16 * index..][..16]);
        let Some(mut fit) = fit_m(x, w) else { continue };
        place(set, x, w, &mut fit, &mut block.points[2 * index..][..2]);
        *fitted = fit.scale;
        is_down[index] = fit.is_down;
    }
    let max = top(&fitted);
    if max == 0.0 {
        return PointBlock::ZERO;
    }
    let mut d = max / 15.0;
    let id = 1.0 / d;
    let mut totals = (0.0, 0.0);
    for (index, scale) in fitted.into_iter().enumerate() {
        let s = stored_scale(id, scale);
        block.scales[index] = s;
        let signs = block.signs[2 * index..][..2].iter_mut();
        for (sign, is_down) in signs.zip(is_down[index]) {
            *sign = u8::from(is_down);
        }
        let range = 16 * index..16 * index + 16;
        let run = (&x[range.clone()], &weights[range]);
        let points = &block.points[2 * index..][..2];
        let factor = f32::from(2 * s + 1);
        add_sums(set, run, points, &is_down[index], factor, &mut totals);
    }
    if totals.1 > 0.0 {
        d = totals.0 / totals.1;
    }
    block.d = f16::from_f32(d * 1.1125);
    block
}
