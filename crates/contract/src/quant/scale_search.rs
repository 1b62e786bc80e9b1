//! The searches that find the scale (and minimum) of one sub-block.
//!
//! Sums run left to right in f32, since the bytes depend on it.

/// Below this magnitude a group counts as all zero.
pub(super) const ALL_ZERO_BELOW: f32 = 1e-15;

/// Rounds to the nearest whole number, ties to even, for magnitudes below 2^22.
///
/// Adding `1.5 * 2^23` leaves the rounded value in the low mantissa bits. Larger magnitudes and
/// non-finite values give some number in range, never a panic; every caller clamps.
pub(super) fn nearest(v: f32) -> i32 {
    let bits = (v + 12_582_912.0).to_bits();
    (bits & 0x007f_ffff).cast_signed() - 0x0040_0000
}

/// How an [`AffineSearch`] measures a misfit.
#[derive(Clone, Copy)]
pub(super) enum Misfit {
    Squared,
    Absolute,
}

/// A search for `x ~ scale * code - min` with codes `0..=top`.
pub(super) struct AffineSearch {
    /// The highest code.
    pub(super) top: u8,
    /// Trial `s` stretches the range as if the highest code were `top + first + 0.1 * s`.
    pub(super) first: f32,
    /// Number of the last trial; trials are `0..=last`.
    pub(super) last: u8,
    /// What the search makes small.
    pub(super) misfit: Misfit,
}

/// `x ~ scale * code - min`, `min >= 0`.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) scale: f32,
    pub(super) min: f32,
}

impl AffineSearch {
    /// The best scale and minimum for `x` under `weights`; `codes` gets the codes that go with
    /// them.
    ///
    /// Each trial assigns codes, solves the weighted least squares for both parameters, and is kept
    /// when the weighted misfit falls strictly. A kept trial also moves the low end that later
    /// trials start from.
    pub(super) fn run<const N: usize>(
        &self,
        x: &[f32; N],
        weights: &[f32; N],
        codes: &mut [u8; N],
    ) -> Affine {
        let (mut low, mut high) = (x[0], x[0]);
        let mut sum_w = weights[0];
        let mut sum_x = weights[0] * x[0];
        for (&v, &w) in x.iter().zip(weights).skip(1) {
            if v < low {
                low = v;
            }
            if v > high {
                high = v;
            }
            sum_w += w;
            sum_x += w * v;
        }
        if low > 0.0 {
            low = 0.0;
        }
        if high == low {
            codes.fill(0);
            return Affine {
                scale: 0.0,
                min: -low,
            };
        }
        let top = f32::from(self.top);
        let start = top / (high - low);
        let mut scale = 1.0 / start;
        for (code, &v) in codes.iter_mut().zip(x) {
            *code = self.code(start * (v - low));
        }
        let mut best = self.error(x, weights, codes, Affine { scale, min: -low });
        let mut trial = [0; N];
        for s in 0..=self.last {
            let stretch = (self.first + 0.1 * f32::from(s) + top) / (high - low);
            let (mut sum_l, mut sum_l2, mut sum_xl) = (0.0, 0.0, 0.0);
            for ((code, &v), &w) in trial.iter_mut().zip(x).zip(weights) {
                *code = self.code(stretch * (v - low));
                let l = f32::from(*code);
                sum_l += w * l;
                sum_l2 += w * l * l;
                sum_xl += w * l * v;
            }
            let det = sum_w * sum_l2 - sum_l * sum_l;
            if det > 0.0 {
                let mut fitted = (sum_w * sum_xl - sum_x * sum_l) / det;
                let mut floor = (sum_l2 * sum_x - sum_l * sum_xl) / det;
                if floor > 0.0 {
                    floor = 0.0;
                    fitted = sum_xl / sum_l2;
                }
                let error = self.error(
                    x,
                    weights,
                    &trial,
                    Affine {
                        scale: fitted,
                        min: -floor,
                    },
                );
                if error < best {
                    best = error;
                    *codes = trial;
                    scale = fitted;
                    low = floor;
                }
            }
        }
        Affine { scale, min: -low }
    }

    fn code(&self, v: f32) -> u8 {
        nearest(v).clamp(0, i32::from(self.top)) as u8
    }

    fn error<const N: usize>(
        &self,
        x: &[f32; N],
        weights: &[f32; N],
        codes: &[u8; N],
        fit: Affine,
    ) -> f32 {
        let mut sum = 0.0;
        for ((&v, &w), &code) in x.iter().zip(weights).zip(codes) {
            let off = fit.scale * f32::from(code) + -fit.min - v;
            sum += w * match self.misfit {
                Misfit::Squared => off * off,
                Misfit::Absolute => off.abs(),
            };
        }
        sum
    }
}

/// The two sums a least-squares scale is made of: `sum(w * x * code)` and `sum(w * code^2)`.
#[derive(Clone, Copy, Default)]
pub(super) struct ScaleSums {
    pub(super) xl: f32,
    pub(super) l2: f32,
}

impl ScaleSums {
    pub(super) fn add(&mut self, w: f32, x: f32, code: f32) {
        self.xl += w * x * code;
        self.l2 += w * code * code;
    }

    /// The scale that fits best, or 0 when every code is 0.
    pub(super) fn scale(self) -> f32 {
        if self.l2 == 0.0 {
            0.0
        } else {
            self.xl / self.l2
        }
    }
}
