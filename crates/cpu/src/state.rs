//! Per-sequence device state: KV cache, delta states, convolution windows and pending trees.

use contract::protocol::SequenceState;
use contract::{
    AttentionSpec, GatedDeltaSpec, KvFormats, Limits, Mixer, ModelSpec, MtpInfo, MtpSpec, NodeIdx,
    Tree,
};

use crate::draft_cache::DraftCache;
use crate::kernels::Kernels;
use crate::kv_shape::KvShape;
use crate::mtp_state::{MAX_UNCACHED_ROWS, MtpState};
use crate::reference::delta::PendingUpdate;
use crate::snapshot_pages::SavedPages;
use crate::thread_pool::ThreadPool;

/// An open sequence. Dropping it frees its memory.
pub(crate) struct CpuSequence {
    /// Maximum number of committed tokens.
    pub(crate) max_len: usize,
    /// Committed tokens.
    pub(crate) position: usize,
    /// Pages taken from the pool.
    pub(crate) pages: usize,
    /// State of each layer, bottom to top, then of the multi-token-prediction head's.
    pub(crate) layers: Vec<LayerState>,
    /// The pending tree: verified, but not committed or discarded.
    pub(crate) pending: Option<Tree>,
    /// Cache of the draft model, if any.
    pub(crate) draft: Option<DraftCache>,
    /// State of the multi-token-prediction head, if any. Its layer is the last of `layers`.
    pub(crate) mtp: Option<MtpState>,
}

/// State of one layer of a sequence.
pub(crate) enum LayerState {
    /// KV cache.
    Attention(KvCache),
    /// Delta state and convolution window.
    Delta(Box<DeltaState>),
}

/// KV cache of one attention layer: keys and values as stored rows `[max_len + tree_nodes,
/// n_kv_heads, row]`.
///
/// The vectors reserve address space for the longest sequence; memory is committed when rows are
/// written. [`CpuSequence::pages`] counts the pool's pages.
///
/// Row `position + i` holds node `i` of a pending tree; other rows from `position` on are
/// undefined.
pub(crate) struct KvCache {
    pub(crate) keys: Vec<u8>,
    pub(crate) values: Vec<u8>,
    pub(crate) shape: KvShape,
    /// Pages of committed rows that snapshots share.
    pub(crate) saved: SavedPages,
}

/// State of one delta layer and its deferred updates.
pub(crate) struct DeltaState {
    /// `[n_v_heads, k_dim, v_dim]`: the committed state without the updates in `deferred`.
    pub(crate) state: Vec<f32>,
    /// `[conv_taps - 1, channels]`, oldest first, before the SiLU. Always up to date.
    pub(crate) window: Vec<f32>,
    /// Convolution inputs of the pending nodes, `[n_nodes, channels]`.
    pub(crate) rows: Vec<f32>,
    /// Updates of the pending nodes.
    pub(crate) pending: TreeUpdates,
    /// Updates of the last committed tree.
    pub(crate) deferred: TreeUpdates,
    /// The committed path through `deferred`; empty once `state` includes it.
    pub(crate) deferred_path: Vec<NodeIdx>,
    shape: DeltaShape,
}

/// Rank-one state updates of the nodes of a tree. They replace one state per node.
#[derive(Default)]
pub(crate) struct TreeUpdates {
    /// Number of nodes in the buffers.
    pub(crate) n_nodes: usize,
    /// `[n_nodes, n_k_heads, k_dim]`.
    pub(crate) k: Vec<f32>,
    /// `[n_v_heads, n_nodes, v_dim]`.
    pub(crate) u: Vec<f32>,
    /// `[n_v_heads, n_nodes]`: `e^g`.
    pub(crate) decay: Vec<f32>,
}

/// The dimensions of a [`GatedDeltaSpec`] that its state needs.
#[derive(Debug, Clone, Copy)]
struct DeltaShape {
    n_k_heads: usize,
    n_v_heads: usize,
    k_dim: usize,
    v_dim: usize,
    channels: usize,
    head_map: contract::HeadMap,
}

