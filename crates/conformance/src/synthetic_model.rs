//! Tiny synthetic models: real block kinds and head sizes, random weights, any storage format.
//!
//! A model is built as data, not read from a file, so that layouts no file has can be tried too.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use contract::quant::quantize_row;
use contract::{
    AttentionBiases, AttentionSpec, DenseSpec, ExpertGateUp, ExpertStack, FeedForward,
    GateActivation, GatedDeltaSpec, HeadMap, LayerSpec, Mixer, ModelHash, ModelSpec, MoeSpec,
    OutputGate, QuantType, RopePairs, RopeSpec, SharedExpertSpec, WeightError, WeightRef,
    WeightSource,
};

/// A model to try a device on.
#[derive(Clone)]
pub struct SyntheticModel {
    /// What it is.
    pub spec: Arc<ModelSpec>,
    /// Its weights, in memory.
    pub weights: Arc<dyn WeightSource>,
    /// How its matrices are stored.
    pub ty: QuantType,
}

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

/// Width and feed-forward: the narrowest that every block format can store, and an odd number of
/// blocks.
const EVEN: (usize, usize) = (256, 512);
const ODD: (usize, usize) = (288, 352);
/// Not a multiple of anything a device might like.
const VOCAB: usize = 263;
const DELTA_DIM: usize = 128;
const EXPERTS: usize = 8;
const EXPERTS_USED: usize = 3;
const EXPERT_WIDTH: usize = 256;

impl SyntheticModel {
    /// A model whose matrices are stored as `ty`; vectors and convolutions stay f32, as in files.
    pub fn new(layout: SyntheticLayout, ty: QuantType, seed: u64) -> SyntheticModel {
        let (hidden, ffn) = match layout {
            SyntheticLayout::Odd => ODD,
            _ => EVEN,
        };
        let mut maker = ModelBuilder {
            ty,
            hidden,
            ffn,
            rng: WeightRng(seed ^ 0x5EED),
            weights: HashMap::new(),
        };
        let embedding = maker.matrix("embedding", VOCAB, hidden, 1.0);
        let layers = maker.layers(layout);
        let head = match layout {
            SyntheticLayout::Plain => maker.matrix("head", VOCAB, hidden, 1.0),
            _ => embedding.clone(),
        };
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&seed.to_le_bytes());
        hash[8] = layout as u8;
        hash[9..13].copy_from_slice(&ty.id().to_le_bytes());
        let spec = ModelSpec {
            name: format!("{layout:?} {}", ty.name()),
            hash: ModelHash(hash),
            vocab: VOCAB,
            hidden,
            trained_context: 4096,
            norm_eps: 1e-6,
            embedding,
            embedding_scale: match layout {
                // The square root of the width.
                SyntheticLayout::Windowed => 16.0,
                _ => 1.0,
            },
            layers,
            // Spreads logits over a few units, as trained models do.
            final_norm: maker.vector("final_norm", hidden, |d| 2.0 + 0.2 * d.signed()),
            head,
            mtp: None,
        };
        SyntheticModel {
            spec: Arc::new(spec),
            weights: Arc::new(InMemoryWeights(maker.weights)),
            ty,
        }
    }
}

impl SyntheticModel {
    /// Whether matrices of [`SyntheticLayout::Odd`] are stored as `ty` and not as the format it
    /// falls back to.
    pub fn stores_odd_widths(ty: QuantType) -> bool {
        ODD.0.is_multiple_of(ty.block_values()) && ODD.1.is_multiple_of(ty.block_values())
    }
}

/// Weights in memory, by name.
struct InMemoryWeights(HashMap<Arc<str>, InMemoryWeight>);

/// A weight that is quantised when it is first read: plans read none, and some types take seconds.
struct InMemoryWeight {
    stored: WeightRef,
    values: Vec<f32>,
    bytes: OnceLock<Vec<u8>>,
}

