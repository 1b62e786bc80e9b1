//! Laws of shards: together they are the whole model, and each value head keeps its key head.

use std::collections::BTreeSet;

use super::*;
use crate::{
    AttentionBiases, GateActivation, ModelHash, OutputGate, QuantType, RopeSpec, WeightError,
};

/// `[rows, cols]` of `ty`, or of f32 where the rows are no whole blocks of it.
fn weight(name: &str, ty: QuantType, rows: usize, cols: usize) -> WeightRef {
    let fits = cols.is_multiple_of(ty.block_values());
    WeightRef {
        name: name.into(),
        ty: if fits { ty } else { QuantType::F32 },
        rows,
        cols,
    }
}

fn dense(ty: QuantType, name: &str, hidden: usize, width: usize) -> FeedForward {
    FeedForward::Dense(DenseSpec {
        activation: GateActivation::Silu,
        gate: weight(&format!("{name} gate"), ty, width, hidden),
        up: weight(&format!("{name} up"), ty, width, hidden),
        down: weight(&format!("{name} down"), ty, hidden, width),
    })
}

fn layer(ty: QuantType, name: &str, mixer: Mixer, width: usize) -> LayerSpec {
    LayerSpec {
        mixer_norm: weight(&format!("{name} mixer norm"), QuantType::F32, 1, 256),
        mixer,
        post_mixer_norm: None,
        ffn_norm: weight(&format!("{name} ffn norm"), QuantType::F32, 1, 256),
        ffn: dense(ty, name, 256, width),
        post_ffn_norm: None,
    }
}

fn attention(ty: QuantType, name: &str, [n_heads, n_kv_heads]: [usize; 2]) -> AttentionSpec {
    let of = |part: &str, rows, cols| weight(&format!("{name} {part}"), ty, rows, cols);
    AttentionSpec {
        n_heads,
        n_kv_heads,
        head_dim: 64,
        rope: RopeSpec::new(64, 1e6),
        rope_factors: None,
        window: None,
        scale: 0.125,
        gate: OutputGate::SigmoidPerHead,
        q_norm: None,
        k_norm: None,
        q: of("q", 2 * 64 * n_heads, 256),
        k: of("k", 64 * n_kv_heads, 256),
        v: of("v", 64 * n_kv_heads, 256),
        o: of("o", 256, 64 * n_heads),
        biases: AttentionBiases::default(),
    }
}

fn delta(ty: QuantType, name: &str, heads: [usize; 2], head_map: HeadMap) -> GatedDeltaSpec {
    let [n_k_heads, n_v_heads] = heads;
    let channels = 64 * (2 * n_k_heads + n_v_heads);
    let of = |part: &str, rows, cols| weight(&format!("{name} {part}"), ty, rows, cols);
    let plain =
        |part: &str, rows, cols| weight(&format!("{name} {part}"), QuantType::F32, rows, cols);
    GatedDeltaSpec {
        n_k_heads,
        n_v_heads,
        k_dim: 64,
        v_dim: 64,
        conv_taps: 4,
        head_map,
        qkv: of("qkv", channels, 256),
        z: of("z", 64 * n_v_heads, 256),
        beta: of("beta", n_v_heads, 256),
        alpha: of("alpha", n_v_heads, 256),
        a: plain("a", 1, n_v_heads),
        dt: plain("dt", 1, n_v_heads),
        conv: plain("conv", channels, 4),
        norm: plain("norm", 1, 64),
        out: of("out", 256, 64 * n_v_heads),
    }
}

/// Four experts of `width` channels, whose gate and up are fused, beside a shared one of 128.
fn mixture(ty: QuantType, width: usize) -> FeedForward {
    let stack = |name: &str, rows, cols| ExpertStack {
        weight: WeightRef {
            name: name.into(),
            ty,
            rows: 4 * rows,
            cols,
        },
        n_experts: 4,
    };
    let FeedForward::Dense(shared) = dense(QuantType::Q8_0, "shared", 256, 128) else {
        unreachable!("it is dense")
    };
    FeedForward::Experts(Box::new(MoeSpec {
        n_experts: 4,
        n_used: 2,
        weights_scale: 1.0,
        activation: GateActivation::Silu,
        router: weight("router whole", QuantType::F32, 4, 256),
        gate_up: ExpertGateUp::Fused(stack("gate_up", 2 * width, 256)),
        down: stack("down", 256, width),
        shared: Some(SharedExpertSpec {
            gate: weight("shared gate whole", QuantType::F32, 1, 256),
            ffn: shared,
        }),
    }))
}

