//! Device state of sequences: KV pages, delta states, convolution windows and tree factors.
//!
//! A sequence owns a *slot* and takes pages from a pool that all slots share. Layers of equal mixer
//! shape form a group. The arrays of a group are adjacent, so one launch covers all its layers:
//!
//! ```text
//! keys and values   [layer in group][page][kv head][256][bytes],
//!                   page = page_table[slot][position / 256]
//! scales            [layer in group][page][kv head][256][bytes], for quantized formats
//! delta states      [slot][layer in group][v head][v][k] f32
//! windows           [slot][layer in group][taps - 1][channels] f32, oldest first
//! tree factors      [slot][layer in group][..], laid out by the delta kernels
//! hidden rows       [slot][HIDDEN_ROWS][hidden] f32, for a multi-token-prediction head: the row of
//!                   the last committed position, then those of nodes or drafted rows
//! draft rings       as keys and values, one layer each,
//!                   page = page_table[slot][position / 256 % pages]
//! draft features    [slot][FEATURE_ROWS][capture_layers * hidden] f32,
//!                   pending tree and earlier tokens
//! ```
//!
//! The layer of a multi-token-prediction head is the last of its group. Its rows behind the
//! committed ones are those that it has drafted.

use contract::{
    AttentionSpec, DraftLoadConfig, GatedDeltaSpec, KvFormat, KvFormats, KvPool, Limits,
    LoadConfig, Mixer, MtpInfo, MtpSpec,
};

use crate::launch::attention::kv_layout;
use crate::launch::draft::ring_pages;
use crate::launch::gated_delta;
use crate::launch::mtp::HiddenPool;
use crate::memory::{ALIGN, BumpAllocator};
use crate::step::{HIDDEN_ROWS, ROWS};

/// Positions per page.
pub(crate) const PAGE_SIZE: usize = 256;
/// Feature rows per slot: the widest tree, or pending committed tokens and a tree.
pub(crate) const FEATURE_ROWS: usize = ROWS;

/// Slots and page counts of a loaded model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SequenceCapacity {
    /// Maximum open sequences.
    pub(crate) sequences: usize,
    /// Maximum pages per sequence: the context, and the tree nodes or drafted rows beyond it.
    pub(crate) pages_per_sequence: usize,
    /// Pages in the shared pool.
    pub(crate) pool_pages: usize,
}

/// One array of the KV cache, all layers of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvArray {
    pub(crate) format: KvFormat,
    /// Address of the group's first layer.
    pub(crate) values: u64,
    /// Address of the scales, or 0 if the format has none.
    pub(crate) scales: u64,
    /// Bytes of one head's values at one position, without scales.
    pub(crate) value_bytes: usize,
    /// Bytes of the scales of those values.
    pub(crate) scale_bytes: usize,
}

/// Attention layers of equal shape.
#[derive(Debug, Clone)]
pub(crate) struct KvGroup {
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) k: KvArray,
    pub(crate) v: KvArray,
    /// Model indices of its layers; that of a multi-token-prediction head follows the trunk's.
    pub(crate) layers: Vec<usize>,
    /// Pages per layer, for all slots.
    pub(crate) pages: usize,
}

/// Delta layers of equal shape.
#[derive(Debug, Clone)]
pub(crate) struct DeltaGroup {
    pub(crate) spec: GatedDeltaSpec,
    pub(crate) states: u64,
    pub(crate) windows: u64,
    pub(crate) factors: u64,
    /// Bytes per layer and slot.
    pub(crate) state_bytes: usize,
    pub(crate) window_bytes: usize,
    pub(crate) factor_bytes: usize,
    /// Model indices of its layers.
    pub(crate) layers: Vec<usize>,
}

/// KV ring of one draft layer: the last positions of every slot.
#[derive(Debug, Clone)]
pub(crate) struct DraftRing {
    pub(crate) rows: KvGroup,
    /// Pages per slot. Positions wrap after them.
    pub(crate) pages: usize,
    /// The attention window in tokens.
    pub(crate) window: usize,
    /// `[slots][pages]` int32.
    pub(crate) page_table: u64,
}

/// Draft state of all slots.
#[derive(Debug, Clone)]
pub(crate) struct DraftState {
    pub(crate) rings: Vec<DraftRing>,
    pub(crate) features: u64,
    /// `capture_layers * hidden`.
    pub(crate) width: usize,
}

/// State of all slots.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) slots: SequenceCapacity,
    pub(crate) kv: Vec<KvGroup>,
    pub(crate) delta: Vec<DeltaGroup>,
    /// `[slots][pages]` int32.
    pub(crate) page_table: u64,
    pub(crate) draft: Option<DraftState>,
    /// Hidden rows of a multi-token-prediction head.
    pub(crate) hidden: Option<HiddenPool>,
}