impl InMemoryWeight {
    fn bytes(&self) -> &[u8] {
        self.bytes.get_or_init(|| {
            let WeightRef { ty, cols, .. } = self.stored;
            let mut bytes = vec![0; self.stored.bytes()];
            let rows = self.values.chunks(cols);
            for (row, out) in rows.zip(bytes.chunks_mut(ty.row_bytes(cols))) {
                quantize_row(ty, row, out);
            }
            bytes
        })
    }
}

impl WeightSource for InMemoryWeights {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        let found = self
            .0
            .get(&weight.name)
            .ok_or_else(|| WeightError::Missing {
                name: weight.name.clone(),
            })?;
        let stored = found.stored.bytes();
        if stored != weight.bytes() {
            return Err(WeightError::Mismatch {
                name: weight.name.clone(),
                detail: format!("{stored} bytes instead of {}", weight.bytes()),
            });
        }
        Ok(found.bytes())
    }
}

struct ModelBuilder {
    ty: QuantType,
    hidden: usize,
    ffn: usize,
    rng: WeightRng,
    weights: HashMap<Arc<str>, InMemoryWeight>,
}

impl ModelBuilder {
    fn layers(&mut self, layout: SyntheticLayout) -> Vec<LayerSpec> {
        let gated = |n_heads, n_kv_heads| Heads {
            n_heads,
            n_kv_heads,
            head_dim: 64,
            rope: 16,
            gate: OutputGate::SigmoidPerHead,
            normed: true,
        };
        let mixers: Vec<Mixer> = match layout {
            SyntheticLayout::HybridEven => vec![
                self.delta(0, 2, 2, HeadMap::Tiled),
                self.delta(1, 2, 2, HeadMap::Tiled),
                self.attention(2, gated(4, 2)),
            ],
            SyntheticLayout::HybridTiled => vec![
                self.delta(0, 1, 3, HeadMap::Tiled),
                self.attention(1, gated(4, 1)),
                self.delta(2, 2, 6, HeadMap::Tiled),
            ],
            SyntheticLayout::HybridGrouped => vec![
                self.attention(0, gated(2, 2)),
                self.delta(1, 2, 4, HeadMap::Grouped),
                self.attention(2, gated(4, 2)),
            ],
            SyntheticLayout::HybridWide => {
                let heads = Heads {
                    head_dim: 256,
                    rope: 64,
                    ..gated(6, 1)
                };
                vec![
                    self.delta(0, 2, 6, HeadMap::Tiled),
                    self.attention(1, heads),
                    self.delta(2, 1, 3, HeadMap::Tiled),
                    self.attention(3, heads),
                ]
            }
            SyntheticLayout::Dense => {
                let heads = Heads {
                    n_heads: 8,
                    n_kv_heads: 1,
                    head_dim: 128,
                    rope: 128,
                    gate: OutputGate::None,
                    normed: true,
                };
                (0..2).map(|i| self.attention(i, heads)).collect()
            }
            SyntheticLayout::Plain => {
                let heads = Heads {
                    n_heads: 4,
                    n_kv_heads: 4,
                    head_dim: 64,
                    rope: 32,
                    gate: OutputGate::None,
                    normed: false,
                };
                (0..2).map(|i| self.attention(i, heads)).collect()
            }
            SyntheticLayout::HybridExperts => vec![
                self.delta(0, 2, 4, HeadMap::Tiled),
                self.attention(1, gated(4, 2)),
            ],
            SyntheticLayout::DenseExperts => {
                let heads = Heads {
                    gate: OutputGate::None,
                    ..gated(4, 2)
                };
                (0..2).map(|i| self.attention(i, heads)).collect()
            }
            SyntheticLayout::Neighbours => (0..2).map(|i| self.neighbours(i)).collect(),
            SyntheticLayout::Windowed => (0..3).map(|i| self.windowed(i)).collect(),
            SyntheticLayout::Odd => vec![
                self.attention(0, gated(5, 1)),
                self.delta(1, 1, 5, HeadMap::Tiled),
                self.attention(2, gated(3, 3)),
            ],
        };
        let mixers = mixers.into_iter().enumerate();
        let layers = mixers.map(|(i, mixer)| {
            let ffn = match layout {
                SyntheticLayout::HybridExperts | SyntheticLayout::DenseExperts => {
                    FeedForward::Experts(Box::new(self.experts(i, layout)))
                }
                _ => FeedForward::Dense(self.dense(&format!("layer {i}"), self.ffn)),
            };
            let mut layer = self.layer(i, mixer, ffn);
            if layout == SyntheticLayout::Windowed {
                self.put_norms_behind(i, &mut layer);
            }
            layer
        });
        layers.collect()
    }

