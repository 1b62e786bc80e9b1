//! Where sequences live on the card: pages of keys and values, delta states, windows, tree factors.
//!
//! A sequence owns a *slot* and takes pages from a pool that all slots share. Layers of equal mixer shape form a group, whose arrays stand together so that one
//! launch can work on all of them:
//!
//! ```text
//! keys and values   [layer in group][page][kv head][256][bytes], page = page_table[slot][position / 256]
//! scales            [layer in group][page][kv head][256][bytes], for coarse formats
//! delta states      [slot][layer in group][v head][v][k] f32
//! windows           [slot][layer in group][taps - 1][channels] f32, oldest first
//! tree factors      [slot][layer in group][..], laid out by the delta kernels
//! draft rings       as keys and values, one layer each, page = page_table[slot][position / 256 % pages]
//! draft features    [slot][FEATURE_ROWS][taps * hidden] f32 of the pending tree and of tokens before it
//! ```

use contract::{
    AttentionSpec, DraftPlan, GatedDeltaSpec, KvFormat, KvFormats, KvPool, Limits, Mixer, OpenPlan,
};

use crate::launch::attention::rows;
use crate::launch::delta;
use crate::launch::draft::ring_pages;
use crate::memory::{ALIGN, BumpAllocator};
use crate::step::ROWS;

/// Positions of a page.
pub(crate) const PAGE_SIZE: usize = 256;
/// KvArray of features that a slot has room for: the widest tree's, or committed tokens' that wait and a tree's.
pub(crate) const FEATURE_ROWS: usize = ROWS;

/// Pages and slots of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotPlan {
    /// Sequences open at once.
    pub(crate) n: usize,
    /// Pages of one sequence at most: the context and the nodes of a tree beyond it.
    pub(crate) pages: usize,
    /// Pages that all sequences share.
    pub(crate) pool: usize,
}

/// One array of cached rows, all layers of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvArray {
    pub(crate) format: KvFormat,
    /// Address of the group's first layer.
    pub(crate) values: u64,
    /// Address of the scales; 0 where the format has none.
    pub(crate) scales: u64,
    /// Bytes of one head's values at one position, without scales.
    pub(crate) value_bytes: usize,
    /// Bytes of the scales belonging to them.
    pub(crate) scale_bytes: usize,
}

/// Attention layers of one shape.
#[derive(Debug, Clone)]
pub(crate) struct KvGroup {
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) k: KvArray,
    pub(crate) v: KvArray,
    /// Indices of its layers in the model.
    pub(crate) layers: Vec<usize>,
    /// Pages of one layer, those of all slots.
    pub(crate) pages: usize,
}

/// Delta layers of one shape.
#[derive(Debug, Clone)]
pub(crate) struct DeltaGroup {
    pub(crate) spec: GatedDeltaSpec,
    pub(crate) states: u64,
    pub(crate) windows: u64,
    pub(crate) factors: u64,
    /// Bytes of one layer of one slot.
    pub(crate) state_bytes: usize,
    pub(crate) window_bytes: usize,
    pub(crate) factor_bytes: usize,
    /// Indices of its layers in the model.
    pub(crate) layers: Vec<usize>,
}

/// Keys and values of one draft layer: the last positions of every slot.
#[derive(Debug, Clone)]
pub(crate) struct DraftRing {
    pub(crate) rows: KvGroup,
    /// Pages of one slot; positions begin again on the first.
    pub(crate) pages: usize,
    /// How far back the layer sees.
    pub(crate) window: usize,
    /// `[slots][pages]` int32.
    pub(crate) page_table: u64,
}

/// What slots hold for a draft.
#[derive(Debug, Clone)]
pub(crate) struct DraftState {
    pub(crate) rings: Vec<DraftRing>,
    pub(crate) features: u64,
    /// `taps * hidden`.
    pub(crate) width: usize,
}

/// Everything that slots hold.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) slots: SlotPlan,
    pub(crate) kv: Vec<KvGroup>,
    pub(crate) delta: Vec<DeltaGroup>,
    /// `[slots][pages]` int32.
    pub(crate) page_table: u64,
    pub(crate) draft: Option<DraftState>,
}

