//! The dispatch table of vector functions; [`crate::linear`] has the products with stored weights.
//!
//! Each entry implements the function of the same name in [`crate::reference`]. The table is chosen
//! when a runner is opened; tables differ only in rounding. The result for one row, head or key
//! must not depend on the number of others in the call (batch-invariant).

use crate::reference::{activation, conv, delta, kv, matmul, norm, rows};

/// Signature of [`delta::update_columns`].
pub type DeltaUpdateColumns = fn(
    delta::Columns<'_>,
    &[delta::PendingUpdate<'_>],
    &mut [f32],
    delta::Token<'_>,
    [&mut [f32]; 2],
);

/// Signature of [`delta::update_read_out`].
pub type DeltaUpdateReadOut =
    fn(Option<&[f32]>, &mut [f32], delta::PendingUpdate<'_>, delta::Token<'_>, [&mut [f32]; 2]);

/// A dispatch table.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    /// [`norm::rms`].
    pub rms: fn(&[f32], &[f32], f32, &mut [f32]),
    /// [`norm::rms_in_place`].
    pub rms_in_place: fn(&mut [f32], &[f32], f32),
    /// [`norm::gated_rms`].
    pub gated_rms: fn(&mut [f32], &[f32], &[f32], f32),
    /// [`norm::l2`].
    pub l2: fn(&mut [f32], f32, f32),
    /// [`activation::swiglu`].
    pub swiglu: fn(&[f32], &[f32], &mut [f32]),
    /// [`activation::geglu`].
    pub geglu: fn(&[f32], &[f32], &mut [f32]),
    /// [`activation::sigmoid_gate`].
    pub sigmoid_gate: fn(&mut [f32], &[f32]),
    /// [`activation::add`].
    pub add: fn(&mut [f32], &[f32]),
    /// [`activation::exp_sum`].
    pub exp_sum: fn(&mut [f32], f32) -> f32,
    /// [`conv::row`].
    pub conv_row: fn(&[&[f32]], &[f32], &mut [f32]),
    /// [`delta::read_out`].
    pub delta_read_out: fn(&[f32], delta::Token<'_>, &mut [f32], &mut [f32]),
    /// [`delta::update_state`].
    pub delta_update: fn(&mut [f32], &[f32], &[f32], f32),
    /// [`delta::update_columns`].
    pub delta_update_columns: DeltaUpdateColumns,
    /// [`delta::update_read_out`].
    pub delta_update_read_out: DeltaUpdateReadOut,
    /// [`matmul::accumulate`].
    pub accumulate: fn(&[f32], &[f32], usize, &mut [f32]),
    /// [`kv::dot_f16`].
    pub dot_f16: fn(&[f32], &[u8]) -> f32,
    /// [`kv::dots_f16`], bit-identical to `dot_f16`.
    pub dots_f16: fn(&[f32], &[u8], &mut [f32]),
    /// [`kv::dot_q8_0`].
    pub dot_q8_0: fn(&[f32], &[u8]) -> f32,
    /// [`kv::dot_q4_0`].
    pub dot_q4_0: fn(&[f32], &[u8]) -> f32,
    /// [`kv::decode_f16`].
    pub decode_f16: fn(&[u8], &mut [f32]),
    /// [`kv::decode_q8_0`].
    pub decode_q8_0: fn(&[u8], &mut [f32]),
    /// [`kv::decode_q4_0`].
    pub decode_q4_0: fn(&[u8], &mut [f32]),
    /// [`rows::max`].
    pub max: fn(&[f32]) -> f32,
    /// [`rows::sum_exp`].
    pub sum_exp: fn(&[f32], f32) -> f32,
}

impl Kernels {
    /// The reference functions.
    pub const fn scalar() -> Kernels {
        Kernels {
            rms: norm::rms,
            rms_in_place: norm::rms_in_place,
            gated_rms: norm::gated_rms,
            l2: norm::l2,
            swiglu: activation::swiglu,
            geglu: activation::geglu,
            sigmoid_gate: activation::sigmoid_gate,
            add: activation::add,
            exp_sum: activation::exp_sum,
            conv_row: conv::row,
            delta_read_out: delta::read_out,
            delta_update: delta::update_state,
            delta_update_columns: delta::update_columns,
            delta_update_read_out: delta::update_read_out,
            accumulate: matmul::accumulate,
            dot_f16: kv::dot_f16,
            dots_f16: kv::dots_f16,
            dot_q8_0: kv::dot_q8_0,
            dot_q4_0: kv::dot_q4_0,
            decode_f16: kv::decode_f16,
            decode_q8_0: kv::decode_q8_0,
            decode_q4_0: kv::decode_q4_0,
            max: rows::max,
            sum_exp: rows::sum_exp,
        }
    }
}
