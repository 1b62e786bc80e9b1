//! The seam's view of the card: what it is, what a plan would take, and how a plan is opened.

use std::time::Instant;

use contract::{
    Backend, DeviceError, DeviceInfo, DraftLoad, KvPool, LoadProgress, MemoryPlan, OpenPlan,
    Runner, RunnerInfo,
};

use crate::check;
use crate::compile::{self, Modules};
use crate::deferred_draft::DeferredDraft;
use crate::driver::Gpu;
use crate::exec::{Engine, Mode, Regions, Runs, pinned_bytes};
use crate::launch::Unit;
use crate::launch::attention::Card as Limits;
use crate::memory::{BumpAllocator, CONTEXT_BYTES, DRIVER_BYTES, MemoryBudget, REGION_ALIGN};
use crate::meter::Meter;
use crate::plan::{Facts, Plans, Sums};
use crate::probe::Card;
use crate::runner::{CudaRunner, DraftFacts};
use crate::state::{PAGE_SIZE, State};
use crate::weights::{Sources, WeightSet, Weights};

/// Prefill gives the same values however it is cut at multiples of this many tokens, up to rounding.
const PREFILL_ALIGN: usize = 64;
/// Devices of compute capability 8.0 and 9.0 give a block more shared memory than the others' 99 KiB.
const SHARED_BYTES: [((u32, u32), usize); 3] = [
    ((8, 0), 163 << 10),
    ((8, 7), 163 << 10),
    ((9, 0), 227 << 10),
];

/// How a card is to be used.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The most memory to take, in bytes; `None` for all that is free.
    pub vram_limit: Option<u64>,
    /// Run launch by launch instead of as captured graphs, to find faults.
    pub eager: bool,
    /// Read prompts as chains of tree nodes instead of in chunks, to find faults.
    pub chains: bool,
    /// Fill everything but weights with NaNs before the first use, for tests.
    pub poison: bool,
    /// Give pages of keys and values out in a scattered order, for tests.
    pub scatter: bool,
    /// Compile attention so that trees may have windows ([`contract::AttentionWindow`]); without, a tree with one is refused.
    pub windows: bool,
    /// Run small models as large ones run, without launches of their own for steps of one row, for tests.
    pub as_large: bool,
    /// In which order steps sum where nothing is promised ([`contract::OpenPlan::exact`]); `None` for what is best here.
    pub sums: Option<Sums>,
    /// Plan as if all of the card's memory were free: for a card that is not here.
    pub unseen: bool,
    /// How kernels are compiled.
    pub compile: compile::Options,
}

/// One card as a device.
#[derive(Debug, Clone)]
pub struct CudaBackend {
    card: Card,
    options: Options,
}

/// Where everything of a plan lies, and what that takes.
struct Layout {
    weights: Weights,
    state: State,
    plans: Plans,
    /// In which order steps sum.
    sums: Sums,
    /// Bytes of weights, cached rows, states, scratch, all of the draft, and of the table on the host.
    sizes: [u64; 6],
    /// Whether the draft's weights come later.
    lazy: bool,
}

/// Whose weights are loaded with the model.
fn at_open(lazy: bool) -> &'static [WeightSet] {
    match lazy {
        true => &[WeightSet::Target],
        false => &[WeightSet::Target, WeightSet::Draft],
    }
}

impl Layout {
    fn new(plan: &OpenPlan, (card, options): (&Card, &Options), bases: [u64; 6]) -> Layout {
        let [
            mut weights,
            mut kv,
            mut states,
            mut scratch,
            mut draft,
            mut table,
        ] = bases.map(BumpAllocator::new);
        let spec = plan.draft.as_ref().map(|draft| &*draft.spec);
        let of_target = (&*plan.target, &mut weights);
        let placed = Weights::new(of_target, &mut table, (spec, &mut draft));
        let regions = [&mut kv, &mut states, &mut scratch, &mut draft];
        let state = State::new(plan, regions);
        let limits = limits(card, options.windows);
        let sums = Sums::of(plan, limits, options.sums);
        let facts = Facts {
            card: limits,
            sums,
            as_large: options.as_large,
        };
        let plans = Plans::new(plan, &placed, &state, facts, &mut scratch);
        let lazy = plan.draft.as_ref().map(|draft| draft.load) == Some(DraftLoad::AtFirstUse);
        Layout {
            lazy,
            weights: placed,
            state,
            plans,
            sums,
            sizes: [weights, kv, states, scratch, draft, table]
                .map(|arena| arena.used() + REGION_ALIGN),
        }
    }

