//! `hearth bench speculation`: compares drafting with plain decoding.
//!
//! Plain and drafted runs of each prompt are interleaved, so that other load on the machine affects
//! both alike. Two schedulers, one of each kind, live through the whole benchmark as a server's
//! does. Both must generate the same tokens.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::time::Instant;

use anyhow::{Context, bail};
use chat::SpecialTokens;
use contract::TokenId;
use decode::{DraftSource, Scheduler, SchedulerConfig, SourceSet, SpeculationConfig};
use serde_json::json;

use super::reply_timing::{ReplyTiming, time_reply};
use super::tune::{Prompt, context_tokens, prompts};
use super::{ModelSource, draft, model};
use crate::cli::SpeculationAbArgs;
use crate::open::bundled::Bundled;
use crate::open::drafting;
use crate::open::{self, MemoryRequest};
use crate::settings::GenerationDefaults;

/// Source files whose beginnings are prompts that no chat model was asked to continue.
pub(super) const SOURCES: [&str; 6] = [
    include_str!("sources/tree.txt"),
    include_str!("sources/stop.txt"),
    include_str!("sources/pool.txt"),
    include_str!("sources/error.txt"),
    include_str!("sources/names.txt"),
    include_str!("sources/run.txt"),
];
/// Tokens of a prompt from a source file.
pub(super) const SOURCE_TOKENS: usize = 200;

/// Pairs of a prompt's plain and drafted runs.
type Pairs = Vec<(ReplyTiming, ReplyTiming)>;

