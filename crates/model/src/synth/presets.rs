//! Named shapes of synthetic models.

use super::shape::{SynthDense, SynthExperts, SynthKind, SynthMtp, SynthShape};

const fn hybrid(
    name: &'static str,
    (layers, hidden, ffn): (u64, u64, u64),
    (heads, kv_heads): (u64, u64),
    (k_heads, v_heads): (u64, u64),
    tied: bool,
) -> SynthShape {
    SynthShape {
        name,
        kind: SynthKind::Hybrid { k_heads, v_heads },
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim: 256,
        vocab: 248_320,
        context: 262_144,
        theta: 1e7,
        tied,
        mtp: SynthMtp::None,
        experts: None,
        uniform_routing: false,
    }
}

/// The shape with experts in place of its feed-forward channels.
const fn with_experts(
    mut shape: SynthShape,
    (count, used): (u64, u64),
    (width, shared_width): (u64, u64),
) -> SynthShape {
    shape.ffn = 0;
    shape.experts = Some(SynthExperts {
        count,
        used,
        width,
        shared_width,
    });
    shape
}

const fn dense(
    name: &'static str,
    (layers, hidden, ffn): (u64, u64, u64),
    (heads, kv_heads): (u64, u64),
    tied: bool,
) -> SynthShape {
    SynthShape {
        name,
        kind: SynthKind::Dense(SynthDense::Qwen3),
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim: 128,
        vocab: 151_936,
        context: 40_960,
        theta: 1e6,
        tied,
        mtp: SynthMtp::None,
        experts: None,
        uniform_routing: false,
    }
}

/// A dense shape of another family than Qwen3.
const fn of_family(
    mut shape: SynthShape,
    family: SynthDense,
    head_dim: u64,
    (vocab, context, theta): (u64, u32, f32),
) -> SynthShape {
    shape.kind = SynthKind::Dense(family);
    shape.head_dim = head_dim;
    shape.vocab = vocab;
    shape.context = context;
    shape.theta = theta;
    shape
}

const LLAMA: SynthDense = SynthDense::Llama {
    rope_factors: false,
};
const LLAMA_3: SynthDense = SynthDense::Llama { rope_factors: true };

/// The same head dimensions with a vocabulary and a context for tests.
const fn tiny(mut shape: SynthShape) -> SynthShape {
    shape.vocab = 1024;
    shape.context = 8192;
    shape
}