    fn memory(&self) -> MemoryPlan {
        let [weights, kv, states, scratch, draft, table] = self.sizes;
        let loading = self.weights.staging_bytes(at_open(self.lazy));
        let mut running: usize = pinned_bytes(&self.plans, &self.state).iter().sum();
        if self.lazy {
            running += DeferredDraft::staging_bytes(&self.weights);
        }
        MemoryPlan {
            weights_bytes: weights,
            kv_bytes: kv,
            state_bytes: states,
            scratch_bytes: scratch,
            draft_bytes: draft,
            mapped_bytes: 0,
            driver_bytes: DRIVER_BYTES,
            pinned_bytes: table + loading.max(running) as u64,
        }
    }
}

/// What launches need to know of a card.
fn limits(card: &Card, windows: bool) -> Limits {
    let known = SHARED_BYTES.iter().find(|(cc, _)| *cc == card.capability);
    Limits {
        multiprocessors: card.multiprocessors as usize,
        shared_bytes: known.map_or(99 << 10, |(_, bytes)| *bytes),
        warpgroups: card.capability == (9, 0),
        path_order: false,
        windows,
    }
}

impl Card {
    /// Whether the kernels can be compiled for it: they need the asynchronous copies and matrix products of
    /// compute capability 8.0.
    pub fn runs_kernels(&self) -> bool {
        self.capability >= (8, 0)
    }
}

impl CudaBackend {
    /// A card that [`probe`](crate::probe()) found, used as far as there is memory.
    pub fn new(card: Card) -> CudaBackend {
        CudaBackend::with_options(card, Options::default())
    }

    /// The same, used as told.
    pub fn with_options(card: Card, options: Options) -> CudaBackend {
        CudaBackend { card, options }
    }

    fn name(&self) -> String {
        format!("cuda:{} ({})", self.card.ordinal, self.card.name)
    }

    fn info(&self, free_bytes: u64) -> DeviceInfo {
        let card = &self.card;
        let mut features = vec![
            card.arch(),
            format!("{} multiprocessors", card.multiprocessors),
        ];
        if let Some(limit) = self.options.vram_limit {
            features.push(format!("limited to {limit} bytes"));
        }
        DeviceInfo {
            id: format!("cuda:{}", card.ordinal),
            name: card.name.clone(),
            features,
            total_bytes: card.total_bytes,
            free_bytes,
        }
    }

    fn layout(&self, plan: &OpenPlan, bases: [u64; 6]) -> Layout {
        Layout::new(plan, (&self.card, &self.options), bases)
    }

    fn checked(&self, plan: &OpenPlan) -> Result<(), DeviceError> {
        if !self.card.runs_kernels() {
            let (major, minor) = self.card.capability;
            return Err(DeviceError::Unsupported {
                what: format!("compute capability {major}.{minor}"),
                device: self.name(),
                instead: "the kernels need 8.0 or later, use --device cpu".to_owned(),
            });
        }
        check::require_supported(plan, &self.name())?;
        let card = limits(&self.card, self.options.windows);
        check::check_shared_memory(plan, card, &self.name())
    }

    /// Everything that is compiled to run a plan, for filling a cache ahead of time.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a plan that `open` would refuse.
    pub fn units(&self, plan: &OpenPlan) -> Result<Vec<Unit>, DeviceError> {
        self.checked(plan)?;
        Ok(self.layout(plan, [0; 6]).plans.units())
    }

