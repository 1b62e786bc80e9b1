//! A scheduler over a fake runner, and all its output.

use std::collections::BTreeMap;

use conformance::fake::{Ending, FakeDraft, FakeHandle, FakeRunner, FakeSpec, Language};
use contract::{DeviceError, Limits, Runner, TokenId, Tree};
use decode::{
    ChoiceStats, DraftSource, Event, FinishReason, GenerationParams, Job, JobError, JobId,
    Logprobs, OutputToken, ProposedTree, Sampling, Scheduler, SchedulerConfig, SchedulerState,
    SourceSet, SpeculationConfig, TreeProposer, TreeRequest,
};
use proptest::prelude::*;

pub(crate) const EOS: TokenId = TokenId(2);

/// A small language whose texts end after about thirty tokens.
pub(crate) const LANGUAGE: Language = Language {
    vocab: 40,
    spread: 8.0,
    ending: Some(Ending {
        token: EOS,
        chance: 0.03,
    }),
    salt: 9,
};

/// The same without end tokens.
pub(crate) const ENDLESS: Language = Language {
    ending: Some(Ending {
        token: EOS,
        chance: 0.0,
    }),
    ..LANGUAGE
};

pub(crate) fn spec(language: Language) -> FakeSpec {
    FakeSpec {
        language,
        limits: Limits {
            sequences: 8,
            context: 96,
            tree_nodes: 24,
            prefill_chunk: 32,
            pool_tokens: None,
        },
        pool_tokens: 8 * (96 + 24),
        prefill_align: 4,
        ..FakeSpec::default()
    }
}

pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig {
        eos: vec![EOS],
        max_fetched_top_k: 16,
        ..SchedulerConfig::default()
    }
}

/// Without speculation.
pub(crate) fn plain() -> SpeculationConfig {
    SpeculationConfig {
        budget: 0,
        ..SpeculationConfig::default()
    }
}

/// Each source of drafts alone, and all mixes.
pub(crate) fn any_sources() -> impl Strategy<Value = SourceSet> {
    prop::collection::vec(prop::sample::select(DraftSource::ALL.to_vec()), 1..4)
        .prop_map(|sources| SourceSet::of(&sources))
}

/// A device whose draft model and head are right at this share of positions.
pub(crate) fn drafting(spec: FakeSpec, depth: usize, acceptance_rate: f64) -> FakeSpec {
    let draft = Some(FakeDraft {
        depth,
        acceptance_rate,
    });
    FakeSpec {
        draft,
        mtp: draft,
        ..spec
    }
}

/// The configuration with these sources. Matches of one token occur in every text.
pub(crate) fn with_sources(config: SchedulerConfig, sources: SourceSet) -> SchedulerConfig {
    SchedulerConfig {
        speculation: SpeculationConfig {
            sources,
            min_match: 1,
            ..SpeculationConfig::default()
        },
        ..config
    }
}

pub(crate) fn prompt(len: usize, salt: u32) -> Vec<TokenId> {
    (0..len as u32)
        .map(|i| TokenId((i * 7 + salt * 13 + 3) % LANGUAGE.vocab as u32))
        .collect()
}

pub(crate) fn job(id: u64, prompt: Vec<TokenId>, params: GenerationParams) -> Job {
    Job {
        id: JobId(id),
        prompt: prompt.into(),
        choices: 1,
        params,
        priority: 0,
    }
}

pub(crate) fn greedy(max_tokens: usize) -> GenerationParams {
    GenerationParams {
        sampling: Sampling::greedy(),
        max_tokens,
        ..GenerationParams::default()
    }
}

pub(crate) fn sampled(max_tokens: usize, seed: u64) -> GenerationParams {
    GenerationParams {
        sampling: Sampling {
            seed,
            ..Sampling::default()
        },
        max_tokens,
        ..GenerationParams::default()
    }
}