/// Bytes of one sequence: `(KV cache of a token, delta states and windows, pending trees)`.
pub(crate) fn sequence_bytes(spec: &ModelSpec, kv: KvFormats, limits: Limits) -> (u64, u64, u64) {
    let per_token = |a: &AttentionSpec| {
        let values = a.n_kv_heads * a.head_dim;
        (kv.k.bytes(values) + kv.v.bytes(values)) as u64
    };
    let state = |d: &GatedDeltaSpec| 4 * (d.state_values() + d.window_values()) as u64;
    let per_node = |d: &GatedDeltaSpec| {
        let factors = d.n_k_heads * d.k_dim + d.n_v_heads * (d.v_dim + 1);
        4 * (2 * factors + d.channels()) as u64
    };
    let drafted = MtpInfo::DEFAULT.max_rows as u64;
    let mtp = spec.mtp.as_ref().and_then(MtpSpec::attention);
    let mtp_rows = mtp.map_or(0, |attention| {
        let row = 4 * spec.hidden as u64;
        // The hidden rows of a tree's nodes and of uncached tokens, and what is kept of drafted
        // rows. A commit adds its path to the uncached tokens before they are cached.
        let uncached = (MAX_UNCACHED_ROWS + limits.tree_nodes) as u64;
        row * (limits.tree_nodes as u64 + uncached) + drafted * (row + per_token(attention))
    });
    let mtp_state = mtp.map_or(0, |_| 4 * spec.hidden as u64);
    (
        spec.kv_layers().map(per_token).sum(),
        spec.delta_layers().map(state).sum::<u64>() + mtp_state,
        spec.delta_layers().map(per_node).sum::<u64>() * limits.tree_nodes as u64 + mtp_rows,
    )
}

impl SequenceState for CpuSequence {
    fn max_len(&self) -> usize {
        self.max_len
    }

    fn position(&self) -> usize {
        self.position
    }

    fn pending(&self) -> Option<&Tree> {
        self.pending.as_ref()
    }

    fn mtp_depths(&self) -> &[usize] {
        self.mtp.as_ref().map_or(&[], MtpState::depths)
    }
}

impl CpuSequence {
    /// An empty sequence; `kv` gives the formats and whether quantized rows are rotated.
    pub(crate) fn new(
        spec: &ModelSpec,
        kv: (KvFormats, bool),
        limits: Limits,
        max_len: usize,
    ) -> CpuSequence {
        let slots = max_len + limits.tree_nodes;
        let layer = |mixer: &Mixer| match mixer {
            Mixer::Attention(a) => LayerState::Attention(KvCache::new(a, kv, slots)),
            Mixer::GatedDelta(d) => LayerState::Delta(Box::new(DeltaState::new(d))),
        };
        let mut layers: Vec<LayerState> = spec.layers.iter().map(|l| layer(&l.mixer)).collect();
        if let Some(attention) = spec.mtp.as_ref().and_then(MtpSpec::attention) {
            // Drafted rows are stored behind the committed ones.
            let slots = max_len + limits.tree_nodes.max(MtpInfo::DEFAULT.max_rows);
            layers.push(LayerState::Attention(KvCache::new(attention, kv, slots)));
        }
        CpuSequence {
            max_len,
            position: 0,
            pages: 0,
            layers,
            pending: None,
            draft: None,
            mtp: spec.mtp.as_ref().map(|_| MtpState::new(spec.hidden)),
        }
    }

    /// Forgets the rows that the multi-token-prediction head has drafted.
    pub(crate) fn drop_drafted(&mut self) {
        if let Some(mtp) = &mut self.mtp {
            mtp.drop_drafted();
        }
    }

    /// Applies the deferred updates of every delta layer.
    pub(crate) fn apply_deferred(&mut self, pool: &ThreadPool, kernels: &Kernels) {
        for layer in &mut self.layers {
            if let LayerState::Delta(delta) = layer {
                delta.apply_deferred(pool, kernels);
            }
        }
    }

