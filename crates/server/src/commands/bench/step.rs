//! `hearth bench step`: times whole speculative steps with simulated acceptance.
//!
//! A step is draft, tree building, verify, acceptance, commit, and the tokens emitted as events. It
//! runs through the scheduler as in serving; [`super::timed_runner`] describes the simulation.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::time::Instant;

use anyhow::{Context, bail};
use contract::{Runner, StepGroups, TokenId};
use decode::{CostTable, DraftSource, SourceSet};
use decode::{
    Event, GenerationParams, Job, JobId, Sampling, Scheduler, SchedulerConfig, SchedulerState,
    SpeculationConfig,
};
use serde_json::json;

use super::timed_runner::{Calls, TimedRunner};
use super::{ModelSource, draft, model};
use crate::cli::OnOff;
use crate::cli::{GroupsArg, StepArgs};
use crate::open::bundled::Bundled;
use crate::open::drafting;
use crate::open::{self, MemoryRequest};

/// Untimed steps at the start, which build plans and fill caches.
const WARM_UP: usize = 3;

/// Time and counts of a step.
#[derive(Debug, Clone)]
struct StepTiming {
    ms: f64,
    calls: Calls,
    tokens: u64,
    /// Drafted nodes per tree.
    nodes: f64,
}

impl fmt::Display for StepTiming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let calls = &self.calls;
        write!(
            f,
            "  {:>3} rows {:<16} drafted {}: {:>7.3} ms, draft {:.3}, verify {:.3}, commit {:.3}; {} tokens, {:.2} expected",
            calls.nodes.iter().sum::<usize>(),
            format!("{:?}", calls.nodes),
            calls.drafted,
            self.ms,
            ms(calls.draft),
            ms(calls.verify),
            ms(calls.commit),
            self.tokens,
            calls.mean_tokens,
        )
    }
}