/// The output of one choice.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Output {
    pub(crate) tokens: Vec<OutputToken>,
    pub(crate) reason: Option<FinishReason>,
    pub(crate) stats: ChoiceStats,
}

impl Output {
    pub(crate) fn ids(&self) -> Vec<TokenId> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

pub(crate) struct SchedulerFixture {
    pub(crate) scheduler: Scheduler,
    pub(crate) handle: FakeHandle,
    pub(crate) events: Vec<(JobId, Event)>,
}

impl SchedulerFixture {
    pub(crate) fn new(spec: FakeSpec, config: SchedulerConfig) -> SchedulerFixture {
        let runner = FakeRunner::new(spec);
        SchedulerFixture {
            handle: runner.handle(),
            scheduler: Scheduler::new(Box::new(runner), config),
            events: Vec::new(),
        }
    }

    /// Over another runner, whose faults `handle` injects.
    pub(crate) fn over(
        runner: Box<dyn Runner>,
        handle: FakeHandle,
        config: SchedulerConfig,
    ) -> SchedulerFixture {
        SchedulerFixture {
            handle,
            scheduler: Scheduler::new(runner, config),
            events: Vec::new(),
        }
    }

    pub(crate) fn with_trees(
        spec: FakeSpec,
        config: SchedulerConfig,
        trees: impl TreeProposer + 'static,
    ) -> SchedulerFixture {
        let runner = FakeRunner::new(spec);
        SchedulerFixture {
            handle: runner.handle(),
            scheduler: Scheduler::with_trees(Box::new(runner), config, Box::new(trees)),
            events: Vec::new(),
        }
    }

    pub(crate) fn step(&mut self) -> Result<SchedulerState, DeviceError> {
        self.scheduler.step(&mut self.events)
    }

    /// Steps until the scheduler is idle.
    pub(crate) fn finish(&mut self) {
        for _ in 0..20_000 {
            if self.step().expect("no device is lost here") == SchedulerState::Idle {
                assert!(self.scheduler.is_idle());
                assert_eq!(self.scheduler.stats().leaks, 0);
                return;
            }
        }
        panic!(
            "scheduler does not become idle: {:?}",
            self.scheduler.stats()
        );
    }

    pub(crate) fn submit(&mut self, job: Job) {
        self.scheduler.submit(job).expect("the job is admissible");
    }

    /// The output of every choice, with the order of events checked.
    pub(crate) fn outputs(&self) -> BTreeMap<(u64, usize), Output> {
        let mut all: BTreeMap<(u64, usize), Output> = BTreeMap::new();
        let mut over: Vec<JobId> = Vec::new();
        for (id, event) in &self.events {
            assert!(
                !over.contains(id),
                "{id} has events after its end: {event:?}"
            );
            match event {
                Event::Tokens { choice, tokens } => {
                    let outputs = all.entry((id.0, *choice)).or_default();
                    assert!(!tokens.is_empty() && outputs.reason.is_none(), "{id}");
                    outputs.tokens.extend(tokens.iter().cloned());
                }
                Event::Finished {
                    choice,
                    reason,
                    stats,
                } => {
                    let outputs = all.entry((id.0, *choice)).or_default();
                    assert!(outputs.reason.is_none(), "{id} ends twice");
                    outputs.reason = Some(*reason);
                    outputs.stats = *stats;
                    assert_eq!(stats.generated_tokens, outputs.tokens.len());
                }
                Event::Failed { .. } => over.push(*id),
                Event::Started { .. } | Event::Prefill { .. } | Event::PromptLogprobs(_) => {}
            }
        }
        all
    }

    pub(crate) fn failure(&self, id: u64) -> Option<JobError> {
        self.events.iter().find_map(|(job, event)| match event {
            Event::Failed { error } if job.0 == id => Some(error.clone()),
            _ => None,
        })
    }

