//! Which blocks a synthetic model is made of.

/// Which blocks a model is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyntheticLayout {
    /// Two delta layers with as many value as key heads, then gated attention.
    HybridEven,
    /// Three value heads to a key head, tiled; gated attention of one key head.
    HybridTiled,
    /// Two value heads to a key head, grouped; two attention layers.
    HybridGrouped,
    /// Heads of 256 values, six to a key head, between delta layers: what large models have.
    HybridWide,
    /// As the one above, but with even numbers of all heads, so that two devices can share each
    /// layer in blocks of 256 values.
    HybridHalves,
    /// Attention only: eight query heads to a key head, no gate, norms on q and k.
    Dense,
    /// Attention only: as many key as query heads, no norms, partial rope, a head of its own.
    Plain,
    /// Widths that are multiples of 32 and of nothing more, heads in odd numbers; block formats of
    /// 256 values fall back to Q8_0.
    Odd,
    /// A delta and an attention layer with experts beside a shared one; gate and up are fused.
    HybridExperts,
    /// Attention only, experts with gate and up apart, scaled weights.
    DenseExperts,
    /// Attention only, no norms: biases, rotated pairs of neighbours, stretched positions, and
    /// factors in the second layer. What Llama and Qwen2 have.
    Neighbours,
    /// Attention only, heads of 256 values: norms behind blocks, GELU, scaled embeddings, and a
    /// window of [`SyntheticLayout::WINDOW`] tokens in all layers but the second. What Gemma has.
    Windowed,
}

impl SyntheticLayout {
    /// Every layout of dense feed-forwards.
    pub const ALL: [SyntheticLayout; 7] = [
        SyntheticLayout::HybridEven,
        SyntheticLayout::HybridTiled,
        SyntheticLayout::HybridGrouped,
        SyntheticLayout::HybridWide,
        SyntheticLayout::Dense,
        SyntheticLayout::Plain,
        SyntheticLayout::Odd,
    ];

    /// Tokens that a layer with a window sees: more than a tree has, and no multiple of a tile.
    pub const WINDOW: usize = 100;

    /// Every layout with parts that Qwen3 and later do not have.
    pub const OTHER_FAMILIES: [SyntheticLayout; 2] =
        [SyntheticLayout::Neighbours, SyntheticLayout::Windowed];

    /// Every layout of mixtures of experts.
    pub const EXPERTS: [SyntheticLayout; 2] = [
        SyntheticLayout::HybridExperts,
        SyntheticLayout::DenseExperts,
    ];
}
