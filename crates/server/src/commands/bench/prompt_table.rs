//! `hearth bench prompts`: a user's own table of speed-ups, per task and source of drafts.
//!
//! Each prompt of the file is answered plainly, then with each source that the model has, then with
//! all of them. A method keeps one scheduler for the whole file, as a server does: what it learns
//! from one prompt serves the next.
//!
//! A single pass holds one method in memory at a time. More passes hold all of them and let them
//! answer each prompt in turn, so that a change of the machine's speed meets every method alike.
//! Each pass has new schedulers, which learn from the start.
//!
//! A method is opened as `serve` opens it: without sources that would be too slow on the device.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;

use anyhow::{Context, bail};
use contract::{LoadConfig, Runner, TokenId};
use decode::{DraftSource, Scheduler, SchedulerConfig, SourceSet, SpeculationConfig};
use serde_json::{Value, json};

use super::reply_timing::{ReplyTiming, time_reply};
use super::timed_runner::TimedRunner;
use super::tune::{Prompt, context_tokens, render};
use super::{ModelSource, draft, model};
use crate::cli::{OnOff, PromptsArgs};
use crate::open::bundled::Bundled;
use crate::open::{self, MemoryRequest, drafting};

/// The timings of one pass of a method, by prompt, with the replies.
type Timings = Vec<(ReplyTiming, Vec<TokenId>)>;

/// A set of sources that draft, with its passes.
struct Method {
    sources: SourceSet,
    /// Those among them that are too slow on this device and do not draft.
    slow: SourceSet,
    passes: Vec<Timings>,
}

impl Method {
    fn new(sources: SourceSet) -> Method {
        Method {
            sources,
            slow: SourceSet::NONE,
            passes: Vec::new(),
        }
    }
}

pub(super) fn table(args: &PromptsArgs, bundled: Bundled) -> anyhow::Result<()> {
    let source = ModelSource {
        model: args.model.as_deref(),
        synthetic: None,
        seed: 1,
        bundled: Some(bundled),
    };
    let loaded = model(&source)?;
    let text = fs::read_to_string(&args.file);
    let text = text.with_context(|| args.file.display().to_string())?;
    let file = args.file.display().to_string();
    let prompts = render(&entries(&text).context(file.clone())?, &file, &loaded)?;
    let longest = prompts.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
    let backend = open::device(&args.device)?;
    let request = MemoryRequest {
        sequences: 1,
        context: Some(context_tokens(longest, args.tokens)),
        tree_nodes: usize::from(args.budget) + 1,
    };
    let fitted = open::fit_with_head(backend.as_ref(), &loaded, &args.device, request)?;
    let mut whole = fitted.config;
    if args.draft.is_some() || source.bundled_default().is_some() {
        whole.draft = Some(draft(&loaded, args.draft.as_deref(), &source, whole.kv.k)?);
    }
    let open = |sources| {
        let config = with_only(&whole, sources);
        anyhow::Ok(TimedRunner::new(open::open(
            backend.as_ref(),
            config,
            &mut |_| {},
        )?))
    };
    let sources = std::iter::once(SourceSet::NONE).chain(methods_of(available(&whole)));
    let mut methods: Vec<Method> = sources.map(Method::new).collect();
    let together = if args.passes > 1 { methods.len() } else { 1 };
    let mut is_exact = true;
    for group in methods.chunks_mut(together) {
        let mut opened = Vec::with_capacity(group.len());
        for method in group.iter_mut() {
            let runner = open(method.sources)?;
            let speculation = speculation(args, method, &mut runner.clone())?;
            if method.slow.is_empty() {
                opened.push((runner, speculation));
            } else {
                drop(runner);
                opened.push((open(speculation.sources)?, speculation));
            }
        }
        is_exact &= opened
            .iter()
            .all(|(runner, _)| runner.info().batch_invariant);
        for pass in 0..args.passes {
            let schedulers = opened.iter().map(|(runner, speculation)| {
                let config = SchedulerConfig {
                    max_sequences: 1,
                    eos: loaded.vocab.eos.clone(),
                    speculation: speculation.clone(),
                    clock: Some(drafting::clock),
                    ..SchedulerConfig::default()
                };
                Scheduler::new(Box::new(runner.clone()), config)
            });
            let mut schedulers: Vec<Scheduler> = schedulers.collect();
            run_pass(pass, (args, &prompts), group, &mut schedulers)?;
        }
    }
    let (plain, drafted) = methods.split_at(1);
    let replies = |timings: &Timings| -> Vec<Vec<TokenId>> {
        timings.iter().map(|(_, reply)| reply.clone()).collect()
    };
    let expected = replies(&plain[0].passes[0]);
    for method in drafted {
        for found in method.passes.iter().map(replies) {
            let differs = expected.iter().zip(&found).position(|(a, b)| a != b);
            if let Some(at) = differs.filter(|_| is_exact) {
                bail!(
                    "the reply to prompt {at} differs with {}",
                    name(method.sources)
                );
            }
        }
    }
    report(
        args,
        (&loaded.info.name, &fitted.device.name),
        &prompts,
        &methods,
    )
}

