//! The one comparison of values: absolute plus relative tolerance, with the worst element and its
//! index.

use std::fmt;

use contract::{KvFormat, LogitsRow, QuantType};

/// Allowed difference from an expected value: `absolute + relative * |expected|`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// In the unit of the values.
    pub absolute: f32,
    /// Relative to the expected value.
    pub relative: f32,
}

impl Tolerance {
    /// Only the sign of a zero may differ.
    pub const NONE: Tolerance = Tolerance {
        absolute: 0.0,
        relative: 0.0,
    };

    /// Two summation orders of one f32 formula.
    pub const REORDERED: Tolerance = Tolerance {
        absolute: 1e-4,
        relative: 1e-4,
    };

    /// Logits of two correct evaluations with weights of this type, on a model whose logits have a
    /// spread of 2.
    ///
    /// Block formats may round activations to eight bits, so a last digit can move a value by a
    /// whole step. The tolerance is twice the largest difference between the CPU's two paths, and
    /// between prefill and decode.
    pub fn of_logits(ty: QuantType) -> Tolerance {
        match ty {
            QuantType::F32 => Tolerance::REORDERED,
            QuantType::F16 | QuantType::BF16 => Tolerance {
                absolute: 0.005,
                relative: 0.002,
            },
            _ => Tolerance {
                absolute: 0.2,
                relative: 0.02,
            },
        }
    }

    /// The same for a KV cache of this type, where a last digit can move a key or a value by a
    /// whole step. For the coarsest types, it is twice the largest difference seen on a GPU.
    pub fn of_cache(format: KvFormat) -> Tolerance {
        match format {
            KvFormat::F32 => Tolerance::REORDERED,
            KvFormat::F16 | KvFormat::Bf16 => Tolerance {
                absolute: 0.005,
                relative: 0.002,
            },
            KvFormat::Q8_0 | KvFormat::Q5_0 | KvFormat::Q5_1 => Tolerance {
                absolute: 0.05,
                relative: 0.01,
            },
            KvFormat::Q4_0 | KvFormat::Q4_1 | KvFormat::Tq3_0 => Tolerance {
                absolute: 0.15,
                relative: 0.02,
            },
        }
    }

    /// The larger of two tolerances.
    pub fn or(self, other: Tolerance) -> Tolerance {
        Tolerance {
            absolute: self.absolute.max(other.absolute),
            relative: self.relative.max(other.relative),
        }
    }

    fn allowed(self, expected: f32) -> f32 {
        self.absolute + self.relative * expected.abs()
    }
}

/// Differences between two rows of values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Agreement {
    /// The largest absolute difference.
    pub worst: f32,
    /// Its index; 0 if nothing differs.
    pub at: usize,
    /// The mean absolute difference.
    pub mean: f32,
}

/// Two rows of values that differ by more than the tolerance.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Difference {
    /// The lengths differ.
    #[error("{found} values instead of {expected}")]
    Length {
        /// Number of values found.
        found: usize,
        /// Number of values expected.
        expected: usize,
    },
    /// Values exceed the tolerance.
    #[error(
        "element {at} of {total} is {found:e} instead of {expected:e}: {excess:.2} times what is allowed; \
         {wrong} elements are off"
    )]
    Values {
        /// The element that exceeds its tolerance most.
        at: usize,
        /// Number of elements.
        total: usize,
        /// The value found there.
        found: f32,
        /// The expected value.
        expected: f32,
        /// The difference there relative to the tolerance.
        excess: f32,
        /// Number of elements that exceed the tolerance.
        wrong: usize,
    },
    /// Bits differ although they must be equal.
    #[error("element {at} of {total} is {found:e} instead of {expected:e}, bit for bit")]
    Bits {
        /// The first element that differs.
        at: usize,
        /// Number of elements.
        total: usize,
        /// The value found there.
        found: f32,
        /// The expected value.
        expected: f32,
    },
}

/// Compares `found` with `expected` element by element. Infinities must be equal; a NaN always
/// fails.
pub fn compare(
    found: &[f32],
    expected: &[f32],
    tolerance: Tolerance,
) -> Result<Agreement, Difference> {
    same_length(found, expected)?;
    let mut agreement = Agreement {
        worst: 0.0,
        at: 0,
        mean: 0.0,
    };
    let (mut sum, mut wrong) = (0.0_f64, 0);
    let mut worst_excess = (0.0_f32, 0);
    for (at, (f, e)) in found.iter().zip(expected).enumerate() {
        let difference = if f == e { 0.0 } else { (f - e).abs() };
        let allowed = tolerance.allowed(*e);
        if difference > agreement.worst {
            (agreement.worst, agreement.at) = (difference, at);
        }
        sum += f64::from(difference);
        let within = difference == 0.0 || (difference.is_finite() && difference <= allowed);
        if !within {
            wrong += 1;
            let excess = if allowed > 0.0 && difference.is_finite() {
                difference / allowed
            } else {
                f32::INFINITY
            };
            if excess > worst_excess.0 {
                worst_excess = (excess, at);
            }
        }
    }
    agreement.mean = (sum / found.len().max(1) as f64) as f32;
    if wrong == 0 {
        return Ok(agreement);
    }
    let (excess, at) = worst_excess;
    Err(Difference::Values {
        at,
        total: found.len(),
        found: found[at],
        expected: expected[at],
        excess,
        wrong,
    })
}

