//! `hearth bench pay`: what drafting brings against plain decoding, as serving does it.
//!
//! Every prompt is answered plainly and with the stop by measured costs in turn, so that what else the machine does
//! falls on both alike, by two schedulers that live through the whole run, as a server's do. Both must say the same.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::time::Instant;

use anyhow::{Context, bail};
use chat::SpecialTokens;
use contract::TokenId;
use decode::{
    Event, GenerationParams, Job, JobId, Progress, Sampling, Scheduler, SchedulerConfig,
    Speculation,
};
use serde_json::json;

use super::tune::{Prompt, prompts, sized};
use super::{ModelSource, draft, model};
use crate::cli::SpeculationAbArgs;
use crate::open::bundled::Bundled;
use crate::open::drafting;
use crate::open::{self, MemoryRequest};
use crate::settings::GenerationDefaults;

/// Texts that were not written for a model to continue: the beginnings of these files.
pub(super) const SOURCES: [&str; 6] = [
    include_str!("sources/tree.txt"),
    include_str!("sources/stop.txt"),
    include_str!("sources/pool.txt"),
    include_str!("sources/error.txt"),
    include_str!("sources/names.txt"),
    include_str!("sources/run.txt"),
];
/// Tokens of each that are the prompt.
pub(super) const OF_SOURCE: usize = 200;

/// What became of one prompt.
#[derive(Debug, Clone, Copy)]
struct AbTiming {
    seconds: f64,
    tokens: usize,
    rounds: usize,
    drafted: usize,
}

/// One prompt's answers, plainly and drafted, in pairs.
type Pairs = Vec<(AbTiming, AbTiming)>;