/// Attention with biases, delta layers with key heads shared in either way, and experts.
fn spec(ty: QuantType) -> ModelSpec {
    let mixers = [
        Mixer::GatedDelta(delta(ty, "0", [4, 12], HeadMap::Tiled)),
        Mixer::GatedDelta(delta(ty, "1", [4, 8], HeadMap::Grouped)),
        Mixer::Attention(attention(ty, "2", [8, 4])),
    ];
    let mixers = mixers.into_iter().enumerate();
    let mut layers: Vec<LayerSpec> = mixers
        .map(|(i, mixer)| layer(ty, &i.to_string(), mixer, 512))
        .collect();
    let mut biased = attention(ty, "3", [8, 4]);
    let bias = |name: &str, rows| Some(weight(name, QuantType::F32, 1, rows));
    biased.biases = AttentionBiases {
        q: bias("q bias", 2 * 64 * 8),
        k: bias("k bias", 64 * 4),
        v: bias("v bias", 64 * 4),
        o: None,
    };
    let mut experts = layer(ty, "3", Mixer::Attention(biased), 512);
    experts.ffn = mixture(ty, 128);
    experts.post_ffn_norm = Some(weight("norm behind", QuantType::F32, 1, 256));
    layers.push(experts);
    ModelSpec {
        name: "a model".to_owned(),
        hash: ModelHash::default(),
        vocab: 512,
        hidden: 256,
        trained_context: 4096,
        norm_eps: 1e-6,
        embedding: weight("embedding", ty, 512, 256),
        embedding_scale: 1.0,
        layers,
        final_norm: weight("final norm", QuantType::F32, 1, 256),
        head: weight("head", ty, 512, 256),
        mtp: None,
    }
}

/// Every byte of a weight, different in each row and block.
struct Patterns(Vec<(WeightRef, Vec<u8>)>);

impl Patterns {
    fn of(spec: &ModelSpec) -> Patterns {
        let all = spec.weights().into_iter().map(|weight| {
            let bytes = (0..weight.bytes()).map(|i| (i * 31 + i / 257 * 7) as u8);
            (weight.clone(), bytes.collect())
        });
        Patterns(all.collect())
    }
}

impl WeightSource for Patterns {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        let found = self.0.iter().find(|(known, _)| known == weight);
        let (_, bytes) = found.ok_or_else(|| weight.mismatch("another shape"))?;
        Ok(bytes)
    }
}

#[test]
fn shards_together_are_the_whole_model() {
    for count in [2, 4] {
        let ty = QuantType::Q8_0;
        let whole = spec(ty);
        let source = Arc::new(Patterns::of(&whole));
        let shards: Vec<ShardedModel> = Shard::all(count)
            .map(|shard| ShardedModel::new(&whole, shard).unwrap())
            .collect();
        for weight in whole.layers.iter().flat_map(LayerSpec::weights) {
            let bytes = source.bytes(weight).unwrap();
            let block = weight.ty.block_values();
            let mut seen = BTreeSet::new();
            for sharded in &shards {
                let Some(slice) = sharded.slice(&weight.name) else {
                    let whole = ["norm", "whole"].map(|word| weight.name.contains(word));
                    assert!(whole.contains(&true), "{} is whole", weight.name);
                    continue;
                };
                let own = sharded.weights(source.clone());
                let own = own.bytes(&slice.weight()).unwrap().to_vec();
                assert_eq!(own.len() * count, bytes.len(), "{}", weight.name);
                let blocks = slice.rows().iter().cloned().flatten().flat_map(|row| {
                    let columns = slice.columns().iter().cloned();
                    columns.flat_map(move |of| of.step_by(block).map(move |at| (row, at)))
                });
                let size = weight.ty.row_bytes(block);
                for ((row, column), own) in blocks.zip(own.chunks(size)) {
                    let at = row * weight.ty.row_bytes(weight.cols) + weight.ty.row_bytes(column);
                    assert_eq!(own, &bytes[at..at + size], "{} {row} {column}", weight.name);
                    assert!(seen.insert((row, column)), "{} twice", weight.name);
                }
            }
            let all = weight.rows * weight.cols / block;
            assert!(seen.is_empty() || seen.len() == all, "{}", weight.name);
        }
        let layers = shards.iter().map(ShardedModel::layers);
        for (whole, own) in layers.flat_map(|own| whole.layers.iter().zip(own)) {
            own.ffn.require_shapes(256).unwrap();
            let weights = [whole, own].map(|of| of.weights().len());
            assert_eq!(weights[0], weights[1]);
        }
    }
}