    /// Attention of [`SyntheticLayout::Neighbours`].
    fn neighbours(&mut self, i: usize) -> Mixer {
        let heads = Heads {
            n_heads: 6,
            n_kv_heads: 2,
            head_dim: 64,
            rope: 64,
            gate: OutputGate::None,
            normed: false,
        };
        let mut attention = self.attention_of(i, heads);
        attention.rope.pairs = RopePairs::Adjacent;
        attention.rope.scale = 0.5;
        let mut bias = |part: &str, matrix: &WeightRef| {
            let name = format!("layer {i} {part} bias");
            Some(self.vector(&name, matrix.rows, |d| 0.5 * d.signed()))
        };
        attention.biases = AttentionBiases {
            q: bias("q", &attention.q),
            k: bias("k", &attention.k),
            v: bias("v", &attention.v),
            o: None,
        };
        if i == 1 {
            let factors = self.vector("rope factors", heads.rope / 2, |d| 1.0 + 7.0 * d.unit());
            attention.rope_factors = Some(factors);
        }
        Mixer::Attention(attention)
    }

    /// Attention of [`SyntheticLayout::Windowed`].
    fn windowed(&mut self, i: usize) -> Mixer {
        let heads = Heads {
            n_heads: 4,
            n_kv_heads: 1,
            head_dim: 256,
            rope: 256,
            gate: OutputGate::None,
            normed: true,
        };
        let mut attention = self.attention_of(i, heads);
        if i == 1 {
            attention.rope = RopeSpec {
                scale: 0.125,
                ..RopeSpec::new(heads.rope, 1e6)
            };
        } else {
            attention.window = Some(SyntheticLayout::WINDOW);
        }
        Mixer::Attention(attention)
    }

    /// Gives a layer norms behind its blocks, and GELU.
    fn put_norms_behind(&mut self, i: usize, layer: &mut LayerSpec) {
        let mut norm = |part: &str| {
            let name = format!("layer {i} {part}");
            Some(self.vector(&name, self.hidden, |d| 0.8 + 0.1 * d.signed()))
        };
        layer.post_mixer_norm = norm("post_mixer_norm");
        layer.post_ffn_norm = norm("post_ffn_norm");
        if let FeedForward::Dense(dense) = &mut layer.ffn {
            dense.activation = GateActivation::GeluTanh;
        }
    }

    fn dense(&mut self, whose: &str, ffn: usize) -> DenseSpec {
        DenseSpec {
            activation: GateActivation::Silu,
            gate: self.matrix(&format!("{whose} gate"), ffn, self.hidden, 1.0),
            up: self.matrix(&format!("{whose} up"), ffn, self.hidden, 1.0),
            down: self.matrix(&format!("{whose} down"), self.hidden, ffn, 1.0),
        }
    }