/// The state of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LayerState<'a> {
    /// An attention layer: its group and its index in the group.
    Kv(&'a KvGroup, usize),
    /// A delta layer: its group and its index in the group.
    Delta(&'a DeltaGroup, usize),
}

impl SequenceCapacity {
    /// Slots and pages for `limits`, with up to `drafted_rows` rows of a multi-token-prediction
    /// head per sequence.
    pub(crate) fn for_limits(limits: Limits, drafted_rows: usize) -> SequenceCapacity {
        let widest = Limits {
            tree_nodes: limits.tree_nodes.max(drafted_rows),
            ..limits
        };
        SequenceCapacity {
            sequences: limits.sequences,
            pages_per_sequence: widest.max_pages_per_sequence(PAGE_SIZE),
            pool_pages: KvPool::for_limits(limits, PAGE_SIZE).pages,
        }
    }
}

impl KvArray {
    pub(crate) fn new(format: KvFormat, head_dim: usize) -> KvArray {
        let (value_bytes, scale_bytes) = kv_layout::row_bytes(format, head_dim);
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

    /// Rows per page: KV heads times positions.
    pub(crate) fn page_rows(&self) -> usize {
        self.n_kv_heads * PAGE_SIZE
    }

    /// Stride between layers in bytes.
    pub(crate) fn layer_bytes(&self, row_bytes: usize) -> usize {
        self.pages * self.page_rows() * row_bytes
    }
}

impl DraftState {
    fn new(draft: &DraftLoadConfig, limits: Limits, arena: &mut BumpAllocator) -> DraftState {
        let (spec, slots) = (&draft.spec, limits.sequences);
        let kv = KvFormats {
            k: draft.kv,
            v: draft.kv,
        };
        let rings = spec.layers.iter().enumerate().map(|(i, layer)| {
            // The ring holds the window and a tree, or a whole prefill chunk, which is written at
            // once.
            let needed =
                ring_pages(layer.window, ROWS).max(limits.prefill_chunk.div_ceil(PAGE_SIZE));
            let capacity = SequenceCapacity::for_limits(limits, 0);
            let pages = needed.min(capacity.pages_per_sequence + 1);
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
        let shape = gated_delta::Shape::of(d);
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

    /// Stride between slots of an array with `layer_bytes` per layer.
    pub(crate) fn slot_bytes(&self, layer_bytes: usize) -> usize {
        self.layers.len() * layer_bytes
    }
}

impl State {
    /// Groups the layers and allocates their arrays: the KV cache in `kv_region`, delta states,
    /// windows and hidden rows in `state_region`, tree factors in `scratch`, draft state in
    /// `draft_region`.
    pub(crate) fn new(
        config: &LoadConfig,
        [kv_region, state_region, scratch, draft_region]: [&mut BumpAllocator; 4],
    ) -> State {
        let (spec, kv, limits) = (&config.target, config.kv, config.limits);
        let mtp = spec.mtp.as_ref().and_then(MtpSpec::attention);
        let drafted_rows = mtp.map_or(0, |_| MtpInfo::DEFAULT.max_rows);
        let slots = SequenceCapacity::for_limits(limits, drafted_rows);
        let (mut attention, mut delta): (Vec<KvGroup>, Vec<DeltaGroup>) = (Vec::new(), Vec::new());
        let mut add_attention = |a: &AttentionSpec, layer: usize| {
            let shape = (a.n_kv_heads, a.head_dim);
            let same = |g: &KvGroup| (g.n_kv_heads, g.head_dim) == shape;
            let at = attention.iter().position(same).unwrap_or_else(|| {
                attention.push(KvGroup::new(a, kv, slots.pool_pages));
                attention.len() - 1
            });
            attention[at].layers.push(layer);
        };
        for (i, layer) in spec.layers.iter().enumerate() {
            match &layer.mixer {
                Mixer::Attention(a) => add_attention(a, i),
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
        if let Some(a) = mtp {
            add_attention(a, spec.layers.len());
        }
        for group in &mut attention {
            let rows = group.layers.len() * group.pages * group.page_rows();
            group.k.allocate(kv_region, rows);
            group.v.allocate(kv_region, rows);
        }
        for group in &mut delta {
            let n = slots.sequences * group.layers.len();
            group.states = state_region.take(n * group.state_bytes);
            group.windows = state_region.take(n * group.window_bytes);
            group.factors = scratch.take(n * group.factor_bytes);
        }
        State {
            slots,
            kv: attention,
            delta,
            page_table: kv_region.take(4 * slots.sequences * slots.pages_per_sequence),
            draft: config
                .draft
                .as_ref()
                .map(|draft| DraftState::new(draft, limits, draft_region)),
            hidden: mtp.map(|_| HiddenPool {
                at: state_region.take(4 * slots.sequences * HIDDEN_ROWS * spec.hidden),
                width: spec.hidden,
                rows_per_slot: HIDDEN_ROWS,
            }),
        }
    }

    /// Number of layers with a state: the trunk's, and that of a multi-token-prediction head.
    pub(crate) fn n_layers(&self) -> usize {
        let kv: usize = self.kv.iter().map(|group| group.layers.len()).sum();
        let delta: usize = self.delta.iter().map(|group| group.layers.len()).sum();
        kv + delta
    }

    /// The state of a layer.
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

    /// All page tables with their initial entries. Sequences replace the entries of slots. The
    /// entries of rings are constant.
    pub(crate) fn page_tables(&self) -> Vec<(u64, Vec<i32>)> {
        let numbered = |pages: usize, of: usize| {
            let place = |i: usize| i32::try_from(i % of).expect("pages are far below 2^31");
            (0..self.slots.sequences * pages).map(place).collect()
        };
        let mut all = vec![(
            self.page_table,
            numbered(self.slots.pages_per_sequence, self.slots.pool_pages),
        )];
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
            // TQ3_0 stores norms once.
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
            pool_tokens: None,
        };
        let slots = |pool_pages| SequenceCapacity {
            sequences: 3,
            pages_per_sequence: 2,
            pool_pages,
        };
        assert_eq!(SequenceCapacity::for_limits(limits, 0), slots(6));
        let drafting = SequenceCapacity::for_limits(limits, 257);
        assert_eq!(drafting.pages_per_sequence, 3);
        assert_eq!(drafting.pool_pages, 6);
        for (tokens, pages) in [(0, 2), (512, 2), (513, 3), (1 << 40, 6)] {
            let pool_tokens = Some(tokens);
            assert_eq!(
                SequenceCapacity::for_limits(
                    Limits {
                        pool_tokens,
                        ..limits
                    },
                    0
                ),
                slots(pages)
            );
        }
    }
}