    /// Opens a runner by its own type, so that tests can look inside.
    pub(crate) fn open_runner(
        &self,
        plan: OpenPlan,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CudaRunner, DeviceError> {
        self.checked(&plan)?;
        let planned = self.layout(&plan, [0; 6]);
        let memory = planned.memory();
        let gpu = Gpu::open(self.card.ordinal)?;
        let free = gpu.memory()?.0;
        let budget = MemoryBudget {
            free: free + CONTEXT_BYTES,
            limit: self.options.vram_limit,
        };
        let with_context = |context: usize| {
            let mut other = plan.clone();
            other.limits.context = context;
            // Whatever all of them have, one must fit.
            other.limits.pool = plan.limits.pool.map(|_| 0);
            self.layout(&other, [0; 6]).memory().total_bytes()
        };
        let context = plan.limits.context;
        budget.require(&memory, context, &self.name(), with_context)?;
        let started = Instant::now();
        let units = planned.plans.units();
        let modules = Modules::compile(&gpu, &units, &self.options.compile, &mut |at| {
            tracing::debug!(done = at.done, total = at.total, unit = %at.unit, "kernel ready");
        })?;
        let compiled = started.elapsed();
        let byte = if self.options.poison { 0xff } else { 0 };
        let mut regions = Regions::new(&gpu, planned.sizes, byte)?;
        let mut layout = self.layout(&plan, regions.bases());
        let sources = Sources {
            target: &*plan.weights,
            draft: plan.draft.as_ref().map(|draft| &*draft.weights),
        };
        let began = Instant::now();
        let sets = at_open(layout.lazy);
        layout.weights.load(&gpu, (sources, sets), progress)?;
        let table = (regions.table.device_ptr(), regions.table.as_mut_slice());
        layout.weights.load_table(sources, table)?;
        let loaded = began.elapsed();
        let mode = match self.options.eager {
            true => Mode::Eager,
            false => Mode::Graph,
        };
        let runs = Runs::new(&gpu, modules, layout.plans.take_launches(), mode)?;
        let info = RunnerInfo {
            device: self.info(gpu.memory()?.0),
            vocab: plan.target.vocab,
            limits: plan.limits,
            pool: KvPool::for_limits(plan.limits, PAGE_SIZE),
            kv: plan.kv,
            model: plan.target.hash,
            draft_depth: plan.draft.as_ref().map(|draft| draft.spec.depth()),
            batch_invariant: layout.sums == Sums::ByPath,
            prefill_align: PREFILL_ALIGN,
            memory,
        };
        let target = plan.target.clone();
        let made = (layout.plans, runs);
        let chains = self.options.chains;
        let engine = Engine::new(gpu, target, layout.state, regions, made, chains)?;
        let taken = free.saturating_sub(engine.gpu().memory()?.0);
        let planned: u64 = planned.sizes[..5].iter().sum();
        tracing::info!(
            device = %info.device.id,
            kernels = units.len(),
            compile_ms = compiled.as_millis() as u64,
            load_ms = loaded.as_millis() as u64,
            open_ms = started.elapsed().as_millis() as u64,
            weights_bytes = info.memory.weights_bytes,
            kv_bytes = info.memory.kv_bytes,
            driver_bytes = taken.saturating_sub(planned),
            "model opened on the card"
        );
        let draft = plan.draft.as_ref().map(|draft| DraftFacts {
            hash: draft.spec.hash,
            kv: draft.kv,
            block: draft.spec.block,
            mask: draft.spec.mask_token,
        });
        let mut runner = CudaRunner::new(info, engine, draft, &self.options);
        if let Some(draft) = plan.draft.filter(|_| layout.lazy) {
            let (source, name) = (draft.weights, &draft.spec.name);
            runner.load_later(DeferredDraft::new(layout.weights, source, name));
        }
        Ok(runner)
    }
}

impl Backend for CudaBackend {
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        // Asking the driver needs a context, which costs hundreds of megabytes on the card. Its management library
        // tells without one; where that is missing, whoever opens a plan learns what is free.
        let total = self.card.total_bytes;
        let told = match self.options.unseen {
            true => None,
            false => Meter::open(&self.card).and_then(|meter| meter.free_bytes()),
        };
        let free = told.unwrap_or(total).min(total);
        let limit = self.options.vram_limit.unwrap_or(free);
        Ok(self.info(free.min(limit)))
    }