#[test]
fn value_heads_keep_their_key_heads() {
    for head_map in [HeadMap::Tiled, HeadMap::Grouped] {
        let whole = delta(QuantType::Q8_0, "d", [4, 12], head_map);
        for shard in Shard::all(2) {
            let heads = shard.v_heads(&whole).into_iter().flatten();
            for (own, head) in heads.enumerate() {
                let key = head_map.k_head(own, 2, 6) + 2 * shard.index;
                assert_eq!(key, head_map.k_head(head, 4, 12), "{head_map:?} {head}");
            }
        }
    }
}

#[test]
fn models_without_equal_shares_are_refused_by_part() {
    let refusal = |count, change: &dyn Fn(&mut ModelSpec)| {
        let mut whole = spec(QuantType::Q4_K);
        change(&mut whole);
        let shards = Shard::all(count).map(|shard| ShardedModel::new(&whole, shard));
        let refused = shards
            .filter_map(Result::err)
            .map(|error| error.to_string());
        refused.last().unwrap_or_default()
    };
    let of = |reason: &str| format!("a tensor split of a model over 2 devices: {reason}");
    // Of 64 values a head, 6 value heads end within a block of 256.
    let border = "column 128 of 0 out is within a block of 256 values of Q4_K";
    assert_eq!(refusal(2, &|_| ()), of(border));
    let heads = |n_heads, n_kv_heads| {
        move |whole: &mut ModelSpec| {
            let mixer = Mixer::Attention(attention(QuantType::Q8_0, "2", [n_heads, n_kv_heads]));
            whole.layers = vec![layer(QuantType::Q8_0, "2", mixer, 512)];
        }
    };
    assert_eq!(refusal(2, &heads(8, 4)), "");
    let few = "they do not divide its 1 key and value heads";
    assert_eq!(refusal(2, &heads(8, 1)), of(few));
    let odd = "they do not divide its 5 attention heads";
    assert_eq!(refusal(2, &heads(5, 5)), of(odd));
    let experts = |width, ty| {
        move |whole: &mut ModelSpec| {
            let mixer = Mixer::Attention(attention(QuantType::Q8_0, "2", [8, 4]));
            let mut of = layer(QuantType::Q8_0, "2", mixer, 512);
            of.ffn = mixture(ty, width);
            whole.layers = vec![of];
        }
    };
    assert_eq!(refusal(2, &experts(512, QuantType::Q4_K)), "");
    let border = "column 384 of down is within a block of 256 values of Q4_K";
    assert_eq!(refusal(2, &experts(768, QuantType::Q4_K)), of(border));
    let odd = "they do not divide its 33 channels of each expert";
    assert_eq!(refusal(2, &experts(33, QuantType::F32)), of(odd));
    let one = "a tensor split of a model over 1 devices: it takes two or more";
    assert_eq!(refusal(1, &heads(8, 4)), one);
}

/// Heads and channels of the 27B hybrid: 16 and 48 delta heads of 128 values, 24 and 4 attention
/// heads of 256, 17,408 channels.
#[test]
fn halves_of_a_large_hybrid_end_at_blocks_of_256_values() {
    let ty = QuantType::Q4_K;
    let mut d = delta(ty, "0", [16, 48], HeadMap::Tiled);
    (d.k_dim, d.v_dim) = (128, 128);
    d.out = weight("0 out", ty, 256, 48 * 128);
    let mut a = attention(ty, "1", [24, 4]);
    a.head_dim = 256;
    a.o = weight("1 o", ty, 256, 24 * 256);
    let whole = ModelSpec {
        layers: vec![
            layer(ty, "0", Mixer::GatedDelta(d), 17_408),
            layer(ty, "1", Mixer::Attention(a), 17_408),
        ],
        ..spec(ty)
    };
    for shard in Shard::all(2) {
        let sharded = ShardedModel::new(&whole, shard).unwrap();
        let columns = |name| sharded.slice(name).unwrap().columns().to_vec();
        let begin = shard.index * 8704;
        let down = columns("0 down");
        assert_eq!((down.len(), &down[0]), (1, &(begin..begin + 8704)));
        let begin = shard.index * 1024;
        let tiles = [0, 2048, 4096].map(|tile| tile + begin..tile + begin + 1024);
        assert_eq!(columns("0 out"), tiles);
    }
}