/// The speculation settings of a method on an idle runner. Finds the sources that are too slow.
fn speculation(
    args: &PromptsArgs,
    method: &mut Method,
    runner: &mut TimedRunner,
) -> anyhow::Result<SpeculationConfig> {
    let budget = usize::from(args.budget);
    let mut sources = method.sources;
    let mut costs = None;
    if args.cost_stop == OnOff::On && !sources.is_empty() {
        costs = drafting::measure(runner, sources)?;
    }
    if let Some(costs) = &costs {
        method.slow = drafting::slow_sources(costs, runner.info(), sources, budget);
        for source in method.slow.iter() {
            sources = sources.without(source);
        }
    }
    Ok(SpeculationConfig {
        budget: if sources.is_empty() { 0 } else { budget },
        sources,
        costs,
        ..SpeculationConfig::default()
    })
}

/// Answers every prompt with each method. The order of the methods alternates between passes.
fn run_pass(
    pass: usize,
    (args, prompts): (&PromptsArgs, &[Prompt]),
    methods: &mut [Method],
    schedulers: &mut [Scheduler],
) -> anyhow::Result<()> {
    for method in methods.iter_mut() {
        method.passes.push(Vec::with_capacity(prompts.len()));
    }
    for prompt in prompts {
        for turn in 0..schedulers.len() {
            let at = if pass.is_multiple_of(2) {
                turn
            } else {
                schedulers.len() - 1 - turn
            };
            let timed = time_reply(&mut schedulers[at], &prompt.tokens, args.tokens)?;
            methods[at].passes[pass].push(timed);
        }
    }
    Ok(())
}

/// The sources of a loaded model and draft.
fn available(whole: &LoadConfig) -> SourceSet {
    let mut sources = SourceSet::of(&[DraftSource::Suffix]);
    if whole.draft.is_some() {
        sources = sources.with(DraftSource::Block);
    }
    if whole.target.mtp.is_some() {
        sources = sources.with(DraftSource::Mtp);
    }
    sources
}

/// The model with what `sources` need, as `serve` opens it: what would not draft takes no memory.
fn with_only(whole: &LoadConfig, sources: SourceSet) -> LoadConfig {
    let mut config = whole.clone();
    if !sources.contains(DraftSource::Block) {
        config.draft = None;
    }
    if !sources.contains(DraftSource::Mtp) {
        config.target = drafting::Drafting::none().target(&config.target);
    }
    config
}

/// Each source alone, then all together.
fn methods_of(available: SourceSet) -> Vec<SourceSet> {
    let mut methods: Vec<SourceSet> = available
        .iter()
        .map(|source| SourceSet::of(&[source]))
        .collect();
    if methods.len() > 1 {
        methods.push(available);
    }
    methods
}

fn name(sources: SourceSet) -> String {
    if sources.is_empty() {
        return "none".to_owned();
    }
    let names: Vec<&str> = sources.iter().map(decode::DraftSource::name).collect();
    names.join("+")
}

/// The entries of a file of JSON lines with a class: chat requests, or texts to continue.
///
/// # Errors
/// Names the line that is neither a text nor an object with `prompt`, `messages` or `text`.
pub(super) fn entries(text: &str) -> anyhow::Result<Vec<Value>> {
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let entry = |(i, line): (usize, &str)| -> anyhow::Result<Value> {
        let at = || format!("line {}", i + 1);
        let mut entry: Value = serde_json::from_str(line).with_context(at)?;
        if entry.is_string() {
            entry = json!({"prompt": entry});
        }
        let class = ["task", "class"]
            .iter()
            .find_map(|key| entry[*key].as_str());
        let class = class.unwrap_or("all").to_owned();
        if entry["text"].is_string() {
            return Ok(json!({"class": class, "text": entry["text"]}));
        }
        let messages = match (&entry["messages"], &entry["prompt"]) {
            (Value::Array(_), _) => entry["messages"].clone(),
            (_, Value::String(prompt)) => json!([{"role": "user", "content": prompt}]),
            _ => bail!(
                "{}: use a string, or an object with `prompt`, `messages` or `text`, and `task`",
                at()
            ),
        };
        let mut found = json!({"class": class, "messages": messages});
        if entry["tools"].is_array() {
            found["tools"] = entry["tools"].take();
        }
        Ok(found)
    };
    lines.map(entry).collect()
}