    /// Commits `path` of the pending tree: compacts KV rows, shifts windows, and defers the state
    /// updates.
    pub(crate) fn commit(&mut self, path: &[NodeIdx]) {
        let position = self.position;
        // The multi-token-prediction head caches its rows later.
        let trunk = self.layers.len() - usize::from(self.mtp.is_some());
        for layer in &mut self.layers[..trunk] {
            match layer {
                LayerState::Attention(cache) => cache.compact(position, path),
                LayerState::Delta(delta) => delta.commit_path(path),
            }
        }
        if let Some(draft) = &mut self.draft {
            draft.commit(path);
        }
        if let (Some(mtp), Some(tree)) = (&mut self.mtp, &self.pending) {
            mtp.commit(tree, path);
        }
        self.position += path.len();
        self.pending = None;
    }
}

impl LayerState {
    /// The KV cache of an attention layer.
    pub(crate) fn attention(&mut self) -> Option<&mut KvCache> {
        match self {
            LayerState::Attention(cache) => Some(cache),
            LayerState::Delta(_) => None,
        }
    }

    /// The state of a delta layer.
    pub(crate) fn delta(&mut self) -> Option<&mut DeltaState> {
        match self {
            LayerState::Delta(delta) => Some(delta),
            LayerState::Attention(_) => None,
        }
    }
}

impl KvCache {
    pub(crate) fn new(
        spec: &AttentionSpec,
        (kv, rotate): (KvFormats, bool),
        slots: usize,
    ) -> KvCache {
        let shape = KvShape::new(spec, kv, rotate);
        KvCache {
            keys: vec![0; slots * shape.k_bytes()],
            values: vec![0; slots * shape.v_bytes()],
            shape,
            saved: SavedPages::default(),
        }
    }

    /// Copies the rows of `path` to `position ..` unchanged. A node's index is at least its depth,
    /// so copying in path order overwrites no row that is still needed.
    fn compact(&mut self, position: usize, path: &[NodeIdx]) {
        let (k_bytes, v_bytes) = (self.shape.k_bytes(), self.shape.v_bytes());
        for (depth, node) in path.iter().enumerate() {
            if node.index() != depth {
                let (from, to) = (position + node.index(), position + depth);
                for (rows, bytes) in [(&mut self.keys, k_bytes), (&mut self.values, v_bytes)] {
                    rows.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
                }
            }
        }
    }
}

impl DeltaState {
    pub(crate) fn new(spec: &GatedDeltaSpec) -> DeltaState {
        DeltaState {
            state: vec![0.0; spec.state_values()],
            window: vec![0.0; spec.window_values()],
            rows: Vec::new(),
            pending: TreeUpdates::default(),
            deferred: TreeUpdates::default(),
            deferred_path: Vec::new(),
            shape: DeltaShape {
                n_k_heads: spec.n_k_heads,
                n_v_heads: spec.n_v_heads,
                k_dim: spec.k_dim,
                v_dim: spec.v_dim,
                channels: spec.channels(),
                head_map: spec.head_map,
            },
        }
    }

    /// Sizes the buffers for a pending tree. They keep their capacity.
    pub(crate) fn prepare(&mut self, n_nodes: usize) {
        let DeltaShape {
            n_k_heads,
            n_v_heads,
            k_dim,
            v_dim,
            channels,
            ..
        } = self.shape;
        self.rows.resize(n_nodes * channels, 0.0);
        let factors = &mut self.pending;
        factors.n_nodes = n_nodes;
        factors.k.resize(n_nodes * n_k_heads * k_dim, 0.0);
        factors.u.resize(n_v_heads * n_nodes * v_dim, 0.0);
        factors.decay.resize(n_v_heads * n_nodes, 0.0);
    }

    /// Shifts the window past `path` and defers its state updates.
    fn commit_path(&mut self, path: &[NodeIdx]) {
        assert!(
            self.deferred_path.is_empty(),
            "verify applies deferred updates first"
        );
        let Self {
            window,
            rows,
            shape: DeltaShape { channels, .. },
            ..
        } = self;
        let row = |node: &NodeIdx| &rows[node.index() * *channels..][..*channels];
        shift_window(window, *channels, path.len(), path.iter().map(row));
        std::mem::swap(&mut self.pending, &mut self.deferred);
        self.deferred_path.extend_from_slice(path);
    }

