//! `hearth bench prompts`: a user's own table of speed-ups, per task and source of drafts.
//!
//! Each prompt of the file is answered plainly, then with each source that the model has, then with
//! all of them. A method keeps one scheduler for the whole file, as a server does: what it learns
//! from one prompt serves the next.

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

/// The timings of one method, by prompt, with the replies.
type Timings = Vec<(ReplyTiming, Vec<TokenId>)>;

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
    let prompts = render(&entries(&text)?, &args.file.display().to_string(), &loaded)?;
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
    let time = |runner: TimedRunner, speculation| {
        let config = SchedulerConfig {
            max_sequences: 1,
            eos: loaded.vocab.eos.clone(),
            speculation,
            clock: Some(drafting::clock),
            ..SchedulerConfig::default()
        };
        let mut scheduler = Scheduler::new(Box::new(runner), config);
        let replies = prompts
            .iter()
            .map(|prompt| time_reply(&mut scheduler, &prompt.tokens, args.tokens));
        replies.collect::<anyhow::Result<Timings>>()
    };
    let none = SpeculationConfig {
        budget: 0,
        ..SpeculationConfig::default()
    };
    let plainly = time(open(SourceSet::NONE)?, none)?;
    let mut methods = Vec::new();
    for sources in methods_of(available(&whole)) {
        let runner = open(sources)?;
        let costs = match args.cost_stop {
            OnOff::On => drafting::measure(&mut runner.clone(), sources)?,
            OnOff::Off => None,
        };
        let is_exact = runner.info().batch_invariant;
        let speculation = SpeculationConfig {
            budget: usize::from(args.budget),
            sources,
            costs,
            ..SpeculationConfig::default()
        };
        let timings = time(runner, speculation)?;
        let differs = plainly.iter().zip(&timings).position(|(a, b)| a.1 != b.1);
        if let Some(at) = differs.filter(|_| is_exact) {
            bail!("the reply to prompt {at} differs with {}", name(sources));
        }
        methods.push((name(sources), timings));
    }
    report(
        args,
        (&loaded.info.name, &fitted.device.name),
        (&prompts, &plainly, &methods),
    )
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

/// The model with what `sources` need, as `serve` opens it: a draft model and a head take time at
/// each commit even where they draft nothing.
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
            sum.tokens += timing.tokens;
            sum.steps += timing.steps;
        }
    }
    sum
}

fn report(
    args: &PromptsArgs,
    (model, device): (&str, &str),
    (prompts, plainly, methods): (&[Prompt], &Timings, &[(String, Timings)]),
) -> anyhow::Result<()> {
    let mut tasks: BTreeMap<&str, usize> = BTreeMap::new();
    for prompt in prompts {
        *tasks.entry(&prompt.class).or_default() += 1;
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{model} on {device}: greedy replies of up to {} tokens, trees of {} {} drafted nodes",
        args.tokens,
        if args.cost_stop == OnOff::On {
            "up to"
        } else {
            "always"
        },
        args.budget
    )?;
    writeln!(
        out,
        "{:<14} {:>7} {:<18} {:>9} {:>11} {:>8}",
        "task", "prompts", "drafts", "tok/s", "tokens/step", "speed-up"
    )?;
    for (task, n) in tasks {
        let plain = sum(prompts, plainly, task);
        let rows = methods.iter().map(|(name, timings)| (&name[..], timings));
        for (name, timings) in std::iter::once(("none", plainly)).chain(rows) {
            let total = sum(prompts, timings, task);
            let per_step = total.tokens as f64 / total.steps.max(1) as f64;
            let speedup = total.per_s() / plain.per_s().max(1e-9);
            writeln!(
                out,
                "{task:<14} {n:>7} {name:<18} {:>9.1} {per_step:>11.2} {speedup:>8.2}",
                total.per_s()
            )?;
            if let Some(path) = &args.json {
                let line = json!({
                    "bench": "prompts", "task": task, "prompts": n, "drafts": name,
                    "model": model, "device": device, "tokens_per_s": total.per_s(),
                    "tokens_per_step": per_step, "speedup": speedup,
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
