//! Runs plans launch by launch or as captured graphs.

use std::collections::BTreeMap;
use std::time::Instant;

use contract::DeviceError;

use crate::compile::Modules;
use crate::driver::{Event, Function, Gpu, Graph, Stream};
use crate::launch::Launch;
use crate::plan::PlanKey;

/// How plans run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum LaunchMode {
    /// Launch by launch.
    Eager,
    /// Captured at first use, replayed from then on; prompts launch by launch.
    #[default]
    Graph,
    /// Prompts are captured too. The launches of a shard wait for those of another, which the same
    /// thread queues behind them, so a queue must take all of a pass at once.
    GraphWithChunks,
}

/// Launches with their functions.
type ReadyList = Vec<(Function, Launch)>;

/// Every plan, ready to run. Graphs are dropped before the modules they launch from.
pub(crate) struct Launcher {
    graphs: BTreeMap<PlanKey, Graph>,
    lists: BTreeMap<PlanKey, ReadyList>,
    mode: LaunchMode,
    /// Keeps the functions loaded.
    _modules: Modules,
}

impl Launcher {
    /// Looks up the function of every launch.
    pub(crate) fn new(
        gpu: &Gpu,
        modules: Modules,
        plans: BTreeMap<PlanKey, Vec<Launch>>,
        mode: LaunchMode,
    ) -> Result<Launcher, DeviceError> {
        let mut lists = BTreeMap::new();
        for (key, launches) in plans {
            let ready = launches
                .into_iter()
                .map(|launch| Ok((modules.function(gpu, &launch)?, launch)));
            lists.insert(key, ready.collect::<Result<Vec<_>, DeviceError>>()?);
        }
        Ok(Launcher {
            graphs: BTreeMap::new(),
            lists,
            mode,
            _modules: modules,
        })
    }

    /// Whether a plan runs as a captured graph.
    pub(crate) fn captures(&self, key: PlanKey) -> bool {
        match self.mode {
            LaunchMode::Eager => false,
            LaunchMode::Graph => !matches!(key, PlanKey::Chunk(_)),
            LaunchMode::GraphWithChunks => true,
        }
    }

    /// Queues `first`, the launches of a plan, and `last`.
    ///
    /// Launch `i` and those after it wait for the event of a gate `(i, event)`; only prompts have
    /// any. A captured prompt waits for all of them first.
    ///
    /// Prompts mostly run launch by launch: their kernels are long, and the queue stays ahead of
    /// the GPU.
    pub(crate) fn run(
        &mut self,
        gpu: &Gpu,
        key: PlanKey,
        layer_waits: &[(usize, &Event)],
        first: impl FnOnce(&Gpu) -> Result<(), DeviceError>,
        last: impl FnOnce(&Gpu) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let captures = self.captures(key);
        let list = list_of(&self.lists, key)?;
        let queue = || {
            first(gpu)?;
            let layer_waits = if captures { &[] } else { layer_waits };
            let mut layer_waits = layer_waits.iter().peekable();
            for (i, (function, launch)) in list.iter().enumerate() {
                while let Some((_, event)) = layer_waits.next_if(|(at, _)| *at <= i) {
                    gpu.stream().wait(event)?;
                }
                gpu.run_function(function, launch)?;
            }
            last(gpu)
        };
        if !captures {
            return queue();
        }
        for (_, event) in layer_waits {
            gpu.stream().wait(event)?;
        }
        if let Some(graph) = self.graphs.get(&key) {
            return gpu.replay(graph);
        }
        let (free, begun) = (gpu.memory()?.0, Instant::now());
        let graph = gpu.capture(queue)?;
        // A graph takes its memory on the GPU when it is first launched.
        gpu.replay(self.graphs.entry(key).or_insert(graph))?;
        let us = begun.elapsed().as_micros() as u64;
        let bytes = free.saturating_sub(gpu.memory()?.0);
        tracing::debug!(?key, launches = list.len(), us, bytes, "captured");
        Ok(())
    }

    /// Queues the launches of a plan on `stream`, one by one.
    pub(crate) fn run_on(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        key: PlanKey,
    ) -> Result<(), DeviceError> {
        let mut list = list_of(&self.lists, key)?.iter();
        list.try_for_each(|(function, launch)| gpu.run_on(stream, function, launch))
    }

    /// Queues the launches `range` of a plan one by one.
    #[cfg(feature = "inspect")]
    pub(crate) fn run_part(
        &self,
        gpu: &Gpu,
        key: PlanKey,
        range: std::ops::Range<usize>,
    ) -> Result<(), DeviceError> {
        let list = self.lists.get(&key).map_or(&[][..], |list| &list[range]);
        list.iter()
            .try_for_each(|(function, launch)| gpu.run_function(function, launch))
    }
}

/// The launches of a plan.
fn list_of(lists: &BTreeMap<PlanKey, ReadyList>, key: PlanKey) -> Result<&ReadyList, DeviceError> {
    lists.get(&key).ok_or_else(|| DeviceError::InvalidCall {
        call: "a plan",
        detail: format!("{key:?} was not built for these limits"),
    })
}