    fn estimate(&self, plan: &OpenPlan) -> Result<MemoryPlan, DeviceError> {
        self.checked(plan)?;
        Ok(self.layout(plan, [0; 6]).memory())
    }

    fn open(
        &self,
        plan: OpenPlan,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        Ok(Box::new(self.open_runner(plan, progress)?))
    }
}

#[cfg(test)]
mod tests {
    use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
    use contract::{KvFormat, KvFormats, Limits, QuantType};

    use super::*;
    use crate::launch::{Args, Launch};
    use crate::plan::Key;

    /// The plans of a small model with delta layers, for so many sequences.
    fn plans(specimen: &SyntheticModel, (number, sums): (u32, Sums), sequences: usize) -> Plans {
        let plan = OpenPlan {
            target: specimen.spec.clone(),
            weights: specimen.weights.clone(),
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: KvFormat::Q8_0,
                v: KvFormat::Q8_0,
            },
            limits: Limits {
                sequences,
                context: 600,
                tree_nodes: 64,
                prefill_chunk: 192,
                pool: None,
            },
        };
        let card = Card {
            ordinal: 0,
            name: "a card".to_owned(),
            capability: (number / 10, number % 10),
            multiprocessors: 82,
            total_bytes: 24 << 30,
        };
        let options = Options {
            sums: Some(sums),
            as_large: true,
            ..Options::default()
        };
        let backend = CudaBackend::with_options(card, options);
        backend.layout(&plan, [0; 6]).plans
    }

    /// Everything about a plan's launches but addresses.
    fn launches(plans: &Plans, key: Key) -> Vec<String> {
        let all = plans.all[&key].launches.iter().cloned();
        let bare = all.map(|launch| Launch {
            args: Args::new(),
            ..launch
        });
        bare.map(|launch| format!("{launch:?}")).collect()
    }

    #[test]
    fn a_step_is_launched_for_its_trees_however_many_there_is_room_for() {
        let specimen = SyntheticModel::new(SyntheticLayout::HybridWide, QuantType::Q4_K, 1);
        let compare = |key: Key, few: &Plans, many: &Plans| {
            let (few, many) = (launches(few, key), launches(many, key));
            assert_eq!(few.len(), many.len(), "{key:?}");
            for (few, many) in few.iter().zip(&many) {
                assert_eq!(few, many, "{key:?}");
            }
        };
        let cards = [86, 90].map(|number| [Sums::Fast, Sums::ByPath].map(|sums| (number, sums)));
        for card in cards.into_iter().flatten() {
            let [one, two, four] = [1, 2, 4].map(|sequences| plans(&specimen, card, sequences));
            for (few, trees) in [(&one, 1), (&two, 1), (&two, 2)] {
                let keys = four.all.keys().copied();
                for key in
                    keys.filter(|key| matches!(key, Key::Step { trees: n, .. } if *n == trees))
                {
                    compare(key, few, &four);
                }
                compare(Key::Commit(trees), few, &four);
            }
        }
    }

    #[test]
    fn a_card_is_described_by_what_the_driver_said() {
        let card = Card {
            ordinal: 1,
            name: "Test Card".to_owned(),
            capability: (8, 6),
            multiprocessors: 82,
            total_bytes: 24 << 30,
        };
        let limit = Options {
            vram_limit: Some(1 << 30),
            ..Options::default()
        };
        let info = CudaBackend::with_options(card, limit).probe().unwrap();
        assert_eq!(info.id, "cuda:1");
        assert_eq!(info.features[..2], ["sm_86", "82 multiprocessors"]);
        assert_eq!((info.total_bytes, info.free_bytes), (24 << 30, 1 << 30));
    }
}
