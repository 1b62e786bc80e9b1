//! Draft model and speculation settings from flags.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use contract::{
    Backend, DraftLoad, DraftLoadConfig, KvFormat, LoadConfig, LoadProgress, ModelSpec, Runner,
    RunnerInfo, Tree,
};
use decode::{CostTable, DraftSource, SourceSet, SpeculationConfig, TreeInit};
use model::{DraftOptions, LoadedDraft};

use crate::cli::{DeviceArgs, DraftArgs, DraftSourceName, OnOff};
use crate::open;
use crate::open::bundled::Bundled;
use crate::open::measured::{self, FirstLoad, MeasuredOnce};
use crate::open::model_path::check_draft;
use crate::progress::bytes_text;

/// Default tree budget in drafted nodes.
const DEFAULT_TREE_BUDGET: usize = 22;
/// Tree nodes without a draft, for runs of forced tokens.
const FORCED_NODES: usize = 16;
/// Time limit of the cost measurement.
pub(crate) const MEASURE_TIME: Duration = Duration::from_secs(1);

/// Draft model of a target, and its use.
pub(crate) struct Drafting {
    /// How to load the draft, if there is one.
    pub config: Option<DraftLoadConfig>,
    /// Whether the model's multi-token-prediction head drafts.
    pub mtp: bool,
    /// Whether trees must be bit-identical to plain decoding.
    pub batch_invariant: bool,
    /// Speculation settings.
    pub speculation: SpeculationConfig,
    /// Whether to measure step costs after opening.
    measure_costs: bool,
}

/// A model that is ready to run.
pub(crate) struct OpenedModel {
    pub runner: Box<dyn Runner>,
    /// Complete speculation settings.
    pub speculation: SpeculationConfig,
    /// What was opened: without a draft that was dropped.
    pub config: LoadConfig,
}

impl Drafting {
    /// No draft.
    pub(crate) fn none() -> Drafting {
        Drafting {
            config: None,
            mtp: false,
            batch_invariant: false,
            speculation: SpeculationConfig {
                budget: 0,
                ..SpeculationConfig::default()
            },
            measure_costs: false,
        }
    }

    /// No draft but the head that the model brings, for benchmarks of the device.
    pub(crate) fn own_head(spec: &ModelSpec) -> Drafting {
        Drafting {
            mtp: spec.mtp.is_some(),
            ..Drafting::none()
        }
    }

    /// Settings from flags for a model; `bundled` is set for the bundled model.
    pub(crate) fn of(
        args: &DraftArgs,
        device: &DeviceArgs,
        loaded: &model::LoadedModel,
        bundled: Option<Bundled>,
    ) -> anyhow::Result<Drafting> {
        let mut drafting = Drafting {
            batch_invariant: args.batch_invariant,
            ..Drafting::none()
        };
        if args.no_speculation {
            return Ok(drafting);
        }
        let available = Available {
            block: args.draft.is_some() || bundled.is_some(),
            mtp: loaded.spec.mtp.is_some() && !args.no_mtp,
            suffix: args.lookup_ngram > 0,
        };
        let sources = sources(args, available)?;
        if sources.is_empty() {
            return Ok(drafting);
        }
        drafting.mtp = sources.contains(DraftSource::Mtp);
        let options = DraftOptions {
            width: width(args.draft_width),
            ..options(args.draft_swa)
        };
        let found = match (&args.draft, bundled) {
            _ if !sources.contains(DraftSource::Block) => None,
            (Some(path), _) => Some(load_draft(path, &loaded.spec, options)?),
            (None, Some(bundled)) => {
                let bytes = gguf::FileBytes::embedded(bundled.draft);
                let name = format!("{}-draft", bundled.name);
                Some(model::load_draft_bytes(
                    &name,
                    bytes,
                    &loaded.spec,
                    options,
                )?)
            }
            (None, None) => None,
        };
        let budget = args.ddtree_budget.map_or(DEFAULT_TREE_BUDGET, usize::from);
        let init = match (args.no_ddtree, args.ddtree_chain_seed) {
            (true, _) => TreeInit::ChainOnly,
            (false, true) => TreeInit::Chain,
            (false, false) => TreeInit::None,
        };
        let config = |found| draft_config(found, device.cpu_reference, args.lazy_draft);
        drafting.config = found.map(config);
        drafting.speculation = SpeculationConfig {
            budget,
            init,
            temperature: args.ddtree_temp,
            sources,
            min_match: args.lookup_ngram,
            ..SpeculationConfig::default()
        };
        drafting.measure_costs = args.ddtree_cost_stop == OnOff::On && budget > 0;
        Ok(drafting)
    }

