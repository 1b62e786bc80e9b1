//! The part of a model that a GPU opens: the whole, or a pipeline stage.

use contract::snapshot::SnapshotIdentity;
use contract::{LoadConfig, StageConfig};

use crate::weights::{WeightPart, table_on_host};

/// What is opened: a whole model, or a pipeline stage.
#[derive(Clone)]
pub(crate) struct OpenedPart {
    pub(crate) stage: StageConfig,
    /// Its layers as a model of their own.
    pub(crate) config: LoadConfig,
}

impl OpenedPart {
    pub(crate) fn whole(config: &LoadConfig) -> OpenedPart {
        OpenedPart {
            stage: StageConfig::whole(config.clone()),
            config: config.clone(),
        }
    }

    pub(crate) fn of(stage: &StageConfig) -> OpenedPart {
        OpenedPart {
            stage: stage.clone(),
            config: stage.load_config(),
        }
    }

    /// The same for one sequence of another length, whatever the pool of all sequences.
    pub(crate) fn with_context(&self, context: usize) -> OpenedPart {
        let mut other = self.clone();
        for limits in [&mut other.config.limits, &mut other.stage.model.limits] {
            limits.context = context;
            limits.pool_tokens = limits.pool_tokens.map(|_| 0);
        }
        other
    }