    pub(crate) fn prompt_logprobs(&self, id: u64) -> Option<Vec<Option<Logprobs>>> {
        self.events.iter().find_map(|(job, event)| match event {
            Event::PromptLogprobs(reported) if job.0 == id => Some(reported.clone()),
            _ => None,
        })
    }

    /// Job ids in the order in which they left the queue.
    pub(crate) fn started(&self) -> Vec<u64> {
        let started = self.events.iter();
        started
            .filter(|(_, event)| matches!(event, Event::Started { .. }))
            .map(|(id, _)| id.0)
            .collect()
    }
}

/// The output of each choice alone, in plain decoding, with the prompt read at once.
pub(crate) fn reference_outputs(spec: &FakeSpec, job: &Job) -> Vec<Output> {
    let mut spec = spec.clone();
    spec.limits.prefill_chunk = spec.limits.context;
    (spec.pool_tokens, spec.page_size) = (spec.limits.context + spec.limits.tree_nodes, 1);
    (spec.draft, spec.mtp) = (None, None);
    let one_at_a_time = SchedulerConfig {
        max_sequences: 1,
        prefill_chunk: spec.limits.context,
        speculation: plain(),
        ..config()
    };
    (0..job.choices)
        .map(|choice| {
            let mut fixture = SchedulerFixture::new(spec.clone(), one_at_a_time.clone());
            let mut job = Job {
                id: JobId(0),
                choices: 1,
                ..job.clone()
            };
            job.params.sampling.seed += choice as u64;
            fixture.submit(job);
            fixture.finish();
            fixture.outputs().remove(&(0, 0)).unwrap_or_default()
        })
        .collect()
}

/// A seeded generator for tests.
pub(crate) struct TestRng(pub(crate) u64);

impl TestRng {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        // Knuth's MMIX multiplier; its high bits suffice here.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n.max(1)
    }
}

/// Random trees: sometimes right, sometimes wrong, sometimes deeper than useful.
pub(crate) struct RandomTrees {
    pub(crate) language: Language,
    pub(crate) rng: TestRng,
    pub(crate) nodes: usize,
}

impl TreeProposer for RandomTrees {
    fn propose(
        &mut self,
        _runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<ProposedTree>, DeviceError> {
        Ok(roots.iter().map(|root| self.tree(root).into()).collect())
    }
}

impl RandomTrees {
    fn tree(&mut self, root: &TreeRequest<'_>) -> Tree {
        let mut tree = Tree::root(root.token());
        let mut traces = vec![self.language.begin().then_all(root.history)];
        for _ in 0..self.rng.below(self.nodes) {
            let back = self.rng.below(3).min(tree.len() - 1);
            let parent = contract::NodeIdx((tree.len() - 1 - back) as u16);
            let likely =
                conformance::fake::ranked(&self.language.logits(traces[parent.index()]), 4);
            let token = likely[self.rng.below(likely.len())];
            if tree.push(parent, token).is_ok() {
                traces.push(traces[parent.index()].then(token));
            }
        }
        tree
    }
}

/// Checks that jobs which ended have the tokens of the reference, and failed ones a part of them.
pub(crate) fn require_reference_tokens(
    fixture: &SchedulerFixture,
    jobs: &[Job],
) -> Result<(), TestCaseError> {
    let outputs = fixture.outputs();
    for job in jobs {
        let failed = fixture.failure(job.id.0);
        let reference = reference_outputs(&spec(LANGUAGE), job);
        for (choice, expected) in reference.iter().enumerate() {
            let found = outputs.get(&(job.id.0, choice)).cloned();
            let found = found.unwrap_or_default();
            if failed.is_some() {
                prop_assert!(expected.tokens.starts_with(&found.tokens));
            } else {
                prop_assert_eq!(&found.tokens, &expected.tokens);
                let ended = found.reason.is_some_and(|r| r != FinishReason::Cancelled);
                prop_assert!(ended);
            }
        }
    }
    Ok(())
}