/// What one layer has of it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LayerState<'a> {
    /// An attention layer: its group and its index there.
    Kv(&'a KvGroup, usize),
    /// A delta layer: its group and its index there.
    Delta(&'a DeltaGroup, usize),
}

impl SlotPlan {
    /// What limits ask for.
    pub(crate) fn of(limits: Limits) -> SlotPlan {
        SlotPlan {
            n: limits.sequences,
            pages: limits.max_pages_per_sequence(PAGE_SIZE),
            pool: KvPool::for_limits(limits, PAGE_SIZE).pages,
        }
    }
}

impl KvArray {
    pub(crate) fn new(format: KvFormat, head_dim: usize) -> KvArray {
        let (value_bytes, scale_bytes) = rows::row_bytes(format, head_dim);
        KvArray {
            format,
            values: 0,
            scales: 0,
            value_bytes,
            scale_bytes,
        }
    }

    fn allocate(&mut self, arena: &mut BumpAllocator, rows: usize) {
        self.values = arena.take(rows * self.value_bytes);
        if self.scale_bytes > 0 {
            self.scales = arena.take(rows * self.scale_bytes);
        }
    }
}

impl KvGroup {
    fn new(a: &AttentionSpec, kv: KvFormats, pages: usize) -> KvGroup {
        KvGroup {
            n_kv_heads: a.n_kv_heads,
            head_dim: a.head_dim,
            k: KvArray::new(kv.k, a.head_dim),
            v: KvArray::new(kv.v, a.head_dim),
            layers: Vec::new(),
            pages,
        }
    }

    /// KvArray of one page: kv heads times positions.
    pub(crate) fn page_rows(&self) -> usize {
        self.n_kv_heads * PAGE_SIZE
    }

    /// Bytes from one layer's values to the next layer's.
    pub(crate) fn layer_bytes(&self, row_bytes: usize) -> usize {
        self.pages * self.page_rows() * row_bytes
    }
}

impl DraftState {
    fn new(draft: &DraftPlan, limits: Limits, arena: &mut BumpAllocator) -> DraftState {
        let (spec, slots) = (&draft.spec, limits.sequences);
        let kv = KvFormats {
            k: draft.kv,
            v: draft.kv,
        };
        let rings = spec.layers.iter().enumerate().map(|(i, layer)| {
            // The window and a tree beside it, or a chunk, whose rows are all written at once.
            let needed =
                ring_pages(layer.window, ROWS).max(limits.prefill_chunk.div_ceil(PAGE_SIZE));
            let pages = needed.min(SlotPlan::of(limits).pages + 1);
            let mut rows = KvGroup::new(&layer.attention, kv, slots * pages);
            rows.layers.push(i);
            let n = rows.pages * rows.page_rows();
            rows.k.allocate(arena, n);
            rows.v.allocate(arena, n);
            DraftRing {
                rows,
                pages,
                window: layer.window,
                page_table: arena.take(4 * slots * pages),
            }
        });
        let rings = rings.collect();
        let width = spec.fc.cols;
        DraftState {
            rings,
            features: arena.take(4 * slots * FEATURE_ROWS * width),
            width,
        }
    }
}

impl DeltaGroup {
    fn new(d: &GatedDeltaSpec, nodes: usize) -> DeltaGroup {
        let shape = delta::Shape::of(d);
        DeltaGroup {
            spec: d.clone(),
            states: 0,
            windows: 0,
            factors: 0,
            state_bytes: shape.state_bytes(),
            window_bytes: shape.window_bytes(),
            factor_bytes: shape.factor_bytes(nodes).next_multiple_of(ALIGN as usize),
            layers: Vec::new(),
        }
    }

    fn same_shape(&self, d: &GatedDeltaSpec) -> bool {
        let of = |d: &GatedDeltaSpec| (d.n_k_heads, d.n_v_heads, d.k_dim, d.v_dim, d.head_map);
        of(&self.spec) == of(d)
    }

    /// Bytes from one slot's states to the next slot's; likewise for the other arrays.
    pub(crate) fn slot_bytes(&self, layer_bytes: usize) -> usize {
        self.layers.len() * layer_bytes
    }
}

impl State {
    /// Groups the layers and carves cached rows from `kv_region`, states and windows from `state_region`,
    /// tree factors from `scratch`, and what the draft needs from `draft_region`.
    pub(crate) fn new(
        plan: &OpenPlan,
        [kv_region, state_region, scratch, draft_region]: [&mut BumpAllocator; 4],
    ) -> State {
        let (spec, kv, limits) = (&plan.target, plan.kv, plan.limits);
        let slots = SlotPlan::of(limits);
        let (mut attention, mut delta): (Vec<KvGroup>, Vec<DeltaGroup>) = (Vec::new(), Vec::new());
        for (i, layer) in spec.layers.iter().enumerate() {
            match &layer.mixer {
                Mixer::Attention(a) => {
                    let shape = (a.n_kv_heads, a.head_dim);
                    let same = |g: &KvGroup| (g.n_kv_heads, g.head_dim) == shape;
                    let at = attention.iter().position(same).unwrap_or_else(|| {
                        attention.push(KvGroup::new(a, kv, slots.pool));
                        attention.len() - 1
                    });
                    attention[at].layers.push(i);
                }
                Mixer::GatedDelta(d) => {
                    let same = |g: &DeltaGroup| g.same_shape(d);
                    let at = delta.iter().position(same).unwrap_or_else(|| {
                        delta.push(DeltaGroup::new(d, limits.tree_nodes));
                        delta.len() - 1
                    });
                    delta[at].layers.push(i);
                }
            }
        }
        for group in &mut attention {
            let rows = group.layers.len() * group.pages * group.page_rows();
            group.k.allocate(kv_region, rows);
            group.v.allocate(kv_region, rows);
        }
        for group in &mut delta {
            let n = slots.n * group.layers.len();
            group.states = state_region.take(n * group.state_bytes);
            group.windows = state_region.take(n * group.window_bytes);
            group.factors = scratch.take(n * group.factor_bytes);
        }
        State {
            slots,
            kv: attention,
            delta,
            page_table: kv_region.take(4 * slots.n * slots.pages),
            draft: plan
                .draft
                .as_ref()
                .map(|draft| DraftState::new(draft, limits, draft_region)),
        }
    }

    /// The place of a layer.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn layer(&self, layer: usize) -> LayerState<'_> {
        let index = |layers: &[usize]| layers.iter().position(|l| *l == layer);
        let kv = self
            .kv
            .iter()
            .find_map(|g| Some(LayerState::Kv(g, index(&g.layers)?)));
        let delta = || {
            self.delta
                .iter()
                .find_map(|g| Some(LayerState::Delta(g, index(&g.layers)?)))
        };
        kv.or_else(delta)
            .expect("every layer of the model is in a group")
    }

    /// Every page table and its first entries. Those of slots name pages that are there and are replaced as sequences
    /// get their own; those of rings stay.
    pub(crate) fn page_tables(&self) -> Vec<(u64, Vec<i32>)> {
        let numbered = |pages: usize, of: usize| {
            let place = |i: usize| i32::try_from(i % of).expect("pages are far below 2^31");
            (0..self.slots.n * pages).map(place).collect()
        };
        let mut all = vec![(self.page_table, numbered(self.slots.pages, self.slots.pool))];
        let rings = self.draft.iter().flat_map(|draft| &draft.rings);
        all.extend(rings.map(|ring| (ring.page_table, numbered(ring.pages, ring.rows.pages))));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_arrays_take_at_most_the_format_bytes() {
        for format in KvFormat::ALL {
            let rows = KvArray::new(format, 256);
            let (found, most) = (rows.value_bytes + rows.scale_bytes, format.bytes(256));
            // The norms of TQ3_0 are kept once.
            assert!(found == most || format == KvFormat::Tq3_0 && found == 100);
        }
    }

    #[test]
    fn page_count_includes_the_tree_nodes() {
        let limits = Limits {
            sequences: 3,
            context: 256,
            tree_nodes: 1,
            prefill_chunk: 64,
            pool: None,
        };
        let slots = |pool| SlotPlan {
            n: 3,
            pages: 2,
            pool,
        };
        assert_eq!(SlotPlan::of(limits), slots(6));
        for (tokens, pages) in [(0, 2), (512, 2), (513, 3), (1 << 40, 6)] {
            let pool = Some(tokens);
            assert_eq!(SlotPlan::of(Limits { pool, ..limits }), slots(pages));
        }
    }
}