/// Compares bit patterns.
pub fn same_bits(found: &[f32], expected: &[f32]) -> Result<(), Difference> {
    same_length(found, expected)?;
    let mut pairs = found.iter().zip(expected);
    match pairs.position(|(f, e)| f.to_bits() != e.to_bits()) {
        None => Ok(()),
        Some(at) => Err(Difference::Bits {
            at,
            total: found.len(),
            found: found[at],
            expected: expected[at],
        }),
    }
}

fn same_length(found: &[f32], expected: &[f32]) -> Result<(), Difference> {
    if found.len() == expected.len() {
        return Ok(());
    }
    Err(Difference::Length {
        found: found.len(),
        expected: expected.len(),
    })
}

/// Required precision of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    /// Bit for bit.
    BitExact,
    /// Within a tolerance.
    Within(Tolerance),
}

/// Two different rows.
#[derive(Debug, Clone, PartialEq)]
pub struct RowDifference {
    field: &'static str,
    detail: String,
}

impl fmt::Display for RowDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.detail)
    }
}

/// Compares two rows over the same ids in every field.
pub fn compare_rows(
    found: &LogitsRow,
    expected: &LogitsRow,
    precision: Precision,
) -> Result<(), RowDifference> {
    if found.ids != expected.ids {
        let at = found
            .ids
            .iter()
            .zip(&expected.ids)
            .position(|(f, e)| f != e);
        let lengths = (found.ids.len(), expected.ids.len());
        return Err(RowDifference {
            field: "ids",
            detail: match at {
                Some(at) => format!(
                    "token {} instead of {} at {at}",
                    found.ids[at], expected.ids[at]
                ),
                None => format!("{} tokens instead of {}", lengths.0, lengths.1),
            },
        });
    }
    let fields = [
        ("logits", &found.logits[..], &expected.logits[..]),
        ("raw logits", &found.raw[..], &expected.raw[..]),
        (
            "log-sum-exp",
            std::slice::from_ref(&found.lse),
            std::slice::from_ref(&expected.lse),
        ),
        (
            "raw log-sum-exp",
            std::slice::from_ref(&found.raw_lse),
            std::slice::from_ref(&expected.raw_lse),
        ),
    ];
    for (field, found, expected) in fields {
        let result = match precision {
            Precision::BitExact => same_bits(found, expected),
            Precision::Within(tolerance) => compare(found, expected, tolerance).map(|_| ()),
        };
        result.map_err(|difference| RowDifference {
            field,
            detail: difference.to_string(),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOSE: Tolerance = Tolerance {
        absolute: 0.1,
        relative: 0.01,
    };

    #[test]
    fn worst_element_exceeds_its_own_tolerance_most() {
        // 1.5 is within 0.1 + 1% of 200; 0.3 is three times the tolerance of zero.
        let error = compare(&[201.5, 0.3, 0.25], &[200.0, 0.0, 0.0], LOOSE).unwrap_err();
        match error {
            Difference::Values {
                at, wrong, excess, ..
            } => {
                assert_eq!((at, wrong), (1, 2));
                assert!((excess - 3.0).abs() < 1e-5);
            }
            other => panic!("{other}"),
        }
    }

    #[test]
    fn agreement_reports_worst_and_mean() {
        let agreement = compare(&[1.0, 2.05, 3.0], &[1.0, 2.0, 3.01], LOOSE).unwrap();
        assert_eq!(agreement.at, 1);
        assert!((agreement.worst - 0.05).abs() < 1e-6);
        assert!((agreement.mean - 0.02).abs() < 1e-6);
    }

    #[test]
    fn nan_never_agrees() {
        assert!(compare(&[f32::NAN], &[1.0], LOOSE).is_err());
        assert!(compare(&[f32::NAN], &[f32::NAN], LOOSE).is_err());
        assert!(compare(&[f32::INFINITY], &[1.0], LOOSE).is_err());
        assert!(compare(&[1.0], &[f32::INFINITY], LOOSE).is_err());
        let barred = [f32::NEG_INFINITY];
        assert!(compare(&barred, &barred, Tolerance::NONE).is_ok());
    }

    #[test]
    fn length_and_bit_differences_are_distinguished_from_values() {
        assert!(matches!(
            compare(&[1.0], &[1.0, 2.0], LOOSE),
            Err(Difference::Length {
                found: 1,
                expected: 2
            })
        ));
        assert!(compare(&[-0.0], &[0.0], Tolerance::NONE).is_ok());
        assert!(matches!(
            same_bits(&[1.0, -0.0], &[1.0, 0.0]),
            Err(Difference::Bits { at: 1, .. })
        ));
    }
}