    fn experts(&mut self, i: usize, layout: SyntheticLayout) -> MoeSpec {
        let name = |part: &str| format!("layer {i} {part}");
        let (n_experts, width, hidden) = (EXPERTS, EXPERT_WIDTH, self.hidden);
        let mut stack = |part: &str, rows: usize, cols: usize| ExpertStack {
            weight: self.matrix(&name(part), n_experts * rows, cols, 1.0),
            n_experts,
        };
        let gate_up = match layout {
            SyntheticLayout::HybridExperts => {
                ExpertGateUp::Fused(stack("experts gate_up", 2 * width, hidden))
            }
            _ => ExpertGateUp::Separate {
                gate: stack("experts gate", width, hidden),
                up: stack("experts up", width, hidden),
            },
        };
        let down = stack("experts down", hidden, width);
        let router = self.values(n_experts * hidden, |d| 0.3 * d.signed());
        let shared = (layout == SyntheticLayout::HybridExperts).then(|| SharedExpertSpec {
            gate: self.vector(&name("shared factor"), hidden, |d| 0.2 * d.signed()),
            ffn: self.dense(&name("shared"), 2 * width),
        });
        MoeSpec {
            n_experts,
            n_used: EXPERTS_USED,
            weights_scale: if shared.is_some() { 1.0 } else { 2.5 },
            activation: GateActivation::Silu,
            router: self.stored(&name("router"), QuantType::F32, (n_experts, hidden), router),
            gate_up,
            down,
            shared,
        }
    }

    fn layer(&mut self, i: usize, mixer: Mixer, ffn: FeedForward) -> LayerSpec {
        let name = |part: &str| format!("layer {i} {part}");
        LayerSpec {
            mixer_norm: self.vector(&name("mixer_norm"), self.hidden, |d| 1.0 + 0.1 * d.signed()),
            mixer,
            post_mixer_norm: None,
            ffn_norm: self.vector(&name("ffn_norm"), self.hidden, |d| 1.0 + 0.1 * d.signed()),
            ffn,
            post_ffn_norm: None,
        }
    }

    fn attention(&mut self, i: usize, heads: Heads) -> Mixer {
        Mixer::Attention(self.attention_of(i, heads))
    }