pub(super) fn step(args: &StepArgs, bundled: Bundled) -> anyhow::Result<()> {
    if args.accept < 1.0 || !args.accept.is_finite() {
        bail!(
            "--accept {}: use at least 1, because a step generates a token",
            args.accept
        );
    }
    let source = ModelSource {
        model: args.model.as_deref(),
        synthetic: args.synthetic.as_deref(),
        seed: 1,
        bundled: Some(bundled),
    };
    let loaded = model(&source)?;
    let sequences = args.sequences.iter().copied().max().unwrap_or(1);
    let tokens = ((WARM_UP + args.steps) as f64 * args.accept).ceil() as usize + 1;
    let backend = open::device_with_draft(&args.device, args.draft_device.as_deref())?;
    let request = MemoryRequest {
        sequences,
        context: Some(args.depth + tokens + 80),
        tree_nodes: usize::from(args.budget) + 1,
    };
    let mut fitted = open::fit_with_head(backend.as_ref(), &loaded, &args.device, request)?;
    fitted.config.draft = Some(draft(
        &loaded,
        args.draft.as_deref(),
        &source,
        fitted.config.kv.k,
    )?);
    fitted.config.batch_invariant = args.batch_invariant;
    let vocab = loaded.spec.vocab as u32;
    let chunk = fitted.config.limits.prefill_chunk;
    let runner = TimedRunner::new(open::open(backend.as_ref(), fitted.config, &mut |_| {})?);
    let batch_invariant = runner.info().batch_invariant;
    let block = SourceSet::of(&[DraftSource::Block]);
    let costs = match args.cost_stop {
        OnOff::Off => None,
        OnOff::On => drafting::measure(&mut runner.clone(), block)?,
    };
    let budget = usize::from(args.budget);
    let accept = runner.simulate_acceptance(args.accept, budget);
    if accept < args.accept - 0.01 {
        bail!(
            "--accept {}: a tree of {budget} nodes has at most {accept:.2} accepted tokens",
            args.accept
        );
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} on {}: whole steps of trees of up to {} drafted nodes after {} tokens{}\n\
         acceptance is SIMULATED: {} tokens per step on average for a full tree",
        loaded.info.name,
        fitted.device.name,
        args.budget,
        args.depth,
        if costs.is_some() {
            ", sized by measured costs as in serving"
        } else {
            ""
        },
        args.accept
    )?;
    writeln!(
        out,
        "{:>9} {:>6} {:>11} {:>11} {:>6} {:>9} {:>17} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}",
        "sequences",
        "steps",
        "tokens/step",
        "expected",
        "nodes",
        "ms",
        "spread ms",
        "draft",
        "verify",
        "commit",
        "outside",
        "tok/s",
        "expected"
    )?;
    if let Some(costs) = costs.as_ref().filter(|_| args.each) {
        let draft = costs.draft_points(DraftSource::Block);
        let verify = costs.verify_points();
        writeln!(out, "costs in seconds: verify {verify:?}, draft {draft:?}")?;
    }
    let mut alone = None;
    for &sequences in &args.sequences {
        runner.reset_simulation();
        let mut steps = Vec::new();
        for rep in 0..args.reps.max(1) {
            let config = SchedulerConfig {
                max_sequences: sequences,
                prefill_chunk: chunk,
                clock: Some(drafting::clock),
                groups: match args.groups {
                    GroupsArg::Together => StepGroups::One,
                    GroupsArg::InTurn => StepGroups::Two,
                    GroupsArg::Measured => StepGroups::Measured,
                },
                speculation: SpeculationConfig {
                    budget,
                    sources: block,
                    costs: costs.clone(),
                    ..SpeculationConfig::default()
                },
                ..SchedulerConfig::default()
            };
            let mut scheduler = Scheduler::new(Box::new(runner.clone()), config);
            for i in 0..sequences {
                let seed = (rep * sequences + i) as u32;
                let token = |at: usize| {
                    let mixed = (at as u32)
                        .wrapping_mul(2_654_435_761)
                        .wrapping_add(seed * 97);
                    TokenId((mixed >> 8) % vocab)
                };
                scheduler.submit(Job {
                    id: JobId(i as u64),
                    prompt: (0..args.depth.max(1)).map(token).collect(),
                    choices: 1,
                    params: GenerationParams {
                        sampling: Sampling::greedy(),
                        max_tokens: tokens,
                        ignore_eos: true,
                        ..GenerationParams::default()
                    },
                    priority: 0,
                })?;
            }
            steps.extend(run_steps(&mut scheduler, &runner, sequences)?);
        }
        if args.each {
            for step in &steps {
                writeln!(out, "{step}")?;
            }
        }
        let line = Summary::of(&steps)?;
        writeln!(
            out,
            "{sequences:>9} {:>6} {:>11.2} {:>11.2} {:>6.1} {:>9.3} {:>17} {:>9.3} {:>9.3} {:>9.3} {:>9.3} {:>10.1} {:>10.1}",
            steps.len(),
            line.tokens,
            line.mean_tokens,
            line.nodes,
            line.ms,
            format!("{:.3}..{:.3}", line.low, line.high),
            line.draft,
            line.verify,
            line.commit,
            line.outside,
            line.per_s,
            line.mean_per_s,
        )?;
        if sequences == 1 {
            alone = Some((line.per_s, line.mean_per_s));
        } else if let Some((drawn, mean)) = alone {
            writeln!(
                out,
                "          {:.2} times the tokens/s of one sequence as measured, {:.2} times as expected",
                line.per_s / drawn,
                line.mean_per_s / mean
            )?;
        }
        if let Some(path) = &args.json {
            let line = json!({
                "bench": "whole_step", "acceptance": "simulated", "accept": args.accept,
                "model": loaded.info.name, "device": fitted.device.name, "draft": args.draft,
                "budget": args.budget, "cost_stop": costs.is_some(), "nodes_per_tree": line.nodes, "depth": args.depth, "sequences": sequences, "groups": format!("{:?}", args.groups), "exact": batch_invariant,
                "steps": steps.len(), "tokens_per_step": line.tokens, "ms": line.ms, "low_ms": line.low,
                "high_ms": line.high, "draft_ms": line.draft, "verify_ms": line.verify,
                "commit_ms": line.commit, "outside_runner_ms": line.outside, "tokens_per_s": line.per_s,
                "mean_tokens_per_step": line.mean_tokens, "mean_tokens_per_s": line.mean_per_s,
                "times_one_sequence": alone.filter(|_| sequences > 1).map(|alone| line.per_s / alone.0),
                "mean_times_one_sequence": alone.filter(|_| sequences > 1).map(|alone| line.mean_per_s / alone.1),
                "verify_s": costs.as_ref().map(CostTable::verify_points), "draft_s": costs.as_ref().map(|costs| costs.draft_points(DraftSource::Block)),
                "version": env!("CARGO_PKG_VERSION"),
            });
            let file = OpenOptions::new().create(true).append(true).open(path);
            let mut file = file.with_context(|| format!("--json {}", path.display()))?;
            writeln!(file, "{line}")?;
        }
    }
    Ok(())
}