/// The named shapes: those of published models, and tiny ones with the same head dimensions.
pub(super) const PRESETS: [SynthShape; 23] = [
    hybrid("qwen3.5-0.8b", (24, 1024, 3584), (8, 2), (16, 16), true),
    hybrid("qwen3.5-2b", (24, 2048, 6144), (8, 2), (16, 16), true),
    hybrid("qwen3.5-4b", (32, 2560, 9216), (16, 4), (16, 32), true),
    hybrid("qwen3.5-9b", (32, 4096, 12_288), (16, 4), (16, 32), false),
    hybrid("qwen3.5-27b", (64, 5120, 17_408), (24, 4), (16, 48), false),
    with_experts(
        hybrid("qwen3.5-35b-a3b", (40, 2048, 0), (16, 2), (16, 32), false),
        (256, 8),
        (512, 512),
    ),
    dense("qwen3-0.6b", (28, 1024, 3072), (16, 8), true),
    with_experts(
        dense("qwen3-30b-a3b", (48, 2048, 0), (32, 4), false),
        (128, 8),
        (768, 0),
    ),
    of_family(
        dense("llama-3.2-1b", (16, 2048, 8192), (32, 8), true),
        LLAMA_3,
        64,
        (128_256, 131_072, 5e5),
    ),
    of_family(
        dense("llama-3.1-8b", (32, 4096, 14_336), (32, 8), false),
        LLAMA_3,
        128,
        (128_256, 131_072, 5e5),
    ),
    of_family(
        dense("smollm2-135m", (30, 576, 1536), (9, 3), true),
        LLAMA,
        64,
        (49_152, 8192, 1e5),
    ),
    of_family(
        dense("qwen2.5-7b", (28, 3584, 18_944), (28, 4), false),
        SynthDense::Qwen2,
        128,
        (152_064, 32_768, 1e6),
    ),
    of_family(
        dense("gemma-3-270m", (18, 640, 2048), (4, 1), true),
        SynthDense::Gemma3 { window: 512 },
        256,
        (262_144, 32_768, 1e6),
    ),
    of_family(
        dense("gemma-3-4b", (34, 2560, 10_240), (8, 4), true),
        SynthDense::Gemma3 { window: 1024 },
        256,
        (262_144, 131_072, 1e6),
    ),
    tiny(hybrid("tiny-hybrid", (4, 256, 512), (2, 1), (2, 6), false)),
    tiny(hybrid(
        "tiny-hybrid-r1",
        (4, 256, 512),
        (4, 2),
        (2, 2),
        true,
    )),
    tiny(dense("tiny-dense", (2, 256, 512), (4, 2), true)),
    tiny(of_family(
        dense("tiny-llama", (2, 256, 512), (4, 2), true),
        LLAMA_3,
        64,
        (0, 0, 5e5),
    )),
    tiny(of_family(
        dense("tiny-qwen2", (2, 256, 512), (4, 2), true),
        SynthDense::Qwen2,
        128,
        (0, 0, 1e6),
    )),
    tiny(of_family(
        dense("tiny-gemma3", (6, 256, 512), (2, 1), true),
        SynthDense::Gemma3 { window: 64 },
        256,
        (0, 0, 1e6),
    )),
    tiny(with_experts(
        hybrid("tiny-hybrid-moe", (4, 256, 0), (2, 1), (2, 6), false),
        (16, 4),
        (256, 256),
    )),
    tiny(with_experts(
        dense("tiny-dense-moe", (2, 256, 0), (4, 2), true),
        (16, 4),
        (256, 0),
    )),
    tiny(with_experts(
        hybrid("small-moe", (12, 1024, 0), (8, 2), (8, 16), true),
        (64, 8),
        (256, 256),
    )),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn preset(name: &str) -> SynthShape {
        PRESETS
            .into_iter()
            .find(|shape| shape.name == name)
            .unwrap()
    }

    #[test]
    fn shapes_have_published_tensor_counts() {
        assert_eq!(preset("qwen3.5-27b").tensors().len(), 851);
        let with_head = SynthShape {
            mtp: SynthMtp::Shared,
            ..preset("qwen3.5-27b")
        };
        assert_eq!(with_head.tensors().len(), 866);
        for (name, tensors) in [
            ("qwen3-0.6b", 310),
            ("llama-3.1-8b", 292),
            ("qwen2.5-7b", 339),
            ("gemma-3-4b", 444),
            ("smollm2-135m", 272),
        ] {
            assert_eq!(preset(name).tensors().len(), tensors, "{name}");
        }
    }

    #[test]
    fn shapes_have_published_parameter_counts() {
        let count = |name: &str| -> u64 {
            let tensors = preset(name).tensors();
            tensors.iter().map(|t| t.dims.iter().product::<u64>()).sum()
        };
        let billions = count("qwen3.5-27b") as f64 / 1e9;
        assert!((26.85..26.95).contains(&billions), "{billions}");
        let millions = count("qwen3.5-0.8b") as f64 / 1e6;
        assert!((750.0..755.0).contains(&millions), "{millions}");
        for (name, expected) in [
            ("qwen3.5-35b-a3b", 34.6..34.8),
            ("qwen3-30b-a3b", 30.5..30.6),
            ("llama-3.1-8b", 8.02..8.04),
            ("llama-3.2-1b", 1.23..1.24),
            ("qwen2.5-7b", 7.61..7.62),
            ("gemma-3-4b", 3.87..3.89),
            ("gemma-3-270m", 0.268..0.269),
            ("smollm2-135m", 0.134..0.135),
        ] {
            let billions = count(name) as f64 / 1e9;
            assert!(expected.contains(&billions), "{name}: {billions}");
        }
    }
}