    /// The target as this drafting needs it: without a head that does not draft.
    pub(crate) fn target(&self, spec: &Arc<ModelSpec>) -> Arc<ModelSpec> {
        if self.mtp || spec.mtp.is_none() {
            return Arc::clone(spec);
        }
        Arc::new(ModelSpec {
            mtp: None,
            ..(**spec).clone()
        })
    }

    /// Maximum tree nodes.
    pub(crate) fn tree_nodes(&self) -> usize {
        (self.speculation.budget + 1).clamp(FORCED_NODES, Tree::MAX_NODES)
    }

    /// Opens the model and completes the speculation settings. Drops the draft if even its best
    /// case would be too slow on this device. What an earlier load measured is not measured again.
    pub(crate) fn open(
        &self,
        backend: &dyn Backend,
        config: LoadConfig,
        also: &mut dyn FnMut(LoadProgress),
        earlier: &MeasuredOnce,
    ) -> anyhow::Result<OpenedModel> {
        if let Some(FirstLoad { costs, slow, .. }) =
            earlier.with(&config).filter(|_| self.measure_costs)
        {
            let speculation = SpeculationConfig {
                costs: Some(costs),
                ..self.speculation.clone()
            };
            return open_without(backend, config, also, (speculation, slow));
        }
        let mut runner = open::open(backend, config.clone(), also)?;
        let speculation = self.speculation(runner.as_mut())?;
        let info = runner.info();
        if self.mtp && info.mtp.is_none() {
            tracing::warn!(
                device = info.device.id,
                "the device does not run multi-token-prediction heads; it decodes plainly"
            );
        }
        let Some(costs) = &speculation.costs else {
            return Ok(OpenedModel {
                runner,
                speculation,
                config,
            });
        };
        let active = speculation.active_sources(info);
        let slow = slow_sources(costs, info, active, speculation.budget);
        earlier.keep(FirstLoad {
            opened: measured::drafts(&config),
            costs: costs.clone(),
            slow,
        });
        if slow.is_empty() {
            return Ok(OpenedModel {
                runner,
                speculation,
                config,
            });
        }
        drop(runner);
        open_without(backend, config, also, (speculation, slow))
    }

    /// Completes the speculation settings on an idle runner.
    fn speculation(&self, runner: &mut dyn Runner) -> anyhow::Result<SpeculationConfig> {
        let mut speculation = self.speculation.clone();
        let lazy = self
            .config
            .as_ref()
            .is_some_and(|config| config.load == DraftLoad::AtFirstUse);
        if self.measure_costs && lazy {
            // Measuring would load the draft.
            speculation.measure_time_limit = Some(MEASURE_TIME);
        } else if self.measure_costs {
            let sources = speculation.active_sources(runner.info());
            if !sources.is_empty() {
                speculation.costs = measure(runner, sources)?;
            }
        }
        if let Some(costs) = &speculation.costs {
            let ms = |seconds: f64| format!("{:.2} ms", seconds * 1e3);
            tracing::info!(
                draft = ms(costs.draft(DraftSource::Block, 1)),
                head_depth = ms(costs.draft(DraftSource::Mtp, 1)),
                one_row = ms(costs.verify(1)),
                eight_rows = ms(costs.verify(8)),
                sixteen_rows = ms(costs.verify(16)),
                "measured what passes cost"
            );
        }
        Ok(speculation)
    }

    /// Leaves the model's multi-token-prediction head unused.
    pub(crate) fn drop_mtp(&mut self) {
        self.mtp = false;
        self.speculation.sources = self.speculation.sources.without(DraftSource::Mtp);
    }

    /// What drafts, for the log.
    pub(crate) fn line(&self) -> Option<String> {
        if self.speculation.budget == 0 {
            return None;
        }
        let mut what = Vec::new();
        if let Some(config) = &self.config {
            let spec = &config.spec;
            let bytes = spec.weights().iter().map(|w| w.bytes() as u64).sum();
            what.push(format!(
                "draft {}: {} layers, {}, blocks of {}",
                spec.name,
                spec.layers.len(),
                bytes_text(bytes),
                spec.block,
            ));
        }
        if self.mtp {
            what.push("the model's own multi-token-prediction head drafts".to_owned());
        }
        if self.speculation.min_match > 0 && self.speculation.sources.contains(DraftSource::Suffix)
        {
            what.push(format!(
                "suffix matches of at least {} tokens draft",
                self.speculation.min_match
            ));
        }
        let how = match self.speculation.init {
            TreeInit::ChainOnly => "chains",
            TreeInit::Chain => "trees seeded with a chain",
            TreeInit::None => "trees",
        };
        (!what.is_empty()).then(|| {
            format!(
                "{}; {how} of up to {} drafted tokens",
                what.join("; "),
                self.speculation.budget
            )
        })
    }
}