pub(super) fn compare(args: &SpeculationAbArgs, bundled: Bundled) -> anyhow::Result<()> {
    let source = ModelSource {
        model: args.model.as_deref(),
        synthetic: None,
        seed: 1,
        bundled: Some(bundled),
    };
    let loaded = model(&source)?;
    let mut prompts = prompts(args.prompts.as_deref(), &loaded)?;
    if args.prompts.is_none() {
        let side = open::text_side(&loaded, None, None, GenerationDefaults::default())?;
        for text in SOURCES {
            let mut tokens = side.tokenizer.encode(text, SpecialTokens::AsText)?;
            tokens.truncate(SOURCE_TOKENS);
            let class = "source".to_owned();
            prompts.push(Prompt { class, tokens });
        }
    }
    let longest = prompts.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
    let backend = open::device(&args.device)?;
    let request = MemoryRequest {
        sequences: 1,
        context: Some(context_tokens(longest, args.tokens)),
        tree_nodes: usize::from(args.budget) + 1,
    };
    let fitted = open::fit_with_head(backend.as_ref(), &loaded, &args.device, request)?;
    let mut plain = fitted.config;
    let mut with_draft = plain.clone();
    // The plain runner has neither a draft nor a head: their rows are copied at each commit.
    plain.target = drafting::Drafting::none().target(&plain.target);
    with_draft.draft = Some(draft(&loaded, args.draft.as_deref(), &source, plain.kv.k)?);
    let mut runner = open::open(backend.as_ref(), with_draft, &mut |_| {})?;
    let costs = drafting::measure(runner.as_mut(), SourceSet::ALL)?;
    let Some(costs) = costs else {
        bail!("the step costs cannot be measured: the clock stands still");
    };
    let batch_invariant = runner.info().batch_invariant;
    let scheduler = |runner, speculation| {
        let config = SchedulerConfig {
            max_sequences: 1,
            eos: loaded.vocab.eos.clone(),
            speculation,
            clock: Some(drafting::clock),
            ..SchedulerConfig::default()
        };
        Scheduler::new(runner, config)
    };
    let no_drafting = SpeculationConfig {
        budget: 0,
        ..SpeculationConfig::default()
    };
    let drafting = SpeculationConfig {
        budget: usize::from(args.budget),
        costs: Some(costs.clone()),
        ..SpeculationConfig::default()
    };
    let mut drafted = if args.control {
        let runner = open::open(backend.as_ref(), plain.clone(), &mut |_| {})?;
        scheduler(runner, no_drafting.clone())
    } else {
        scheduler(runner, drafting)
    };
    let mut plainly = scheduler(
        open::open(backend.as_ref(), plain, &mut |_| {})?,
        no_drafting,
    );
    let mut pairs: Vec<Pairs> = vec![Vec::new(); prompts.len()];
    let mut replies: Vec<Vec<TokenId>> = vec![Vec::new(); prompts.len()];
    let start = Instant::now();
    // The first repetition warms up, and its replies are the reference of the later ones.
    for rep in 0..=args.reps.max(1) {
        for (i, prompt) in prompts.iter().enumerate() {
            let time =
                |scheduler: &mut Scheduler| time_reply(scheduler, &prompt.tokens, args.tokens);
            // The order alternates between repetitions.
            let (plain_run, drafted_run) = if rep % 2 == 0 {
                let plain_run = time(&mut plainly)?;
                (plain_run, time(&mut drafted)?)
            } else {
                let drafted_run = time(&mut drafted)?;
                (time(&mut plainly)?, drafted_run)
            };
            if batch_invariant && plain_run.1 != drafted_run.1 {
                bail!(
                    "the reply to prompt {i} ({}) differs with drafting",
                    prompt.class
                );
            }
            if rep == 0 {
                replies[i] = plain_run.1;
            } else if batch_invariant && replies[i] != plain_run.1 {
                bail!(
                    "the reply to prompt {i} ({}) differs when repeated",
                    prompt.class
                );
            } else {
                pairs[i].push((plain_run.0, drafted_run.0));
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    report(
        args,
        (&loaded.info.name, &fitted.device.name),
        seconds,
        (&prompts, &pairs, &costs),
    )
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Results of a class of prompts.
struct ClassResult {
    prompts: usize,
    /// Speed-ups (plain time over drafted time): of each prompt's medians, of its fastest runs, and
    /// the median of pairs.
    of_medians: f64,
    of_fastest: f64,
    of_pairs: f64,
    /// The smallest speed-up of a prompt, by the median of its pairs.
    least: f64,
    tokens: f64,
    tokens_per_step: f64,
    drafted_share: f64,
    plain_per_s: f64,
}

fn class_result(all: &[&Pairs]) -> ClassResult {
    let all: Vec<&&Pairs> = all
        .iter()
        .filter(|p| p.iter().any(|x| x.0.tokens > 0))
        .collect();
    let sum = |of: &dyn Fn(&Pairs) -> f64| all.iter().map(|pairs| of(pairs)).sum::<f64>();
    let each = |of: fn(&(ReplyTiming, ReplyTiming)) -> f64| {
        move |p: &Pairs| -> Vec<f64> { p.iter().map(of).collect() }
    };
    let (one, other) = (each(|p| p.0.seconds), each(|p| p.1.seconds));
    let ratio = each(|p| p.0.seconds / p.1.seconds);
    let least = |all: Vec<f64>| all.into_iter().fold(f64::INFINITY, f64::min);
    let tokens = sum(&|p| p[0].1.tokens as f64);
    // The number of steps varies, because the speculation controller learns between
    // repetitions.
    let mean = |of: fn(&(ReplyTiming, ReplyTiming)) -> f64| {
        sum(&|p| p.iter().map(of).sum::<f64>() / p.len() as f64)
    };
    let steps = mean(|p| p.1.steps as f64);
    ClassResult {
        prompts: all.len(),
        of_medians: sum(&|p| median(one(p))) / sum(&|p| median(other(p))),
        of_fastest: sum(&|p| least(one(p))) / sum(&|p| least(other(p))),
        of_pairs: median(all.iter().flat_map(|p| ratio(p)).collect()),
        least: least(all.iter().map(|p| median(ratio(p))).collect()),
        tokens: tokens / all.len().max(1) as f64,
        tokens_per_step: tokens / steps,
        drafted_share: mean(|p| p.1.drafted as f64) / steps,
        plain_per_s: tokens / sum(&|p| median(one(p))),
    }
}

fn report(
    args: &SpeculationAbArgs,
    (name, device): (&str, &str),
    seconds: f64,
    (prompts, pairs, costs): (&[Prompt], &[Pairs], &decode::CostTable),
) -> anyhow::Result<()> {
    let mut classes: BTreeMap<&str, Vec<&Pairs>> = BTreeMap::new();
    for (prompt, pairs) in prompts.iter().zip(pairs) {
        classes
            .entry(prompt.class.as_str())
            .or_default()
            .push(pairs);
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{name} on {device}: plain time over {} time, {} interleaved pairs per prompt, greedy, \
         up to {} tokens, {seconds:.0} s",
        if args.control { "plain" } else { "drafted" },
        args.reps.max(1),
        args.tokens
    )?;
    writeln!(
        out,
        "{:<10} {:>7} {:>7} {:>10} {:>10} {:>10} {:>10} {:>11} {:>8} {:>11}",
        "class",
        "prompts",
        "tokens",
        "of medians",
        "of fastest",
        "of pairs",
        "least",
        "tokens/step",
        "drafted",
        "plain tok/s"
    )?;
    for (class, pairs) in &classes {
        let f = class_result(pairs);
        writeln!(
            out,
            "{class:<10} {:>7} {:>7.1} {:>10.3} {:>10.3} {:>10.3} {:>10.3} {:>11.2} {:>7.0}% {:>11.1}",
            f.prompts,
            f.tokens,
            f.of_medians,
            f.of_fastest,
            f.of_pairs,
            f.least,
            f.tokens_per_step,
            100.0 * f.drafted_share,
            f.plain_per_s
        )?;
        if let Some(path) = &args.json {
            let line = json!({
                "bench": "pay", "class": class, "model": name, "device": device, "prompts": f.prompts,
                "control": args.control, "pairs_a_prompt": args.reps.max(1), "tokens_an_answer": f.tokens, "budget": args.budget,
                "times_plain": f.of_medians, "times_plain_fastest": f.of_fastest,
                "times_plain_median_pair": f.of_pairs, "times_plain_least_prompt": f.least,
                "tokens_per_step": f.tokens_per_step, "rounds_drafted": f.drafted_share,
                "plain_tokens_per_s": f.plain_per_s, "verify_s": costs.verify_points(),
                "draft_s": costs.draft_points(DraftSource::Block), "seconds": seconds, "version": env!("CARGO_PKG_VERSION"),
            });
            let file = OpenOptions::new().create(true).append(true).open(path);
            let mut file = file.with_context(|| format!("--json {}", path.display()))?;
            writeln!(file, "{line}")?;
        }
    }
    if let Ok(load) = fs::read_to_string("/proc/loadavg") {
        writeln!(out, "load average at the end: {}", load.trim())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_result_has_speedups_of_medians_fastest_and_pairs() {
        let took = |seconds: f64, steps: usize| ReplyTiming {
            seconds,
            tokens: 10,
            steps,
            drafted: steps / 2,
            ..ReplyTiming::default()
        };
        let one: Pairs = vec![
            (took(1.0, 10), took(0.5, 4)),
            (took(1.2, 10), took(0.6, 4)),
            (took(9.0, 10), took(0.7, 4)),
        ];
        // A reply of one token has no time and is ignored.
        let nothing = ReplyTiming {
            tokens: 0,
            ..took(0.0, 0)
        };
        let two: Pairs = vec![(nothing, nothing); 3];
        let f = class_result(&[&one, &two]);
        assert_eq!(f.prompts, 1);
        assert!((f.of_medians - 2.0).abs() < 1e-9 && (f.of_fastest - 2.0).abs() < 1e-9);
        assert!((f.of_pairs - 2.0).abs() < 1e-9 && (f.least - 2.0).abs() < 1e-9);
        assert!((f.tokens_per_step - 2.5).abs() < 1e-9 && (f.drafted_share - 0.5).abs() < 1e-9);
    }
}
