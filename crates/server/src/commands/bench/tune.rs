//! `hearth bench tune`: finds the best node budget for a device and a pair of models.
//!
//! It generates greedy replies to prompts of several classes: plainly, with trees of every listed
//! budget, with chains, and with trees sized by measured costs. It prints the flag to use and
//! stores nothing.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use chat::openai::request::chat_request;
use chat::request::{ConversationPolicy, LateSystem};
use contract::{Backend, LoadConfig, TokenId, Tree};
use decode::{DraftSource, Scheduler, SchedulerConfig, SourceSet, SpeculationConfig, TreeInit};
use serde_json::{Value, json};

use super::reply_timing::{ReplyTiming, time_reply};
use super::timed_runner::TimedRunner;
use super::{ModelSource, draft, model};
use crate::cli::TuneArgs;
use crate::open::bundled::Bundled;
use crate::open::drafting;
use crate::open::{self, MemoryRequest};
use crate::settings::GenerationDefaults;

/// The default prompts.
const PROMPTS: &str = include_str!("prompts.json");
/// A smaller budget is preferred if a larger one is faster by less than this share.
const TOLERANCE: f64 = 0.02;

/// The draft model alone: suffix matches would blur the budgets.
const BLOCK: SourceSet = SourceSet::NONE.with(DraftSource::Block);

/// A way of drafting.
#[derive(Debug, Clone)]
struct DraftConfiguration {
    name: String,
    /// `None` for plain decoding, on a runner without a draft.
    speculation: Option<SpeculationConfig>,
}

/// A tokenized prompt.
pub(super) struct Prompt {
    pub(super) class: String,
    pub(super) tokens: Vec<TokenId>,
}

pub(super) fn tune(args: &TuneArgs, bundled: Bundled) -> anyhow::Result<()> {
    if let Some(wrong) = args.budgets.iter().find(|b| **b >= Tree::MAX_NODES) {
        bail!("--budgets {wrong}: use at most {}", Tree::MAX_NODES - 1);
    }
    let source = ModelSource {
        model: args.model.as_deref(),
        synthetic: None,
        seed: 1,
        bundled: Some(bundled),
    };
    let loaded = model(&source)?;
    let prompts = prompts(args.prompts.as_deref(), &loaded)?;
    let longest = prompts.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
    let backend = open::device(&args.device)?;
    let widest = args.budgets.iter().copied().max().unwrap_or(0);
    let request = MemoryRequest {
        sequences: 1,
        context: Some(context_tokens(longest, args.tokens)),
        tree_nodes: widest + 1,
    };
    let fitted = open::fit(backend.as_ref(), &loaded, &args.device, request)?;
    let plain = fitted.config;
    let mut drafted = plain.clone();
    drafted.draft = Some(draft(&loaded, args.draft.as_deref(), &source, plain.kv.k)?);
    let configurations = configurations(args, widest);
    let mut best: Vec<Vec<Option<ReplyTiming>>> =
        vec![vec![None; prompts.len()]; configurations.len()];
    for _ in 0..args.reps.max(1) {
        // The plain runner has no draft, which would need prefill too.
        for plainly in [true, false] {
            let config = if plainly { &plain } else { &drafted };
            let runner = open(backend.as_ref(), config)?;
            let costs = if plainly {
                None
            } else {
                drafting::measure(&mut runner.clone(), BLOCK)?
            };
            for (prompt_idx, prompt) in prompts.iter().enumerate() {
                for (configuration, best) in configurations.iter().zip(&mut best) {
                    if configuration.speculation.is_none() != plainly {
                        continue;
                    }
                    let mut speculation =
                        configuration
                            .speculation
                            .clone()
                            .unwrap_or(SpeculationConfig {
                                budget: 0,
                                ..SpeculationConfig::default()
                            });
                    if configuration.name == COST_STOP {
                        speculation.costs = costs.clone();
                    }
                    let took = generate(&runner, &loaded, (prompt, args.tokens), speculation)?;
                    let slot = &mut best[prompt_idx];
                    if slot.is_none_or(|old| took.seconds < old.seconds) {
                        *slot = Some(took);
                    }
                }
            }
        }
    }
    report(
        args,
        &loaded,
        &fitted.device.name,
        (&configurations, &prompts, &best),
    )
}

/// Name of the configuration that sizes trees by measured costs.
const COST_STOP: &str = "cost stop";