    fn attention_of(&mut self, i: usize, heads: Heads) -> AttentionSpec {
        let name = |part: &str| format!("layer {i} {part}");
        let Heads {
            n_heads,
            n_kv_heads,
            head_dim,
            ..
        } = heads;
        let gates = match heads.gate {
            OutputGate::None => 1,
            OutputGate::SigmoidPerHead => 2,
        };
        let norm = |maker: &mut ModelBuilder, part: &str| {
            heads
                .normed
                .then(|| maker.vector(&name(part), head_dim, |d| 1.2 + 0.2 * d.signed()))
        };
        AttentionSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            rope: RopeSpec::new(heads.rope, 10_000.0),
            rope_factors: None,
            window: None,
            scale: 1.0 / (head_dim as f32).sqrt(),
            gate: heads.gate,
            q_norm: norm(self, "q_norm"),
            k_norm: norm(self, "k_norm"),
            q: self.matrix(&name("q"), gates * n_heads * head_dim, self.hidden, 1.5),
            k: self.matrix(&name("k"), n_kv_heads * head_dim, self.hidden, 1.5),
            v: self.matrix(&name("v"), n_kv_heads * head_dim, self.hidden, 1.0),
            o: self.matrix(&name("o"), self.hidden, n_heads * head_dim, 1.0),
            biases: AttentionBiases::default(),
        }
    }

    fn delta(&mut self, i: usize, n_k_heads: usize, n_v_heads: usize, head_map: HeadMap) -> Mixer {
        let name = |part: &str| format!("layer {i} {part}");
        let channels = (2 * n_k_heads + n_v_heads) * DELTA_DIM;
        let values = n_v_heads * DELTA_DIM;
        let conv_taps = 4;
        let taps = self.vector(&name("conv"), channels * conv_taps, |d| 0.5 * d.signed());
        Mixer::GatedDelta(GatedDeltaSpec {
            n_k_heads,
            n_v_heads,
            k_dim: DELTA_DIM,
            v_dim: DELTA_DIM,
            conv_taps,
            head_map,
            qkv: self.matrix(&name("qkv"), channels, self.hidden, 1.0),
            z: self.matrix(&name("z"), values, self.hidden, 1.0),
            beta: self.matrix(&name("beta"), n_v_heads, self.hidden, 1.0),
            alpha: self.matrix(&name("alpha"), n_v_heads, self.hidden, 1.0),
            // From slow to quick forgetting, as trained models have it.
            a: self.vector(&name("a"), n_v_heads, |d| -(0.02 + 0.5 * d.unit())),
            dt: self.vector(&name("dt"), n_v_heads, |d| d.signed()),
            conv: WeightRef {
                rows: channels,
                cols: conv_taps,
                ..taps
            },
            norm: self.vector(&name("norm"), DELTA_DIM, |d| 1.0 + 0.1 * d.signed()),
            out: self.matrix(&name("out"), self.hidden, values, 1.0),
        })
    }

    /// Uniform weights of a variance that keeps the scale of what goes through, times `gain`.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize, gain: f32) -> WeightRef {
        let width = gain * (3.0 / cols as f32).sqrt();
        let values = self.values(rows * cols, |d| width * d.signed());
        // Formats in large blocks need inputs in multiples of 256, which a width of heads may not
        // be.
        let ty = if cols.is_multiple_of(self.ty.block_values()) {
            self.ty
        } else {
            QuantType::Q8_0
        };
        self.stored(name, ty, (rows, cols), values)
    }

    fn vector(&mut self, name: &str, n: usize, value: impl Fn(&mut WeightRng) -> f32) -> WeightRef {
        let values = self.values(n, value);
        self.stored(name, QuantType::F32, (1, n), values)
    }

    fn values(&mut self, n: usize, value: impl Fn(&mut WeightRng) -> f32) -> Vec<f32> {
        (0..n).map(|_| value(&mut self.rng)).collect()
    }

    fn stored(
        &mut self,
        name: &str,
        ty: QuantType,
        (rows, cols): (usize, usize),
        values: Vec<f32>,
    ) -> WeightRef {
        let weight = WeightRef {
            name: name.into(),
            ty,
            rows,
            cols,
        };
        let stored = InMemoryWeight {
            stored: weight.clone(),
            values,
            bytes: OnceLock::new(),
        };
        self.weights.insert(weight.name.clone(), stored);
        weight
    }
}

#[derive(Debug, Clone, Copy)]
struct Heads {
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    rope: usize,
    gate: OutputGate,
    normed: bool,
}

/// Numbers that only need to look random.
struct WeightRng(u64);

impl WeightRng {
    fn unit(&mut self) -> f32 {
        // Knuth's MMIX generator; its high bits are good enough for weights.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1_u32 << 24) as f32
    }

    fn signed(&mut self) -> f32 {
        2.0 * self.unit() - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_models_have_all_weight_bytes() {
        for layout in SyntheticLayout::ALL
            .into_iter()
            .chain(SyntheticLayout::EXPERTS)
        {
            for ty in [QuantType::F32, QuantType::Q4_0, QuantType::Q6_K] {
                let model = SyntheticModel::new(layout, ty, 1);
                for weight in model.spec.weights() {
                    let bytes = model.weights.bytes(weight).unwrap();
                    assert_eq!(bytes.len(), weight.bytes(), "{layout:?} {}", weight.name);
                }
            }
        }
    }

    #[test]
    fn seeds_give_different_models() {
        let bytes = |seed| {
            let model = SyntheticModel::new(SyntheticLayout::Dense, QuantType::Q4_0, seed);
            let embedding = model.spec.embedding.clone();
            let bytes = model.weights.bytes(&embedding).unwrap().to_vec();
            (model.spec.hash, bytes)
        };
        assert_eq!(bytes(1), bytes(1));
        assert_ne!(bytes(1).0, bytes(2).0);
        assert_ne!(bytes(1).1, bytes(2).1);
    }
}