    /// Shifts the window past `rows` `[n, channels]`.
    pub(crate) fn shift_window(&mut self, rows: &[f32]) {
        let channels = self.shape.channels;
        let n = rows.len() / channels;
        shift_window(&mut self.window, channels, n, rows.chunks_exact(channels));
    }

    /// Applies the deferred updates to the state.
    fn apply_deferred(&mut self, pool: &ThreadPool, kernels: &Kernels) {
        if self.deferred_path.is_empty() {
            return;
        }
        let deferred = DeferredUpdates {
            factors: &self.deferred,
            path: &self.deferred_path,
            shape: self.shape,
        };
        let size = self.shape.k_dim * self.shape.v_dim;
        pool.for_each_item(
            self.state.chunks_exact_mut(size).enumerate(),
            |(head, state)| {
                deferred.apply(kernels, head, state);
            },
        );
        self.deferred_path.clear();
    }

    /// Parts for a forward pass: `(state, deferred updates, buffers for pending updates)`.
    ///
    /// The caller applies [`DeferredUpdates`] to every head, then calls
    /// [`DeltaState::mark_applied`].
    pub(crate) fn parts(&mut self) -> (&mut [f32], DeferredUpdates<'_>, &mut TreeUpdates) {
        let deferred = DeferredUpdates {
            factors: &self.deferred,
            path: &self.deferred_path,
            shape: self.shape,
        };
        (&mut self.state, deferred, &mut self.pending)
    }

    /// Marks the deferred updates as applied.
    pub(crate) fn mark_applied(&mut self) {
        self.deferred_path.clear();
    }
}

/// Shifts a window `[taps, channels]`: drops the oldest rows and appends the last of `n` new ones.
fn shift_window<'a>(
    window: &mut [f32],
    channels: usize,
    n: usize,
    rows: impl Iterator<Item = &'a [f32]>,
) {
    let taps = window.len() / channels;
    let stay = taps.saturating_sub(n);
    window.copy_within((taps - stay) * channels.., 0);
    let slots = window[stay * channels..].chunks_exact_mut(channels);
    for (slot, row) in slots.zip(rows.skip(n.saturating_sub(taps))) {
        slot.copy_from_slice(row);
    }
}

/// Updates of committed tokens that a state does not include yet.
#[derive(Clone, Copy)]
pub(crate) struct DeferredUpdates<'a> {
    factors: &'a TreeUpdates,
    path: &'a [NodeIdx],
    shape: DeltaShape,
}

impl DeferredUpdates<'_> {
    /// Applies the updates to the state of value head `head`, `[k_dim, v_dim]`, node by node.
    pub(crate) fn apply(&self, kernels: &Kernels, head: usize, state: &mut [f32]) {
        for update in self.updates(head, 0..self.shape.v_dim) {
            (kernels.delta_update)(state, update.k, update.u, update.decay);
        }
    }

    /// The updates for value head `head` in order, restricted to some columns.
    pub(crate) fn updates(
        &self,
        head: usize,
        columns: std::ops::Range<usize>,
    ) -> impl Iterator<Item = PendingUpdate<'_>> {
        let DeltaShape {
            n_k_heads,
            n_v_heads,
            k_dim,
            v_dim,
            head_map,
            ..
        } = self.shape;
        let k_head = head_map.k_head(head, n_k_heads, n_v_heads);
        let factors = self.factors;
        self.path.iter().map(move |node| {
            let at = head * factors.n_nodes + node.index();
            PendingUpdate {
                k: &factors.k[(node.index() * n_k_heads + k_head) * k_dim..][..k_dim],
                u: &factors.u[at * v_dim..][..v_dim][columns.clone()],
                decay: factors.decay[at],
            }
        })
    }
}
