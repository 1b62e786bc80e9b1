//! `hearth bench score --target`: times the first token of compressed prompts.
//!
//! A run does what `serve` does with a request: it renders and tokenises the prompt, has it
//! compressed, and prefills the rest until the first token's logits are on the host. HTTP and the
//! scheduler are not in it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use chat::openai::request::chat_request;
use chat::request::{ChatRequest, CompressionMode, ConversationPolicy};
use chat::{CancelFlag, SpecialTokens, Tokenizer};
use compress::KeepRatio;
use contract::{Limits, LogitsRequest, Runner, TokenId};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;

use super::score::{ScoreReport, load, longest, planned, scorer};
use super::{ModelSource, model};
use crate::cli::ScoreArgs;
use crate::compression::{PromptCompressor, PromptToCompress, ScorerTexts, ScoringProgress};
use crate::open::bundled::Bundled;
use crate::open::model_path::is_remote;
use crate::open::{self, MemoryRequest, devices};
use crate::settings::GenerationDefaults;
use crate::settings::compression::CompressionSettings;
use crate::text::prepare;

/// Tokens that the chat template and the question add to a text, at most.
const AROUND_TEXT: usize = 128;
/// Words of the random text, common ones so that a synthetic vocabulary has them.
const WORDS: &str = "the of and to in is you that it he was for on are as with his they at be \
    this have from one had by word but not what all were we when your can said there use an each \
    which she do how their if will up other about out many then them these so some her would make \
    like him into time has look two more write go see number no way could people my than first \
    water been call who oil its now find long down day did get come made may part weather city";
const QUESTION: &str = "\nWhich word did the people of the first city write down?";

pub(super) fn measure(args: &ScoreArgs, bundled: Bundled, target: &str) -> anyhow::Result<()> {
    let loaded = load(args, bundled)?;
    let is_file = Path::new(target).exists() || is_remote(target);
    let target = model(&ModelSource {
        model: is_file.then_some(Path::new(target)),
        synthetic: (!is_file).then_some(target),
        seed: args.seed,
        bundled: None,
    })
    .with_context(|| format!("--target {target}"))?;
    let most = longest(args) + AROUND_TEXT;
    let backend = open::device(&args.device)?;
    let request = MemoryRequest {
        sequences: 1,
        context: Some(most),
        tree_nodes: 1,
    };
    let fitted = open::fit(backend.as_ref(), &target, &args.device, request)?;
    for line in open::plan_lines(&target, &fitted) {
        tracing::info!("{line}");
    }
    let limits = fitted.config.limits;
    let mut runner = open::open(backend.as_ref(), fitted.config, &mut |_| {})?;
    let (config, score) = scorer(args, &loaded, most);
    let planned = planned(backend.as_ref(), &config)?;
    // The target has been opened, so the watch sees the scorer alone.
    let watch = devices::watch(&fitted.device.id)?;
    let same_vocabulary = loaded.vocab.tokens == target.vocab.tokens;
    let tokenizer = (!same_vocabulary).then(|| Tokenizer::new(&loaded.vocab));
    let compressor = PromptCompressor::open(
        CompressionSettings {
            mode: CompressionMode::Always,
            keep: KeepRatio::Flat(args.keep),
            score,
            ..CompressionSettings::default()
        },
        config,
        open::choice(&args.device)?.first(),
        ScorerTexts {
            tokenizer: tokenizer.transpose()?,
            served: target.spec.hash.0,
            ..ScorerTexts::default()
        },
    )?;
    let info = compressor.scorer();
    let mut report = ScoreReport::new(
        args.json.as_deref(),
        json!({
            "bench": "first_token", "model": target.info.name, "scorer": loaded.info.name,
            "device": fitted.device.name, "scorer_device": info.device, "exit_layer": info.exit_layer,
            "alpha": args.alpha, "keep": args.keep, "version": env!("CARGO_PKG_VERSION"),
        }),
    )?;
    let side = open::text_side(&target, None, None, GenerationDefaults::default())?;
    let mut random = StdRng::seed_from_u64(args.seed);
    for &tokens in &args.tokens {
        let mut runs = StageTimes::default();
        for run in 0..=args.reps {
            let request = random_request(&mut random, &side.tokenizer, tokens)?;
            let mut timed = StageTimes::default();
            let policy = ConversationPolicy::default();
            let (cancel, progress) = (CancelFlag::default(), Arc::<ScoringProgress>::default());
            let start = Instant::now();
            let text_side = (&side, limits.context);
            let prompt = prepare::chat(text_side, &policy, &request, &cancel)?;
            timed.tokenize.push(start.elapsed());
            let of = PromptToCompress {
                model: text_side,
                policy: &policy,
                request: &request,
                prompt: &prompt,
            };
            let compress = Instant::now();
            let (shorter, outcome) = compressor.compress(of, &cancel, &progress);
            let Some(shorter) = shorter else {
                bail!(
                    "a prompt of {tokens} tokens stays whole: {}",
                    outcome.reason
                );
            };
            timed.score.push(outcome.scoring);
            timed.compress.push(compress.elapsed());
            let prefill_start = Instant::now();
            prefill(&mut *runner, &shorter.ids, limits)?;
            timed.prefill.push(prefill_start.elapsed());
            timed.total.push(start.elapsed());
            timed.tokens = (prompt.ids.len(), shorter.ids.len());
            // The first run warms up.
            if run > 0 {
                runs.add(timed);
            }
        }
        let (before, after) = runs.tokens;
        report.line("tokenize", before, &runs.tokenize)?;
        report.line("score and select", before, &runs.score)?;
        report.line("compress", before, &runs.compress)?;
        report.line("prefill what stays", after, &runs.prefill)?;
        report.line("first token", before, &runs.total)?;
    }
    let peak = watch.and_then(devices::MemoryWatch::peak_bytes);
    report.memory(planned, peak, "beside the target")
}

