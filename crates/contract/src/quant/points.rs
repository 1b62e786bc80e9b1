//! Rows of the IQ formats, with or without an importance matrix.

use std::sync::LazyLock;

use super::grid;
use super::point_search::{PlainWeights, PointSearch, Refit};
use super::point_set::PointSet;
use super::quant_type::QuantType;
use super::scale_search::ALL_ZERO_BELOW;
use super::{iq1, iq1_search, iq2, iq3};

static SET_IQ2_XXS: LazyLock<PointSet<8>> = LazyLock::new(|| PointSet::new(&grid::IQ2_XXS, 3, 2));
static SET_IQ2_XS: LazyLock<PointSet<8>> = LazyLock::new(|| PointSet::new(&grid::IQ2_XS, 3, 2));
static SET_IQ2_S: LazyLock<PointSet<8>> = LazyLock::new(|| PointSet::new(&grid::IQ2_S, 3, 1));
static SET_IQ1: LazyLock<PointSet<8>> = LazyLock::new(|| PointSet::new(&grid::IQ1, 3, 3));
static SET_IQ3_XXS: LazyLock<PointSet<4>> = LazyLock::new(|| PointSet::new(&grid::IQ3_XXS, 8, 2));
static SET_IQ3_S: LazyLock<PointSet<4>> = LazyLock::new(|| PointSet::new(&grid::IQ3_S, 8, 3));

const IQ2_XXS: PointSearch<8> = PointSearch {
    set: || &SET_IQ2_XXS,
    run: 32,
    has_even_signs: true,
    plain_weights: PlainWeights::Even,
    mean_factor: 1.0,
    zero_below: ALL_ZERO_BELOW,
    trials: 6,
    step: 0.1,
    refit: Refit::Always,
    d_factor: 1.0,
};
const IQ2_XS: PointSearch<8> = PointSearch {
    set: || &SET_IQ2_XS,
    run: 16,
    trials: 9,
    refit: Refit::OffGrid,
    ..IQ2_XXS
};
const IQ2_S: PointSearch<8> = PointSearch {
    set: || &SET_IQ2_S,
    has_even_signs: false,
    plain_weights: PlainWeights::SquareAndMean,
    mean_factor: 2.0,
    zero_below: 1e-8,
    d_factor: 0.9875,
    ..IQ2_XS
};
const IQ3_XXS: PointSearch<4> = PointSearch {
    set: || &SET_IQ3_XXS,
    run: 32,
    has_even_signs: true,
    plain_weights: PlainWeights::Square,
    mean_factor: 2.0,
    zero_below: 1e-8,
    trials: 15,
    step: 0.2,
    refit: Refit::OffGrid,
    d_factor: 1.0125,
};
const IQ3_S: PointSearch<4> = PointSearch {
    set: || &SET_IQ3_S,
    has_even_signs: false,
    zero_below: 0.0,
    trials: 9,
    refit: Refit::AllIfAny,
    d_factor: 1.033,
    ..IQ3_XXS
};

/// Writes whole rows of an IQ format; `importance` has a weight for each value.
pub(super) fn quantize(ty: QuantType, values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let (values, _) = values.as_chunks::<256>();
    let importance = importance.map(|all| all.as_chunks::<256>().0);
    let blocks = values.iter().zip(out.chunks_exact_mut(ty.block_bytes()));
    for (index, (x, b)) in blocks.enumerate() {
        let importance = importance.map(|all| &all[index]);
        b.fill(0);
        match ty {
            QuantType::IQ2_XXS => iq2::write_xxs(&IQ2_XXS.block(x, importance), b),
            QuantType::IQ2_XS => iq2::write_xs(&IQ2_XS.block(x, importance), b),
            QuantType::IQ2_S => iq2::write_s(&IQ2_S.block(x, importance), b),
            QuantType::IQ3_XXS => iq3::write_xxs(&IQ3_XXS.block(x, importance), b),
            QuantType::IQ3_S => iq3::write_s(&IQ3_S.block(x, importance), b),
            QuantType::IQ1_S => iq1::write_s(&iq1_search::block_s(&SET_IQ1, x, importance), b),
            QuantType::IQ1_M => iq1::write_m(&iq1_search::block_m(&SET_IQ1, x, importance), b),
            other => unreachable!("{} has no points", other.name()),
        }
    }
}
