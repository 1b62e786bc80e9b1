//! Percentiles of measured values.

/// Values in ascending order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Percentiles(Vec<f64>);

impl Percentiles {
    pub(super) fn new(mut values: Vec<f64>) -> Percentiles {
        values.sort_by(f64::total_cmp);
        Percentiles(values)
    }

    pub(super) fn mean(&self) -> Option<f64> {
        let n = self.0.len();
        (n > 0).then(|| self.0.iter().sum::<f64>() / n as f64)
    }

    /// The smallest value that at least `percent` of the values do not exceed.
    pub(super) fn at(&self, percent: f64) -> Option<f64> {
        let rank = (percent / 100.0 * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_nearest_rank() {
        let values = Percentiles::new(vec![4.0, 1.0, 3.0, 2.0]);
        let at = [0.0, 25.0, 50.0, 51.0, 99.0, 100.0].map(|percent| values.at(percent).unwrap());
        assert_eq!(at, [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]);
        assert_eq!(values.mean(), Some(2.5));
        assert_eq!(Percentiles::new(Vec::new()).at(50.0), None);
    }
}
