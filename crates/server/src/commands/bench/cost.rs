//! The least bytes and operations of a call, which bound its time from below.

use contract::{DraftSpec, FeedForward, KvFormats, Mixer, ModelSpec, MoeSpec, WeightRef};

/// Bytes and operations of one forward pass.
#[derive(Debug, Clone, Default)]
pub(super) struct Cost {
    /// Bytes of weights that every step reads once: without the embedding and the experts.
    pub(super) weight_bytes: f64,
    /// Bytes of recurrent states, read once.
    pub(super) state_bytes: f64,
    /// Bytes of cached keys and values of one token.
    pub(super) kv_token_bytes: f64,
    /// Multiplications and additions per token in the matrices below the head.
    pub(super) token_flops: f64,
    /// Multiplications and additions per token and key in attention.
    pub(super) key_flops: f64,
    /// The experts of each layer that has some: a step reads those that its rows touch.
    experts: Vec<(MoeSpec, f64)>,
}

impl Cost {
    /// The cost of a target model.
    pub(super) fn of(spec: &ModelSpec, kv: KvFormats) -> Cost {
        let mut cost = Cost::default();
        cost.read(&spec.head);
        cost.read(&spec.final_norm);
        for layer in &spec.layers {
            cost.read(&layer.mixer_norm);
            cost.read(&layer.ffn_norm);
            match &layer.mixer {
                Mixer::Attention(a) => {
                    for weight in [&a.q, &a.k, &a.v, &a.o] {
                        cost.matrix(weight);
                    }
                    let values = a.n_kv_heads * a.head_dim;
                    cost.kv_token_bytes += (kv.k.bytes(values) + kv.v.bytes(values)) as f64;
                    cost.key_flops += 4.0 * (a.n_heads * a.head_dim) as f64;
                }
                Mixer::GatedDelta(d) => {
                    for weight in [&d.qkv, &d.z, &d.beta, &d.alpha, &d.out] {
                        cost.matrix(weight);
                    }
                    cost.read(&d.conv);
                    cost.state_bytes += 4.0 * d.state_values() as f64;
                }
            }
            match &layer.ffn {
                FeedForward::Dense(dense) => {
                    dense
                        .matrices()
                        .into_iter()
                        .for_each(|weight| cost.matrix(weight));
                }
                FeedForward::Experts(moe) => cost.experts(moe),
            }
        }
        cost
    }

    /// The cost of a draft model's pass, without the target's LM head, of which a device may read
    /// a part.
    pub(super) fn of_draft(draft: &DraftSpec) -> Cost {
        let mut cost = Cost::default();
        // Of its tables, a pass reads a few rows.
        for weight in draft.multiplied() {
            cost.matrix(weight);
        }
        cost
    }

    /// Whether a layer has experts.
    pub(super) fn has_experts(&self) -> bool {
        !self.experts.is_empty()
    }

    /// A row's share of the experts, and what every row passes.
    fn experts(&mut self, moe: &MoeSpec) {
        self.matrix(&moe.router);
        if let Some(shared) = &moe.shared {
            self.read(&shared.gate);
            let matrices = shared.ffn.matrices();
            matrices.into_iter().for_each(|weight| self.matrix(weight));
        }
        let stacks = moe.stacks();
        let values: usize = stacks.iter().map(|stack| stack.rows() * stack.cols()).sum();
        self.token_flops += 2.0 * (moe.n_used * values) as f64;
        let bytes: usize = stacks.iter().map(|stack| stack.expert_bytes()).sum();
        self.experts.push((moe.clone(), bytes as f64));
    }

    /// The cost of one depth of drafting with the target's multi-token-prediction head, whose
    /// proposals are the first `vocab` tokens, or all; `None` without a head.
    pub(super) fn of_mtp(target: &ModelSpec, kv: KvFormats, vocab: Option<usize>) -> Option<Cost> {
        let mtp = target.mtp.as_ref()?;
        let a = mtp.attention()?;
        let mut cost = Cost::default();
        let embedding = mtp.embedding.as_ref();
        let read = mtp.weights(target).into_iter();
        let moe = mtp.layer.ffn.experts();
        let experts: Vec<_> = moe.iter().flat_map(|moe| moe.weights()).collect();
        for weight in read.filter(|weight| Some(*weight) != embedding) {
            if !experts.contains(&weight) {
                cost.matrix(weight);
            }
        }
        if let Some(moe) = moe {
            cost.experts(moe);
        }
        let head = mtp.head.as_ref().unwrap_or(&target.head);
        if mtp.head.is_none() {
            cost.matrix(head);
        }
        let share = vocab.map_or(1.0, |vocab| vocab as f64 / target.vocab as f64);
        cost.weight_bytes -= (1.0 - share) * head.bytes() as f64;
        cost.token_flops -= (1.0 - share) * 2.0 * head.values() as f64;
        let values = a.n_kv_heads * a.head_dim;
        cost.kv_token_bytes = (kv.k.bytes(values) + kv.v.bytes(values)) as f64;
        Some(cost)
    }

