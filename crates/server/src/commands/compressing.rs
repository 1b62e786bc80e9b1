//! Opens the scorer of prompt compression from the flags of `serve`.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use chat::Tokenizer;
use chat::request::CompressionMode;
use compress::{KeepCurve, KeepRatio};
use contract::{BlockSparsity, Mixer, ModelSpec, ScoreSettings, ScorerConfig};

use crate::cli::{CompressionArgs, ServeArgs};
use crate::compression::{PromptCompressor, ScorerTexts, TextStore};
use crate::engine::store::TextFiles;
use crate::open;
use crate::open::devices;
use crate::open::fit_scoring::{MAX_SCORED_TOKENS, ScorerDevice, ScorerFit};
use crate::open::headroom::UsableMemory;
use crate::progress::bytes_text;
use crate::settings::compression::CompressionSettings;

/// A model with fewer weights scores its own prompts.
const SMALL: u64 = 2_000_000_000;
/// A model with fewer attention layers has no early exit.
const MIN_EXIT_LAYERS: usize = 6;

/// Whether a model of so many weights is fast enough to score its own prompts.
pub(super) fn scores_itself(parameters: u64) -> bool {
    parameters < SMALL
}

/// The settings of the flags.
///
/// # Errors
/// If the curve is not valid.
pub(super) fn settings(args: &CompressionArgs) -> anyhow::Result<CompressionSettings> {
    let curve = args.prefill_curve.join(" ");
    let keep = if curve.is_empty() {
        KeepRatio::Flat(args.prefill_keep_ratio)
    } else {
        let curve: KeepCurve = curve
            .parse()
            .with_context(|| format!("--prefill-curve {curve}"))?;
        KeepRatio::Curve(curve)
    };
    Ok(CompressionSettings {
        mode: args.prefill_compression.mode(),
        threshold: args.prefill_threshold,
        keep,
        keep_by_session: args.prefill_keep_by_session,
        ages: args.prefill_aged,
        score: ScoreSettings {
            sparsity: BlockSparsity {
                alpha: args.prefill_alpha,
                ..BlockSparsity::default()
            },
            ..ScoreSettings::default()
        },
        profile: args.prefill_profile,
    })
}

/// Refuses settings without which prompts cannot be scored; `parameters` are the served model's.
///
/// # Errors
/// If the served model is too large to score its own prompts and no scorer is named.
fn check(args: &CompressionArgs, parameters: u64) -> anyhow::Result<()> {
    settings(args)?;
    let on = args.prefill_compression.mode() != CompressionMode::Off;
    if args.prefill_aged && !on && args.prefill_drafter.is_none() {
        bail!(
            "--prefill-aged compresses earlier messages only if prompts are compressed at all; add --prefill-compression auto, or remove it"
        );
    }
    if on && args.prefill_drafter.is_none() && !scores_itself(parameters) {
        bail!(
            "--prefill-compression {}: a model of {} weights is too slow to score its own prompts; name a small scorer with --prefill-drafter, such as unsloth/Qwen3.5-0.8B-GGUF:Q8_0 (hearth pull downloads it)",
            args.prefill_compression.mode().name(),
            open::count_text(parameters)
        );
    }
    Ok(())
}

/// A scorer that is not opened yet.
pub(super) struct PlannedScorer {
    settings: CompressionSettings,
    /// Its model, if that is not the served one.
    own: Option<model::LoadedModel>,
    name: String,
    config: ScorerConfig,
}