/// Sums over the prompts of a task.
fn sum(prompts: &[Prompt], timings: &Timings, task: &str) -> ReplyTiming {
    let mut sum = ReplyTiming::default();
    for (prompt, (timing, _)) in prompts.iter().zip(timings) {
        if prompt.class == task {
            sum.seconds += timing.seconds;
            sum.cpu_seconds += timing.cpu_seconds;
            sum.tokens += timing.tokens;
            sum.steps += timing.steps;
        }
    }
    sum
}

/// What a method needed for a task, beside plain decoding.
struct TaskFigures {
    /// Medians over the passes.
    per_s: f64,
    per_step: f64,
    /// Ratios to plain decoding in the same pass, ascending.
    speedups: Vec<f64>,
    /// The same of processor time; not finite where the system does not count it.
    cpu_speedups: Vec<f64>,
}

impl TaskFigures {
    fn new(prompts: &[Prompt], task: &str, plain: &Method, method: &Method) -> TaskFigures {
        let sums = |method: &Method| -> Vec<ReplyTiming> {
            let passes = method.passes.iter();
            passes.map(|pass| sum(prompts, pass, task)).collect()
        };
        let (plain, method) = (sums(plain), sums(method));
        let ascending = |of: &dyn Fn(&ReplyTiming, &ReplyTiming) -> f64| {
            let pairs = plain.iter().zip(&method);
            let mut all: Vec<f64> = pairs.map(|(plain, method)| of(plain, method)).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let per_cpu_s = |timing: &ReplyTiming| timing.tokens as f64 / timing.cpu_seconds;
        TaskFigures {
            per_s: median(&ascending(&|_, method| method.per_s())),
            per_step: median(&ascending(&|_, method| {
                method.tokens as f64 / method.steps.max(1) as f64
            })),
            speedups: ascending(&|plain, method| method.per_s() / plain.per_s().max(1e-9)),
            cpu_speedups: ascending(&|plain, method| per_cpu_s(method) / per_cpu_s(plain)),
        }
    }
}

/// The middle of ascending values.
fn median(ascending: &[f64]) -> f64 {
    let n = ascending.len();
    let middle = ascending.get((n.max(1) - 1) / 2..n / 2 + 1);
    let middle = middle.unwrap_or_default();
    middle.iter().sum::<f64>() / middle.len().max(1) as f64
}

fn report(
    args: &PromptsArgs,
    (model, device): (&str, &str),
    prompts: &[Prompt],
    methods: &[Method],
) -> anyhow::Result<()> {
    let mut tasks: BTreeMap<&str, usize> = BTreeMap::new();
    for prompt in prompts {
        *tasks.entry(&prompt.class).or_default() += 1;
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{model} on {device}: greedy replies of up to {} tokens, trees of {} {} drafted nodes{}",
        args.tokens,
        if args.cost_stop == OnOff::On {
            "up to"
        } else {
            "always"
        },
        args.budget,
        if args.passes > 1 {
            format!(", medians of {} passes in turn", args.passes)
        } else {
            String::new()
        }
    )?;
    writeln!(
        out,
        "{:<14} {:>7} {:<18} {:>9} {:>11} {:>8} {:>11} {:>8}",
        "task", "prompts", "drafts", "tok/s", "tokens/step", "speed-up", "range", "by CPU"
    )?;
    for method in methods.iter().filter(|method| !method.slow.is_empty()) {
        let (method, slow) = (name(method.sources), name(method.slow));
        writeln!(
            out,
            "{method}: without {slow}, which is too slow on this device"
        )?;
    }
    for (task, n) in tasks {
        for method in methods {
            let slow: Vec<&str> = method.slow.iter().map(decode::DraftSource::name).collect();
            let name = name(method.sources);
            let TaskFigures {
                per_s,
                per_step,
                speedups,
                cpu_speedups,
            } = TaskFigures::new(prompts, task, &methods[0], method);
            let ends = (speedups.first(), speedups.last());
            let (least, most) = (ends.0.copied(), ends.1.copied());
            let (least, most) = (least.unwrap_or(1.0), most.unwrap_or(1.0));
            let (speedup, by_cpu) = (median(&speedups), median(&cpu_speedups));
            let by_cpu = by_cpu.is_finite().then_some(by_cpu);
            writeln!(
                out,
                "{task:<14} {n:>7} {name:<18} {per_s:>9.1} {per_step:>11.2} {speedup:>8.2} \
                 {:>11} {:>8}",
                format!("{least:.2}-{most:.2}"),
                by_cpu.map_or(String::new(), |ratio| format!("{ratio:.2}")),
            )?;
            if let Some(path) = &args.json {
                let line = json!({
                    "bench": "prompts", "task": task, "prompts": n, "drafts": name,
                    "model": model, "device": device, "tokens_per_s": per_s,
                    "tokens_per_step": per_step, "speedup": speedup, "too_slow": slow,
                    "passes": args.passes, "speedup_least": least, "speedup_most": most,
                    "cpu_speedup": by_cpu, "tokens": args.tokens,
                    "budget": args.budget, "cost_stop": args.cost_stop == OnOff::On,
                    "version": env!("CARGO_PKG_VERSION"),
                });
                let file = OpenOptions::new().create(true).append(true).open(path);
                let mut file = file.with_context(|| format!("--json {}", path.display()))?;
                writeln!(file, "{line}")?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_texts_or_objects_with_a_task() {
        let found = entries(concat!(
            "\"Hello\"\n\n",
            "{\"task\": \"math\", \"prompt\": \"1 + 1?\"}\n",
            "{\"class\": \"chat\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}],",
            " \"tools\": [{}]}\n{\"task\": \"prose\", \"text\": \"It was\"}\n",
        ));
        let found = found.unwrap();
        let class = |i: usize| found[i]["class"].as_str().unwrap();
        assert_eq!((class(0), class(1), class(2)), ("all", "math", "chat"));
        assert_eq!(found[1]["messages"][0]["content"], "1 + 1?");
        assert_eq!(found[3], json!({"class": "prose", "text": "It was"}));
        let tools = |i: usize| found[i]["tools"].clone();
        assert_eq!((tools(1), tools(2)), (Value::Null, json!([{}])));
        let wrong = entries("\"a\"\n{\"text\": 3}").unwrap_err();
        assert!(wrong.to_string().contains("line 2"), "{wrong}");
    }

    #[test]
    fn figures_are_medians_of_ratios_within_a_pass() {
        let prompt = Prompt {
            class: "code".to_owned(),
            tokens: Vec::new(),
        };
        let pass = |seconds: f64, steps| {
            let timing = ReplyTiming {
                seconds,
                cpu_seconds: 2.0 * seconds,
                tokens: 6,
                steps,
                ..ReplyTiming::default()
            };
            vec![(timing, Vec::new())]
        };
        let method = |passes| Method {
            passes,
            ..Method::new(SourceSet::NONE)
        };
        // The machine was half as fast in the second pass, which the ratios do not show.
        let plain = method(vec![pass(2.0, 6), pass(4.0, 6), pass(2.0, 6)]);
        let drafted = method(vec![pass(1.0, 2), pass(2.0, 3), pass(4.0, 6)]);
        let found = TaskFigures::new(&[prompt], "code", &plain, &drafted);
        assert_eq!(found.speedups, [0.5, 2.0, 2.0]);
        assert_eq!(found.cpu_speedups, found.speedups);
        assert_eq!((found.per_s, found.per_step), (3.0, 2.0));
        assert_eq!(median(&[1.0, 2.0]), 1.5);
    }

    #[test]
    fn methods_are_each_source_and_the_mix() {
        let names = |sources| {
            methods_of(sources)
                .into_iter()
                .map(name)
                .collect::<Vec<_>>()
        };
        let two = SourceSet::of(&[DraftSource::Mtp, DraftSource::Suffix]);
        assert_eq!(names(two), ["mtp", "suffix", "mtp+suffix"]);
        assert_eq!(names(SourceSet::of(&[DraftSource::Suffix])), ["suffix"]);
    }
}