pub(super) fn pay(args: &SpeculationAbArgs, bundled: Bundled) -> anyhow::Result<()> {
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
            tokens.truncate(OF_SOURCE);
            let class = "source".to_owned();
            prompts.push(Prompt { class, tokens });
        }
    }
    let longest = prompts.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
    let backend = open::device(&args.device)?;
    let request = MemoryRequest {
        sequences: 1,
        context: Some(sized(longest, args.tokens)),
        tree_nodes: usize::from(args.budget) + 1,
    };
    let fitted = open::fit(backend.as_ref(), &loaded, &args.device, request)?;
    let plain = fitted.plan;
    let mut with_draft = plain.clone();
    with_draft.draft = Some(draft(&loaded, args.draft.as_deref(), &source, plain.kv.k)?);
    let mut runner = open::open(backend.as_ref(), with_draft, &mut |_| {})?;
    let costs =
        decode::speculation::measure(runner.as_mut(), drafting::clock, drafting::MEASURE_TIME)?;
    let Some(costs) = costs else {
        bail!("nothing was measured: the device has no draft");
    };
    let exact = runner.info().batch_invariant;
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
    let nothing = Speculation {
        budget: 0,
        ..Speculation::default()
    };
    let stopped = Speculation {
        budget: usize::from(args.budget),
        costs: Some(costs.clone()),
        ..Speculation::default()
    };
    let mut drafted = match args.control {
        true => scheduler(
            open::open(backend.as_ref(), plain.clone(), &mut |_| {})?,
            nothing.clone(),
        ),
        false => scheduler(runner, stopped),
    };
    let mut plainly = scheduler(open::open(backend.as_ref(), plain, &mut |_| {})?, nothing);
    let mut pairs: Vec<Pairs> = vec![Vec::new(); prompts.len()];
    let mut said: Vec<Vec<TokenId>> = vec![Vec::new(); prompts.len()];
    let start = Instant::now();
    // The first turn warms up, and says what every later answer must say.
    for rep in 0..=args.reps.max(1) {
        for (i, prompt) in prompts.iter().enumerate() {
            let of = (prompt.tokens.as_slice(), args.tokens);
            // Who begins changes from turn to turn.
            let (one, other) = if rep % 2 == 0 {
                let one = answer(&mut plainly, of)?;
                (one, answer(&mut drafted, of)?)
            } else {
                let other = answer(&mut drafted, of)?;
                (answer(&mut plainly, of)?, other)
            };
            if exact && one.1 != other.1 {
                bail!(
                    "prompt {i} ({}) got another answer with drafting",
                    prompt.class
                );
            }
            if rep == 0 {
                said[i] = one.1;
            } else if exact && said[i] != one.1 {
                bail!(
                    "prompt {i} ({}) got another answer when asked again",
                    prompt.class
                );
            } else {
                pairs[i].push((one.0, other.0));
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    report(
        args,
        (&loaded.facts.name, &fitted.device.name),
        seconds,
        (&prompts, &pairs, &costs),
    )
}

/// Answers a prompt; the time is from the first token to the last.
fn answer(
    scheduler: &mut Scheduler,
    (prompt, most): (&[TokenId], usize),
) -> anyhow::Result<(AbTiming, Vec<TokenId>)> {
    scheduler.submit(Job {
        id: JobId(0),
        prompt: prompt.into(),
        choices: 1,
        params: GenerationParams {
            sampling: Sampling::greedy(),
            max_tokens: most,
            // What is measured is decoding alone.
            use_saved: false,
            ..GenerationParams::default()
        },
        priority: 0,
    })?;
    let mut events = Vec::new();
    let (mut start, mut said) = (None, Vec::new());
    let mut took = AbTiming {
        seconds: 0.0,
        tokens: 0,
        rounds: 0,
        drafted: 0,
    };
    loop {
        let progress = scheduler.step(&mut events)?;
        for (_, event) in events.drain(..) {
            match event {
                Event::Tokens { tokens, .. } => {
                    said.extend(tokens.iter().map(|token| token.id));
                    match start {
                        None => start = Some(Instant::now()),
                        Some(start) => {
                            took.tokens += tokens.len();
                            took.rounds += 1;
                            took.seconds = start.elapsed().as_secs_f64();
                        }
                    }
                }
                Event::Finished { stats, .. } => took.drafted = stats.depths.steps as usize,
                Event::Failed { error } => bail!("an answer failed: {error}"),
                _ => {}
            }
        }
        if progress == Progress::Idle {
            return Ok((took, said));
        }
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Figures of one class of prompts.
struct Figures {
    prompts: usize,
    /// Plain time over drafted time: of the medians of every prompt, of the fastest, and the median of pairs.
    of_medians: f64,
    of_fastest: f64,
    of_pairs: f64,
    /// The prompt that gains least, by its median.
    least: f64,
    tokens: f64,
    tokens_per_step: f64,
    drafted_share: f64,
    plain_per_s: f64,
}

fn figures(all: &[&Pairs]) -> Figures {
    let all: Vec<&&Pairs> = all
        .iter()
        .filter(|p| p.iter().any(|x| x.0.tokens > 0))
        .collect();
    let sum = |of: &dyn Fn(&Pairs) -> f64| all.iter().map(|pairs| of(pairs)).sum::<f64>();
    let each = |of: fn(&(AbTiming, AbTiming)) -> f64| {
        move |p: &Pairs| -> Vec<f64> { p.iter().map(of).collect() }
    };
    let (one, other) = (each(|p| p.0.seconds), each(|p| p.1.seconds));
    let ratio = each(|p| p.0.seconds / p.1.seconds);
    let least = |all: Vec<f64>| all.into_iter().fold(f64::INFINITY, f64::min);
    let tokens = sum(&|p| p[0].1.tokens as f64);
    // A turn's number of rounds depends on what was learned before it.
    let mean = |of: fn(&(AbTiming, AbTiming)) -> f64| {
        sum(&|p| p.iter().map(of).sum::<f64>() / p.len() as f64)
    };
    let rounds = mean(|p| p.1.rounds as f64);
    Figures {
        prompts: all.len(),
        of_medians: sum(&|p| median(one(p))) / sum(&|p| median(other(p))),
        of_fastest: sum(&|p| least(one(p))) / sum(&|p| least(other(p))),
        of_pairs: median(all.iter().flat_map(|p| ratio(p)).collect()),
        least: least(all.iter().map(|p| median(ratio(p))).collect()),
        tokens: tokens / all.len().max(1) as f64,
        tokens_per_step: tokens / rounds,
        drafted_share: mean(|p| p.1.drafted as f64) / rounds,
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
        "{name} on {device}: plain time over {} time, {} pairs a prompt in turn, greedy, up to {} tokens, \
         {seconds:.0} s",
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
        let f = figures(pairs);
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
                "draft_s": costs.draft_points(), "seconds": seconds, "version": env!("CARGO_PKG_VERSION"),
            });
            let file = OpenOptions::new().create(true).append(true).open(path);
            let mut file = file.with_context(|| format!("--json {}", path.display()))?;
            writeln!(file, "{line}")?;
        }
    }
    if let Ok(load) = fs::read_to_string("/proc/loadavg") {
        writeln!(out, "load of the machine at the end: {}", load.trim())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_medians_of_the_fastest_and_of_pairs() {
        let took = |seconds: f64, rounds: usize| AbTiming {
            seconds,
            tokens: 10,
            rounds,
            drafted: rounds / 2,
        };
        let one: Pairs = vec![
            (took(1.0, 10), took(0.5, 4)),
            (took(1.2, 10), took(0.6, 4)),
            (took(9.0, 10), took(0.7, 4)),
        ];
        // An answer of one token took no time and says nothing.
        let nothing = AbTiming {
            tokens: 0,
            ..took(0.0, 0)
        };
        let two: Pairs = vec![(nothing, nothing); 3];
        let f = figures(&[&one, &two]);
        assert_eq!(f.prompts, 1);
        assert!((f.of_medians - 2.0).abs() < 1e-9 && (f.of_fastest - 2.0).abs() < 1e-9);
        assert!((f.of_pairs - 2.0).abs() < 1e-9 && (f.least - 2.0).abs() < 1e-9);
        assert!((f.tokens_per_step - 2.5).abs() < 1e-9 && (f.drafted_share - 0.5).abs() < 1e-9);
    }
}