    fn read(&mut self, weight: &WeightRef) {
        self.weight_bytes += weight.bytes() as f64;
    }

    fn matrix(&mut self, weight: &WeightRef) {
        self.read(weight);
        self.token_flops += 2.0 * weight.values() as f64;
    }

    /// Bytes that a step of `trees` trees with `rows` rows in all reads: weights once; states and
    /// `depth` cached tokens per tree. Experts count by how many the rows touch on average.
    pub(super) fn step_bytes(&self, (trees, rows): (usize, usize), depth: usize) -> f64 {
        let each = self.state_bytes + self.kv_token_bytes * depth as f64;
        let touched = |(moe, bytes): &(MoeSpec, f64)| moe.expected_touched(rows) * bytes;
        let experts: f64 = self.experts.iter().map(touched).sum();
        self.weight_bytes + experts + trees as f64 * each
    }

    /// Operations to prefill `tokens` tokens after `depth` committed ones.
    pub(super) fn prompt_flops(&self, tokens: usize, depth: usize) -> f64 {
        let n = tokens as f64;
        let keys = n * (depth as f64 + n / 2.0);
        n * self.token_flops + keys * self.key_flops
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::KvFormat;

    #[test]
    fn a_row_of_the_35b_a3b_shape_reads_its_experts_only() {
        let synth = model::synth::SynthSpec::parse("qwen3.5-35b-a3b:q4_k_m").unwrap();
        let loaded = synth.load().unwrap();
        let kv = KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        };
        let cost = Cost::of(&loaded.spec, kv);
        let bytes = |rows: usize| cost.step_bytes((1, rows), 0) - cost.state_bytes;
        assert!((1.7e9..2.1e9).contains(&bytes(1)), "{}", bytes(1));
        // 4 rows touch 3.8 times the experts of one.
        let more = (bytes(4) - cost.weight_bytes) / (bytes(1) - cost.weight_bytes);
        assert!((3.8..3.9).contains(&more), "{more}");
        // 2.95 G active weights, of which the LM head has 0.51 G.
        let flops = cost.token_flops;
        assert!((4.7e9..5.1e9).contains(&flops), "{flops}");
    }

    #[test]
    fn cost_of_the_27b_shape_matches_its_layers() {
        let synth = model::synth::SynthSpec::parse("qwen3.5-27b:q4_k_m-published").unwrap();
        let loaded = synth.load().unwrap();
        let kv = KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        };
        let cost = Cost::of(&loaded.spec, kv);
        assert!((15.8e9..16.2e9).contains(&cost.weight_bytes), "{cost:?}");
        // 48 layers of 48 heads of 128 x 128 floats.
        assert_eq!(cost.state_bytes, 48.0 * 48.0 * 65536.0);
        // 16 layers of 4 heads of 256, keys and values, two bytes each.
        assert_eq!(cost.kv_token_bytes, 65536.0);
        assert!((48e9..52e9).contains(&cost.token_flops), "{cost:?}");
        assert!(Cost::of_mtp(&loaded.spec, kv, None).is_none());
    }

    #[test]
    fn a_depth_of_the_head_reads_its_block_and_the_lm_head() {
        let kv = KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        };
        // 0.42 G parameters.
        for (types, bytes) in [
            ("q8_0", 0.43e9..0.47e9),
            ("q4_k_m-published", 0.2e9..0.35e9),
        ] {
            let name = format!("qwen3.5-27b+mtp:{types}");
            let synth = model::synth::SynthSpec::parse(&name).unwrap();
            let loaded = synth.load().unwrap();
            let part = Cost::of_mtp(&loaded.spec, kv, Some(loaded.spec.vocab / 4)).unwrap();
            let cost = Cost::of_mtp(&loaded.spec, kv, None).unwrap();
            let saved = cost.weight_bytes - part.weight_bytes;
            assert_eq!(saved, 0.75 * loaded.spec.head.bytes() as f64);
            let block = cost.weight_bytes - loaded.spec.head.bytes() as f64;
            assert!(bytes.contains(&block), "{cost:?}");
            assert_eq!(cost.kv_token_bytes, 4096.0);
        }
    }
}