/// The sources of `active` that would be too slow on this device even if no draft were wrong. A
/// warning names each of them.
pub(crate) fn slow_sources(
    costs: &CostTable,
    info: &RunnerInfo,
    active: SourceSet,
    budget: usize,
) -> SourceSet {
    let mut slow = SourceSet::NONE;
    for source in active.without(DraftSource::Suffix).iter() {
        let depth = source.depth(info).min(budget);
        let promise = costs.max_speedup(SourceSet::of(&[source]), depth);
        if promise < decode::MIN_SPEEDUP {
            tracing::warn!(
                "{} is not used: drafts are wrong at times, and even one that never is would bring \
                 no more than {promise:.2} times the speed of plain decoding on this device, where \
                 {} are wanted to try; --ddtree-cost-stop off uses it all the same",
                match source {
                    DraftSource::Mtp => "the multi-token-prediction head",
                    DraftSource::Block | DraftSource::Suffix => "the draft",
                },
                decode::MIN_SPEEDUP
            );
            slow = slow.with(source);
        }
    }
    slow
}

/// Opens a model without the drafts that are too slow.
fn open_without(
    backend: &dyn Backend,
    config: LoadConfig,
    also: &mut dyn FnMut(LoadProgress),
    (mut speculation, slow): (SpeculationConfig, SourceSet),
) -> anyhow::Result<OpenedModel> {
    for source in slow.iter() {
        speculation.sources = speculation.sources.without(source);
    }
    let config = measured::without(config, slow);
    Ok(OpenedModel {
        runner: open::open(backend, config.clone(), also)?,
        speculation,
        config,
    })
}

/// The sources that a model and the flags provide.
struct Available {
    block: bool,
    mtp: bool,
    suffix: bool,
}

/// The sources that draft: those of `--draft-sources` that are available.
///
/// # Errors
/// A list that names only sources that are not available.
fn sources(args: &DraftArgs, available: Available) -> anyhow::Result<SourceSet> {
    use DraftSourceName::{Block, Mtp, Suffix};
    let listed = match &args.draft_sources[..] {
        [] => &[Block, Mtp, Suffix][..],
        listed => listed,
    };
    let found = listed.iter().filter_map(|source| match source {
        Block => available.block.then_some(DraftSource::Block),
        Mtp => available.mtp.then_some(DraftSource::Mtp),
        Suffix => available.suffix.then_some(DraftSource::Suffix),
    });
    let found = found.fold(SourceSet::NONE, SourceSet::with);
    if !found.is_empty() || args.draft_sources.is_empty() {
        return Ok(found);
    }
    bail!(
        "--draft-sources: none of the listed sources can draft: `mtp` needs a model with a \
         multi-token-prediction head and no --no-mtp, `block` needs --draft, and `suffix` needs \
         --lookup-ngram above 0"
    )
}

/// The draft in the file or folder that `--draft` names.
///
/// # Errors
/// Names the flag and the file.
pub(crate) fn load_draft(
    path: &Path,
    target: &ModelSpec,
    options: DraftOptions,
) -> anyhow::Result<LoadedDraft> {
    check_draft(path).context("--draft")?;
    model::load_draft(path, target, options).context("--draft")
}

/// Draft options from the window flag.
pub(crate) fn options(draft_swa: usize) -> DraftOptions {
    DraftOptions {
        window: (draft_swa > 0).then_some(draft_swa),
        width: None,
    }
}

/// Rows of a draft's pass from the width flag.
pub(crate) fn width(draft_width: usize) -> Option<usize> {
    (draft_width > 0).then_some(draft_width)
}

/// How to load a draft beside a target.
pub(crate) fn draft_config(found: LoadedDraft, reference: bool, lazy: bool) -> DraftLoadConfig {
    DraftLoadConfig {
        spec: found.spec,
        weights: found.weights,
        // The reference rounds nothing, as in the target's cache.
        kv: if reference {
            KvFormat::F32
        } else {
            KvFormat::F16
        },
        load: if lazy {
            DraftLoad::AtFirstUse
        } else {
            DraftLoad::AtOpen
        },
    }
}

/// Costs of passes on an idle runner, and of the drafts of those sources that it has.
pub(crate) fn measure(
    runner: &mut dyn Runner,
    sources: SourceSet,
) -> anyhow::Result<Option<CostTable>> {
    let at: (decode::Clock, Duration) = (clock, MEASURE_TIME);
    Ok(decode::speculation::measure(runner, sources, at)?)
}

/// Time since the first call.
pub(crate) fn clock() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}