fn configurations(args: &TuneArgs, widest: usize) -> Vec<DraftConfiguration> {
    let configuration = |name: String, budget: usize, init: TreeInit| DraftConfiguration {
        name,
        speculation: Some(SpeculationConfig {
            budget,
            init,
            sources: BLOCK,
            ..SpeculationConfig::default()
        }),
    };
    let mut configurations = vec![DraftConfiguration {
        name: "plain".to_owned(),
        speculation: None,
    }];
    let budgets = args.budgets.iter().filter(|budget| **budget > 0);
    configurations
        .extend(budgets.map(|&budget| configuration(budget.to_string(), budget, TreeInit::None)));
    configurations.push(configuration(
        "chain".to_owned(),
        widest,
        TreeInit::ChainOnly,
    ));
    configurations.push(configuration(COST_STOP.to_owned(), widest, TreeInit::None));
    configurations
}

/// A context for a prompt, a reply, and the measurement of step costs.
pub(super) fn context_tokens(prompt: usize, reply: usize) -> usize {
    prompt + reply + 256
}

fn open(backend: &dyn Backend, config: &LoadConfig) -> anyhow::Result<TimedRunner> {
    Ok(TimedRunner::new(open::open(
        backend,
        config.clone(),
        &mut |_| {},
    )?))
}

/// The prompts of a file, or the built-in ones, rendered by the model's chat template.
///
/// # Errors
/// Names the file and the entry that is not a chat request.
pub(super) fn prompts(
    file: Option<&Path>,
    loaded: &model::LoadedModel,
) -> anyhow::Result<Vec<Prompt>> {
    let (text, name) = match file {
        Some(path) => {
            let text = fs::read_to_string(path);
            let text = text.with_context(|| format!("--prompts {}", path.display()))?;
            (text, path.display().to_string())
        }
        None => (PROMPTS.to_owned(), "the built-in prompts".to_owned()),
    };
    let all: Vec<Value> = serde_json::from_str(&text).with_context(|| {
        format!("{name}: use an array of objects with class, messages and tools")
    })?;
    render(&all, &name, loaded)
}

/// The prompts of chat requests with a class, rendered by the model's chat template. An entry with
/// `text` is tokenized as it stands, for the model to continue.
///
/// # Errors
/// Names the list and the entry that is neither a text nor a chat request.
pub(super) fn render(
    all: &[Value],
    name: &str,
    loaded: &model::LoadedModel,
) -> anyhow::Result<Vec<Prompt>> {
    let side = open::text_side(loaded, None, None, GenerationDefaults::default())?;
    let policy = ConversationPolicy {
        late_system: LateSystem::User,
        thinking_default: Some(false),
        now_unix: 0,
    };
    let mut prompts = Vec::with_capacity(all.len());
    for (i, prompt) in all.iter().enumerate() {
        let at = || format!("{name}, entry {i}");
        let tokens = if let Some(text) = prompt["text"].as_str() {
            side.tokenizer
                .encode_prompt_up_to(text, usize::MAX.into())
                .with_context(at)?
        } else {
            let request = chat_request(prompt.to_string().as_bytes()).with_context(at)?;
            let conversation = request.conversation(&policy)?;
            let rendered = side.template.render(&conversation).with_context(at)?;
            side.tokenizer.encode_rendered(&rendered).with_context(at)?
        };
        prompts.push(Prompt {
            class: prompt["class"].as_str().unwrap_or("all").to_owned(),
            tokens,
        });
    }
    if prompts.is_empty() {
        bail!("{name}: the list of prompts is empty");
    }
    Ok(prompts)
}

/// The timing of a reply with a new scheduler.
fn generate(
    runner: &TimedRunner,
    loaded: &model::LoadedModel,
    (prompt, max_tokens): (&Prompt, usize),
    speculation: SpeculationConfig,
) -> anyhow::Result<ReplyTiming> {
    let config = SchedulerConfig {
        max_sequences: 1,
        eos: loaded.vocab.eos.clone(),
        speculation,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(Box::new(runner.clone()), config);
    let (timing, _) = time_reply(&mut scheduler, &prompt.tokens, max_tokens)?;
    Ok(timing)
}

/// Sums of seconds, tokens and steps over the prompts of a class, or of all.
fn sum<'a>(
    all: impl Iterator<Item = (&'a Option<ReplyTiming>, &'a Prompt)>,
    class: Option<&str>,
) -> ReplyTiming {
    let mut sum = ReplyTiming::default();
    for (took, prompt) in all {
        if let Some(took) = took
            && class.is_none_or(|class| class == prompt.class)
        {
            sum.seconds += took.seconds;
            sum.tokens += took.tokens;
            sum.steps += took.steps;
        }
    }
    sum
}

type Measured<'a> = (
    &'a [DraftConfiguration],
    &'a [Prompt],
    &'a [Vec<Option<ReplyTiming>>],
);

