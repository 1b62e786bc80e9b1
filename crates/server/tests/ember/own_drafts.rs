//! Every draft of the bundled model drafts for it, alone and together, and changes no text.

use contract::{Backend, DraftLoad, DraftLoadConfig, KvFormat, LoadConfig, TokenId};
use cpu::CpuBackend;
use decode::{
    DraftSource, Event, GenerationParams, Job, JobId, Sampling, Scheduler, SchedulerConfig,
    SchedulerState, SourceSet, SpeculationConfig,
};
use model::DraftOptions;

use crate::golden::{FAST, cases, ember, ids};
use crate::load_config;

const MAX_TOKENS: usize = 64;

/// The bundled model with its head and one of its draft files.
fn with_draft(file: Option<&str>) -> LoadConfig {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let mut config = load_config(&loaded, FAST);
    config.limits.tree_nodes = 24;
    config.batch_invariant = true;
    config.draft = file.map(|file| {
        let options = DraftOptions::default();
        let draft = model::load_draft(&ember(file), &loaded.spec, options).unwrap();
        DraftLoadConfig {
            spec: draft.spec,
            weights: draft.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        }
    });
    config
}

/// Greedy continuations of the golden prompts, and their mean tokens per decode step.
fn texts(
    device: &dyn Backend,
    config: LoadConfig,
    sources: &[DraftSource],
) -> (Vec<Vec<TokenId>>, f64) {
    let runner = device.open(config, &mut |_| {}).unwrap();
    let speculation = SpeculationConfig {
        budget: if sources.is_empty() { 0 } else { 15 },
        sources: SourceSet::of(sources),
        ..SpeculationConfig::default()
    };
    let mut scheduler = Scheduler::new(
        runner,
        SchedulerConfig {
            max_sequences: 1,
            speculation,
            ..SchedulerConfig::default()
        },
    );
    let mut texts = Vec::new();
    for (i, case) in cases().iter().enumerate() {
        let job = Job {
            id: JobId(i as u64),
            prompt: ids(&case["prompt_ids"]).as_slice().into(),
            choices: 1,
            params: GenerationParams {
                sampling: Sampling::greedy(),
                max_tokens: MAX_TOKENS,
                ignore_eos: true,
                ..GenerationParams::default()
            },
            priority: 0,
        };
        scheduler.submit(job).unwrap();
        let (mut text, mut events) = (Vec::new(), Vec::new());
        while scheduler.step(&mut events).unwrap() != SchedulerState::Idle || !events.is_empty() {
            for (_, event) in events.drain(..) {
                match event {
                    Event::Tokens { tokens, .. } => {
                        text.extend(tokens.iter().map(|token| token.id));
                    }
                    Event::Failed { error } => panic!("{error}"),
                    _ => {}
                }
            }
        }
        texts.push(text);
    }
    let stats = scheduler.stats();
    (
        texts,
        stats.generated_tokens as f64 / stats.decode_steps as f64,
    )
}

/// Every draft on a device gives several tokens a step and changes no text.
pub(crate) fn check_own_drafts(device: &dyn Backend) {
    let (plain, one) = texts(device, with_draft(None), &[]);
    assert!((0.99..1.05).contains(&one), "{one}");
    let (head, block) = (DraftSource::Mtp, DraftSource::Block);
    for (file, sources) in [
        (None, &[head][..]),
        (Some("ember-draft.gguf"), &[block]),
        (Some("ember-dflash2.gguf"), &[block]),
        (Some("ember-dspark.gguf"), &[block]),
        (Some("ember-dflash2.gguf"), &[head, block]),
    ] {
        let (drafted, tokens) = texts(device, with_draft(file), sources);
        assert!(drafted == plain, "{file:?} {sources:?} changed a text");
        assert!(tokens > 2.5, "{file:?} {sources:?}: {tokens} tokens a step");
    }
}

#[test]
fn every_own_draft_gives_several_tokens_a_step_and_changes_no_text() {
    check_own_drafts(&CpuBackend::new(FAST));
}