    /// The weights that lie on its GPU. A stage whose layers may be fused also has the input
    /// projections of the first layer above it.
    pub(crate) fn weights(&self, separate_gemms: bool, slots: Option<usize>) -> WeightPart<'_> {
        let whole = &self.stage.model.target;
        let above = whole.layers.get(self.stage.layers.end);
        WeightPart {
            spec: &self.config.target,
            slots,
            table_on_host: table_on_host(whole),
            above: above.filter(|_| !separate_gemms),
        }
    }

    /// Identity of its snapshots, and its first layer in the whole model.
    pub(crate) fn identity(&self) -> (SnapshotIdentity, usize) {
        let whole = &self.stage.model;
        let draft = whole.draft.as_ref();
        let identity = SnapshotIdentity {
            model: whole.target.hash,
            kv: whole.kv,
            rotated: true,
            draft: draft.map(|draft| (draft.spec.hash, draft.kv)),
            mtp: whole.target.mtp.is_some(),
        };
        (identity, self.stage.layers.start)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
    use contract::{
        Backend, DraftLoad, DraftLoadConfig, KvFormat, KvFormats, Limits, ModelSpec, QuantType,
        Shard, ShardedModel, WeightSource,
    };
    use model::DraftKind;
    use model::synth::{SynthSpec, draft_of};

    use super::*;
    use crate::backend::CudaBackend;
    use crate::numerics::Numerics;
    use crate::options::{OneLaunch, Options};
    use crate::plan::{PlanKey, Plans};
    use crate::probe::GpuInfo;

    fn load_config(target: Arc<ModelSpec>, weights: Arc<dyn WeightSource>) -> LoadConfig {
        LoadConfig {
            target,
            weights,
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: KvFormat::Q8_0,
                v: KvFormat::Q8_0,
            },
            limits: Limits {
                sequences: 2,
                context: 600,
                tree_nodes: 64,
                prefill_chunk: 300,
                pool_tokens: None,
            },
        }
    }

    fn backend(number: u32, as_large_model: bool) -> CudaBackend {
        let gpu = GpuInfo {
            ordinal: 0,
            name: "a GPU".to_owned(),
            capability: (number / 10, number % 10),
            run_as: None,
            sm_count: 82,
            total_bytes: 24 << 30,
        };
        let options = Options {
            numerics: Some(Numerics::Fastest),
            as_large_model,
            // Only whole models have one launch by themselves.
            one_launch: OneLaunch::Off,
            ..Options::default()
        };
        CudaBackend::with_options(gpu, options)
    }

    #[test]
    fn stages_launch_what_the_whole_model_launches() {
        let model = SyntheticModel::new(SyntheticLayout::HybridWide, QuantType::Q4_K, 1);
        let config = load_config(model.spec.clone(), model.weights.clone());
        let n = config.target.layers.len();
        for ((number, as_large_model), cut) in [(86, false), (86, true), (90, true)]
            .into_iter()
            .flat_map(|class| (1..n).map(move |cut| (class, cut)))
        {
            let backend = backend(number, as_large_model);
            let plans = |layers| {
                let model = config.clone();
                let part = OpenedPart::of(&StageConfig {
                    model,
                    layers,
                    draft_apart: false,
                    shard: None,
                });
                backend.planned(&part).plans
            };
            let [whole, lower, upper] = [0..n, 0..cut, cut..n].map(plans);
            assert_eq!(lower.kernels, upper.kernels);
            assert_eq!(lower.stage.block, upper.stage.block);
            let parts = lower.stage.handed_over_parts(&upper.stage, 64, 64);
            assert!(lower.block_bytes >= parts[0].bytes);
            for key in whole.all.keys().copied() {
                if !matches!(key, PlanKey::Step { .. } | PlanKey::Chunk(_)) {
                    continue;
                }
                let parts = [lower.bare_launches(key), upper.bare_launches(key)].concat();
                assert_eq!(
                    parts,
                    whole.bare_launches(key),
                    "{number}, cut {cut}, {key:?}"
                );
            }
            assert!(!lower.all.contains_key(&PlanKey::LmHead(8)));
        }
    }

    /// Each waits for the other as often: twice a layer, in every pass.
    #[test]
    fn shards_launch_the_same_all_reduces() {
        for layout in [
            SyntheticLayout::HybridHalves,
            SyntheticLayout::HybridExperts,
            SyntheticLayout::Windowed,
        ] {
            let model = SyntheticModel::new(layout, QuantType::Q8_0, 1);
            let config = load_config(model.spec.clone(), model.weights.clone());
            for (number, as_large_model) in [(86, false), (86, true), (90, true)] {
                compare_all_reduces(&config, &backend(number, as_large_model));
            }
        }
    }

    fn compare_all_reduces(config: &LoadConfig, backend: &CudaBackend) {
        let [first, last] = [0, 1].map(|index| {
            let shard = Shard { index, count: 2 };
            let sharded = ShardedModel::new(&config.target, shard).unwrap();
            let stage = StageConfig::sharded(config.clone(), sharded);
            assert!(backend.estimate_stage(&stage).is_ok());
            backend.planned(&OpenedPart::of(&stage)).plans
        });
        assert_eq!(first.exchange, last.exchange);
        let passes = last.all.keys().copied();
        for key in passes.filter(|key| matches!(key, PlanKey::Step { .. } | PlanKey::Chunk(_))) {
            let sums = [&first, &last].map(|plans| {
                let all = plans.bare_launches(key).into_iter();
                let sums = all.filter(|launch| {
                    launch.contains("all_reduce_add") || launch.contains("EXCHANGE")
                });
                sums.collect::<Vec<_>>()
            });
            assert_eq!(sums[0], sums[1], "{}, {key:?}", config.target.name);
            // A fused layer has both.
            let n = config.target.layers.len();
            assert!(
                [n, 2 * n].contains(&sums[0].len()),
                "{}, {key:?}: {}",
                config.target.name,
                sums[0].len()
            );
        }
        let heads = [&first, &last].map(|plans| plans.all.contains_key(&PlanKey::LmHead(8)));
        assert_eq!(heads, [false, true]);
    }

    /// A draft in a stage of its own, on this GPU or on one of another class than the layers'.
    #[test]
    fn stage_of_a_draft_launches_the_drafts_of_the_whole_model() {
        let target = SynthSpec::parse("tiny-hybrid+mtp:q4_k_m").unwrap();
        let target = target.load().unwrap();
        let draft = draft_of(&target, DraftKind::Dflash2, QuantType::Q8_0, 1);
        let config = LoadConfig {
            draft: Some(DraftLoadConfig {
                spec: draft.spec,
                weights: draft.weights,
                kv: KvFormat::F16,
                load: DraftLoad::AtOpen,
            }),
            ..load_config(target.spec, target.weights)
        };
        let n = config.target.layers.len();
        for (number, as_large_model) in [(86, false), (86, true), (90, true)] {
            let plans = |layers, number, apart| {
                let model = config.clone();
                let part = OpenedPart::of(&StageConfig {
                    model,
                    layers,
                    draft_apart: apart,
                    shard: None,
                });
                backend(number, as_large_model).planned(&part).plans
            };
            let whole = plans(0..n, number, false);
            let (lower, draft) = (plans(0..n, number, true), plans(n..n, number, true));
            let has = |plans: &Plans, key| plans.all.contains_key(&key);
            for key in whole.all.keys().copied() {
                let drafts = matches!(
                    key,
                    PlanKey::Draft { .. }
                        | PlanKey::DraftContext(_)
                        | PlanKey::MtpDraft { .. }
                        | PlanKey::MtpCommit(_)
                );
                assert_eq!(
                    (has(&draft, key), has(&lower, key)),
                    match key {
                        PlanKey::Step { .. } | PlanKey::Chunk(_) | PlanKey::Commit(_) =>
                            (true, true),
                        _ => (drafts, !drafts),
                    },
                    "{key:?}"
                );
                if drafts {
                    assert_eq!(
                        draft.bare_launches(key),
                        whole.bare_launches(key),
                        "{number}, {key:?}"
                    );
                }
            }
            let at = draft.addresses;
            let row = (4 * draft.reduce.stride) as u64;
            assert!(at.edited - at.logits >= 64 * row && at.edits - at.edited >= 64 * row);
            // The residual stream and each captured layer, from any GPU's block to its own.
            let captured = draft.stage.received.len();
            for from in [&lower, &plans(0..n, 80, true)] {
                let parts = from.stage.handed_over_parts(&draft.stage, 64, 40);
                assert_eq!(parts.len(), 1 + captured);
                for (i, part) in parts.iter().enumerate() {
                    assert_eq!(part.bytes, 4 * 40 * config.target.hidden);
                    assert_eq!(part.to, i * draft.block_bytes / (1 + captured));
                    assert!(part.from + part.bytes <= from.block_bytes);
                }
            }
        }
    }
}