fn report(
    args: &TuneArgs,
    loaded: &model::LoadedModel,
    device: &str,
    (configurations, prompts, best): Measured<'_>,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut classes: BTreeMap<&str, usize> = BTreeMap::new();
    for prompt in prompts {
        *classes.entry(prompt.class.as_str()).or_default() += 1;
    }
    writeln!(
        out,
        "{} on {device}: {} prompts, up to {} tokens each, greedy; fastest of {} runs per prompt",
        loaded.info.name,
        prompts.len(),
        args.tokens,
        args.reps.max(1)
    )?;
    write!(
        out,
        "{:<10} {:>11} {:>9} {:>9} {:>8}",
        "budget", "tokens/step", "ms/step", "tok/s", "x plain"
    )?;
    for (class, n) in &classes {
        write!(out, " {:>12}", format!("{class} ({n})"))?;
    }
    writeln!(out)?;
    let over = |index: usize, class: Option<&str>| sum(best[index].iter().zip(prompts), class);
    let plain = over(0, None);
    let mut lines = Vec::with_capacity(configurations.len());
    for (i, configuration) in configurations.iter().enumerate() {
        let all = over(i, None);
        let steps = all.steps.max(1) as f64;
        let gain = all.per_s() / plain.per_s();
        write!(
            out,
            "{:<10} {:>11.2} {:>9.3} {:>9.1} {gain:>8.2}",
            configuration.name,
            all.tokens as f64 / steps,
            all.seconds / steps * 1e3,
            all.per_s()
        )?;
        let mut by_class = serde_json::Map::new();
        for class in classes.keys() {
            let gain = over(i, Some(class)).per_s() / over(0, Some(class)).per_s();
            write!(out, " {gain:>12.2}")?;
            by_class.insert((*class).to_owned(), json!(gain));
        }
        writeln!(out)?;
        lines.push(json!({
            "budget": configuration.name, "tokens_per_step": all.tokens as f64 / steps,
            "ms_per_step": all.seconds / steps * 1e3, "tokens_per_s": all.per_s(), "times_plain": gain,
            "times_plain_by_class": by_class,
        }));
    }
    let trees: Vec<(usize, f64)> = configurations
        .iter()
        .enumerate()
        .filter_map(|(i, configuration)| {
            Some((configuration.name.parse().ok()?, over(i, None).per_s()))
        })
        .collect();
    let knee = knee(&trees);
    match knee {
        Some(knee) if over_plain(&trees, knee, plain.per_s()) => writeln!(
            out,
            "best: hearth serve --ddtree-budget {knee} (the smallest budget within {:.0} % of the fastest); nothing was stored",
            TOLERANCE * 100.0
        )?,
        _ => writeln!(
            out,
            "no budget is faster than plain decoding here: hearth serve --no-speculation; nothing was stored"
        )?,
    }
    if let Some(path) = &args.json {
        let line = json!({
            "bench": "tune", "model": loaded.info.name, "device": device, "prompts": prompts.len(),
            "tokens": args.tokens, "reps": args.reps, "ways": lines, "knee": knee,
            "version": env!("CARGO_PKG_VERSION"),
        });
        let file = OpenOptions::new().create(true).append(true).open(path);
        let mut file = file.with_context(|| format!("--json {}", path.display()))?;
        writeln!(file, "{line}")?;
    }
    Ok(())
}

/// The smallest budget within the tolerance of the fastest, of `(budget, tokens per second)`.
fn knee(trees: &[(usize, f64)]) -> Option<usize> {
    let best = trees.iter().map(|t| t.1).fold(0.0, f64::max);
    let near = trees.iter().filter(|t| t.1 >= best * (1.0 - TOLERANCE));
    near.map(|t| t.0).min()
}

/// Whether a budget is faster than plain decoding.
fn over_plain(trees: &[(usize, f64)], budget: usize, plain: f64) -> bool {
    trees.iter().any(|t| t.0 == budget && t.1 > plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knee_is_the_smallest_budget_within_tolerance() {
        let trees = [(4, 50.0), (8, 98.5), (22, 100.0), (40, 99.0)];
        assert_eq!(knee(&trees), Some(8));
        assert_eq!(knee(&[(15, 120.0), (22, 135.0), (30, 120.0)]), Some(22));
        assert_eq!(knee(&[]), None);
        assert!(over_plain(&trees, 8, 90.0) && !over_plain(&trees, 4, 90.0));
    }

    #[test]
    fn built_in_prompts_have_four_classes() {
        let all: Vec<Value> = serde_json::from_str(PROMPTS).unwrap();
        for class in ["code", "chat", "questions", "tools"] {
            let n = all.iter().filter(|p| p["class"] == class).count();
            assert_eq!(n, 5, "{class}");
        }
        for prompt in all {
            chat_request(prompt.to_string().as_bytes()).unwrap();
        }
    }
}