impl PlannedScorer {
    /// What to plan for.
    pub(super) fn config(&self) -> &ScorerConfig {
        &self.config
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// The scorer of the flags; `None` if prompts are never compressed.
///
/// # Errors
/// If the settings are not valid or the scorer's file is not a model.
pub(super) fn planned(
    flags: &CompressionArgs,
    loaded: &model::LoadedModel,
) -> anyhow::Result<Option<PlannedScorer>> {
    let mut settings = settings(flags)?;
    check(flags, loaded.info.parameters)?;
    if settings.mode == CompressionMode::Off && flags.prefill_drafter.is_none() {
        return Ok(None);
    }
    let own = match &flags.prefill_drafter {
        Some(path) => Some(open::load(path).context("--prefill-drafter")?),
        None => None,
    };
    let scorer = own.as_ref().unwrap_or(loaded);
    let (config, scored_layers) = config(scorer, flags.prefill_exit_layer);
    settings.score.scored_layers = scored_layers;
    Ok(Some(PlannedScorer {
        settings,
        name: scorer.info.name.clone(),
        config,
        own,
    }))
}

/// The device that the flags name for the scorer.
///
/// # Errors
/// If there is no such device.
pub(super) fn device(args: &ServeArgs) -> anyhow::Result<Option<ScorerDevice>> {
    let Some(name) = &args.compression.prefill_device else {
        return Ok(None);
    };
    let choice = open::choice(&args.device)?.named(name);
    let backend = devices::choose(&choice).context("--prefill-device")?;
    let info = backend.probe()?;
    let usable = UsableMemory::of(&args.device, &info)?;
    Ok(Some(ScorerDevice {
        id: info.id,
        backend,
        usable_bytes: usable.bytes,
    }))
}

/// The name of a scorer's model, and what to plan for.
///
/// # Errors
/// If its file is not a model.
pub(super) fn scorer_of(path: &Path) -> anyhow::Result<(String, ScorerConfig)> {
    let loaded = open::load(path).context("--prefill-drafter")?;
    Ok((loaded.info.name.clone(), config(&loaded, None).0))
}

/// What opens a model as a scorer that may exit at a named layer, and how many layers it scores.
pub(super) fn config(
    loaded: &model::LoadedModel,
    exit_layer: Option<usize>,
) -> (ScorerConfig, Option<usize>) {
    let (exit_layer, scored_layers) = exit(&loaded.spec, exit_layer);
    let config = ScorerConfig {
        model: Arc::clone(&loaded.spec),
        weights: Arc::clone(&loaded.weights),
        exit_layer,
        max_tokens: MAX_SCORED_TOKENS,
    };
    (config, scored_layers)
}

/// Opens the scorer where it fits.
///
/// # Errors
/// If it cannot be opened.
pub(super) fn open(
    args: &ServeArgs,
    loaded: &model::LoadedModel,
    (scorer, fit): (PlannedScorer, &ScorerFit),
) -> anyhow::Result<Arc<PromptCompressor>> {
    let flags = &args.compression;
    if flags.prefill_skip_park {
        tracing::info!("--prefill-skip-park has no effect: no model is unloaded for scoring");
    }
    let PlannedScorer {
        settings,
        own,
        name,
        config,
    } = scorer;
    let foreign = own.filter(|own| own.vocab.tokens != loaded.vocab.tokens);
    let tokenizer = foreign.map(|own| Tokenizer::new(&own.vocab)).transpose();
    let tokenizer = tokenizer.context("--prefill-drafter: tokenizer.ggml")?;
    let config = ScorerConfig {
        max_tokens: fit.max_tokens,
        ..config
    };
    let path = flags.prefill_drafter.as_ref();
    let store = match &args.cache.kv_cache_dir {
        Some(dir) => {
            let files = TextFiles::open(dir);
            let files = files.with_context(|| format!("--kv-cache-dir {}", dir.display()))?;
            Some(Box::new(files) as Box<dyn TextStore>)
        }
        None => None,
    };
    let texts = ScorerTexts {
        tokenizer,
        path: path.map(|path| path.display().to_string()),
        served: loaded.spec.hash.0,
        store,
    };
    let choice = open::choice(&args.device)?;
    let choice = match (&fit.memory, &fit.device) {
        (None, _) => choice.on_the_cpu(),
        (Some(_), None) => choice.first(),
        (Some(_), Some(id)) => choice.named(id),
    };
    let compressor = PromptCompressor::open(settings, config, choice, texts)?;
    let info = compressor.scorer();
    tracing::info!(
        "prompts are scored by {name} on {} up to layer {}, {}",
        info.device,
        info.exit_layer,
        bytes_text(info.weights_bytes)
    );
    Ok(Arc::new(compressor))
}

/// The exit layer of a scorer, which may be named, and how many attention layers it scores; `None`
/// for the last one and for all.
fn exit(spec: &ModelSpec, named: Option<usize>) -> (Option<usize>, Option<usize>) {
    let (layer, scored_layers) = default_exit(spec);
    (named.or(layer), scored_layers)
}

/// As [`exit`], without a named layer.
///
/// In a hybrid model, the attention layer at two thirds finds what is asked for, and the layers
/// around it add noise. In other models the upper half adds time only.
fn default_exit(spec: &ModelSpec) -> (Option<usize>, Option<usize>) {
    let is_attention = |layer: &usize| matches!(spec.layers[*layer].mixer, Mixer::Attention(_));
    let attention: Vec<usize> = (0..spec.layers.len()).filter(is_attention).collect();
    if attention.len() < MIN_EXIT_LAYERS {
        return (None, None);
    }
    if attention.len() < spec.layers.len() {
        let at = (2 * attention.len()).div_ceil(3) - 1;
        (Some(attention[at]), Some(1))
    } else {
        (Some(attention[attention.len() / 2]), None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn args(words: &[&str]) -> CompressionArgs {
        let words = ["hearth", "serve"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Serve(args) => args.compression,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flag_defaults_equal_the_settings_defaults() {
        assert_eq!(
            settings(&args(&[])).unwrap(),
            CompressionSettings::default()
        );
    }

    #[test]
    fn curves_replace_the_flat_ratio_and_wrong_ones_are_named() {
        let found = settings(&args(&["--prefill-curve", "10000:0.5", "40000:0.2"])).unwrap();
        assert!((found.keep.of(25_000) - 0.35).abs() < 1e-9);
        let error = settings(&args(&["--prefill-curve", "4:2"])).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("--prefill-curve 4:2: the ratio 2"),
            "{error}"
        );
    }

    #[test]
    fn large_models_without_a_scorer_are_refused_with_what_to_download() {
        let auto = args(&["--prefill-compression", "auto"]);
        assert!(check(&auto, SMALL - 1).is_ok());
        let error = check(&auto, 27_000_000_000).unwrap_err().to_string();
        assert!(
            error.contains("--prefill-drafter, such as unsloth/"),
            "{error}"
        );
        let named = [
            "--prefill-compression",
            "auto",
            "--prefill-drafter",
            "s.gguf",
        ];
        assert!(check(&args(&named), 27_000_000_000).is_ok());
        assert!(check(&args(&[]), 27_000_000_000).is_ok());
        let alone = check(&args(&["--prefill-aged"]), 1).unwrap_err();
        assert!(alone.to_string().contains("--prefill-compression auto"));
    }

    #[test]
    fn hybrid_scorers_end_at_two_thirds_of_their_attention_layers() {
        let spec = |name: &str| {
            let spec = model::synth::SynthSpec::parse(name).unwrap();
            let bytes = gguf::FileBytes::shared(spec.bytes().unwrap().into());
            model::load_bytes("synthetic", bytes).unwrap().spec
        };
        assert_eq!(default_exit(&spec("tiny-hybrid:q8_0")), (None, None));
        let attention = |layers: usize, every: usize| {
            let mut many = (*spec("tiny-hybrid:q8_0")).clone();
            let find = |attention: bool| {
                let is = |layer: &&contract::LayerSpec| {
                    matches!(layer.mixer, Mixer::Attention(_)) == attention
                };
                many.layers.iter().find(is).unwrap().clone()
            };
            let (own, delta) = (find(true), find(false));
            let layer = |i: usize| {
                if i % every == every - 1 {
                    own.clone()
                } else {
                    delta.clone()
                }
            };
            many.layers = (0..layers).map(layer).collect();
            many
        };
        assert_eq!(default_exit(&attention(24, 4)), (Some(15), Some(1)));
        assert_eq!(default_exit(&attention(28, 1)), (Some(14), None));
    }
}
