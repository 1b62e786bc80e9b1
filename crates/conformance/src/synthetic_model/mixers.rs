//! The mixers of each layout.

use contract::{
    AttentionBiases, AttentionSpec, GatedDeltaSpec, HeadMap, Mixer, OutputGate, RopePairs,
    RopeSpec, WeightRef,
};

use super::{ModelBuilder, SyntheticLayout};

const DELTA_DIM: usize = 128;

#[derive(Debug, Clone, Copy)]
struct Heads {
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    rope: usize,
    gate: OutputGate,
    normed: bool,
}

impl ModelBuilder {
    /// The mixer of each layer.
    pub(super) fn mixers(&mut self, layout: SyntheticLayout) -> Vec<Mixer> {
        let gated = |n_heads, n_kv_heads| Heads {
            n_heads,
            n_kv_heads,
            head_dim: 64,
            rope: 16,
            gate: OutputGate::SigmoidPerHead,
            normed: true,
        };
        match layout {
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
            SyntheticLayout::HybridHalves => {
                let heads = Heads {
                    head_dim: 256,
                    rope: 64,
                    ..gated(4, 2)
                };
                vec![
                    self.delta(0, 4, 12, HeadMap::Tiled),
                    self.attention(1, heads),
                    self.delta(2, 4, 8, HeadMap::Grouped),
                ]
            }
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
        }
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
            n_kv_heads: 2,
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
}