/// Runs all jobs to their end; returns the timed steps in which all sequences decoded, or one of
/// two groups of them.
fn run_steps(
    scheduler: &mut Scheduler,
    runner: &TimedRunner,
    sequences: usize,
) -> anyhow::Result<Vec<StepTiming>> {
    let mut steps = Vec::new();
    let mut events = Vec::new();
    loop {
        let before = scheduler.stats();
        runner.take_calls();
        let start = Instant::now();
        let progress = scheduler.step(&mut events)?;
        let took = start.elapsed();
        let after = scheduler.stats();
        for (_, event) in events.drain(..) {
            if let Event::Failed { error } = event {
                bail!("a sequence failed: {error}");
            }
        }
        let batch = after.batch_size_sum - before.batch_size_sum;
        let in_turn = after.alternating_steps > before.alternating_steps && batch > 0;
        if after.decode_steps > before.decode_steps
            && (batch == sequences as u64 || in_turn)
            && after.running == sequences
        {
            steps.push(StepTiming {
                ms: took.as_secs_f64() * 1e3,
                calls: runner.take_calls(),
                tokens: after.generated_tokens - before.generated_tokens,
                nodes: (after.drafted_tokens - before.drafted_tokens) as f64 / batch as f64,
            });
        }
        if progress == SchedulerState::Idle {
            steps.drain(..WARM_UP.min(steps.len()));
            return Ok(steps);
        }
    }
}

/// Medians of steps, in milliseconds.
struct Summary {
    ms: f64,
    low: f64,
    high: f64,
    draft: f64,
    verify: f64,
    commit: f64,
    /// The rest of the step: scheduling, trees, sampling, events.
    outside: f64,
    /// Mean tokens per step of all sequences together.
    tokens: f64,
    /// Expected tokens per step, without the noise of the draws.
    mean_tokens: f64,
    /// Mean drafted nodes per tree.
    nodes: f64,
    per_s: f64,
    /// Expected tokens per second.
    mean_per_s: f64,
}

impl Summary {
    fn of(steps: &[StepTiming]) -> anyhow::Result<Summary> {
        if steps.is_empty() {
            bail!("no step was timed: --steps is too small");
        }
        let sorted = |of: &dyn Fn(&StepTiming) -> f64| {
            let mut all: Vec<f64> = steps.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let median = |of: &dyn Fn(&StepTiming) -> f64| sorted(of)[steps.len() / 2];
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let all = sorted(&|step| step.ms);
        let tokens = steps.iter().map(|s| s.tokens).sum::<u64>() as f64 / steps.len() as f64;
        let mean_tokens =
            steps.iter().map(|s| s.calls.mean_tokens).sum::<f64>() / steps.len() as f64;
        let middle = all[all.len() / 2];
        let steps_per_s = steps.len() as f64 / all.iter().sum::<f64>() * 1e3;
        Ok(Summary {
            ms: middle,
            low: all[0],
            high: all[all.len() - 1],
            draft: median(&|step| ms(step.calls.draft)),
            verify: median(&|step| ms(step.calls.verify)),
            commit: median(&|step| ms(step.calls.commit)),
            outside: median(&|step| step.ms - ms(step.calls.total())),
            tokens,
            mean_tokens,
            nodes: steps.iter().map(|s| s.nodes).sum::<f64>() / steps.len() as f64,
            per_s: tokens * steps_per_s,
            mean_per_s: mean_tokens * steps_per_s,
        })
    }
}