/// The times of runs over prompts of one length.
#[derive(Default)]
struct StageTimes {
    /// Rendering and tokenising the whole prompt.
    tokenize: Vec<Duration>,
    /// Scoring it and selecting what stays.
    score: Vec<Duration>,
    /// The same, and rendering and tokenising what stays.
    compress: Vec<Duration>,
    prefill: Vec<Duration>,
    total: Vec<Duration>,
    /// Tokens of the last prompt, and of what stayed of it.
    tokens: (usize, usize),
}

impl StageTimes {
    fn add(&mut self, run: StageTimes) {
        self.tokenize.extend(run.tokenize);
        self.score.extend(run.score);
        self.compress.extend(run.compress);
        self.prefill.extend(run.prefill);
        self.total.extend(run.total);
        self.tokens = run.tokens;
    }
}

/// Prefills a prompt until the logits of its last token are on the host.
fn prefill(runner: &mut dyn Runner, prompt: &[TokenId], limits: Limits) -> anyhow::Result<()> {
    let seq = runner.open(limits.context)?;
    let mut left = prompt.len();
    for tokens in prompt.chunks(limits.prefill_chunk) {
        left -= tokens.len();
        let last = [(tokens.len() - 1, LogitsRequest::top_k(1))];
        runner.prefill(seq, tokens, if left == 0 { &last } else { &[] })?;
    }
    runner.close(seq);
    Ok(())
}

/// A request with a text of random sentences, so that its prompt has about `tokens` tokens.
fn random_request(
    random: &mut StdRng,
    tokenizer: &Tokenizer,
    tokens: usize,
) -> anyhow::Result<ChatRequest> {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let (mut text, mut n) = (String::new(), AROUND_TEXT);
    while n < tokens {
        let length = random.random_range(6..18);
        let mut sentence = "The".to_owned();
        for _ in 0..length {
            sentence.push(' ');
            sentence.push_str(words[random.random_range(0..words.len())]);
        }
        sentence.push_str(if random.random_range(0..6) == 0 {
            ".\n"
        } else {
            ". "
        });
        n += tokenizer.encode(&sentence, SpecialTokens::AsText)?.len();
        text.push_str(&sentence);
    }
    text.push_str(QUESTION);
    let body = json!({
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "chat_template_kwargs": {"enable_thinking": false},
    });
    Ok(chat_request(body.to_string().as_bytes())?)
}
