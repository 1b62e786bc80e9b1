//! Keeping paths: cached rows move up, states and windows go past the nodes. The rows of a
//! multi-token-prediction head are computed anew instead ([`super::mtp`]).

use super::layer_arguments::shape;
use super::{Plan, PlanContext};
use crate::launch::attention::{self, GroupCache};
use crate::launch::gated_delta::{self, Group, Slots};
use crate::state::{DeltaGroup, KvGroup};

/// The commit of `paths` paths: one launch per group of layers.
pub(super) fn build(context: &PlanContext<'_>, paths: usize) -> Plan {
    let commit = context.addresses.commit;
    let mut plan = Plan::default();
    for group in &context.state.kv {
        plan.launches.extend(compact(context, group, paths));
    }
    for group in &context.state.delta {
        let shape = gated_delta::Shape::of(&group.spec);
        let launch = gated_delta::commit(shape, &memory(group), paths, commit);
        plan.launches.push(launch);
    }
    plan
}

/// The launch that moves the rows of a group's trunk layers; `None` if it has none.
fn compact(
    context: &PlanContext<'_>,
    group: &KvGroup,
    paths: usize,
) -> Option<crate::launch::Launch> {
    let trunk = context.spec.layers.len();
    let n_layers = group.layers.iter().filter(|layer| **layer < trunk).count();
    if n_layers == 0 {
        return None;
    }
    let a = context
        .spec
        .attention_layers()
        .find(|a| (a.n_kv_heads, a.head_dim) == (group.n_kv_heads, group.head_dim))
        .expect("a group has the shape of its layers");
    let shape = shape(a, context.load_config, context.spec.norm_eps);
    let (k, v) = (&group.k, &group.v);
    let bytes = [k.value_bytes, k.scale_bytes, v.value_bytes, v.scale_bytes];
    let cache = GroupCache {
        n_layers,
        base: [k.values, k.scales, v.values, v.scales],
        layer_stride: bytes.map(|bytes| group.layer_bytes(bytes) as u64),
        page_table: context.state.page_table,
        max_pages: context.state.slots.pages_per_sequence,
    };
    Some(attention::compact(
        &shape,
        &cache,
        paths,
        context.addresses.commit,
    ))
}

/// A group's arrays as the delta launches take them.
fn memory(group: &DeltaGroup) -> Group {
    let slots = |at: u64, layer_bytes: usize| Slots {
        at,
        stride: group.slot_bytes(layer_bytes) as u64,
    };
    let strides = [group.state_bytes, group.window_bytes, group.factor_bytes];
    Group {
        layers: group.layers.len(),
        state: slots(group.states, group.state_bytes),
        window: slots(group.windows, group.window_bytes),
        factors: slots(group.factors, group.factor_bytes),
        layer_strides: strides.map(|bytes| bytes as u64),
    }
}
