//! Opens models: device selection, loading, memory fit and draft.

pub mod bundled;
pub(crate) mod by_name;
pub mod devices;
pub(crate) mod drafting;
mod fit_drafting;
pub(crate) mod fit_scoring;
pub(crate) mod headroom;
pub(crate) mod known_model;
mod kv_candidates;
pub(crate) mod measured;
mod memory_fit;
pub(crate) mod memory_plan;
pub(crate) mod model_path;
mod other_devices;
pub mod placement;

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use chat::Tokenizer;
use chat::template::ChatTemplate;
use contract::{Backend, LoadConfig, LoadProgress, Runner, TemplateMarkup, Vocab};

use crate::cli::{DeviceArgs, NumericsArg, OneLaunchArg};
use crate::config;
use crate::open::bundled::Bundled;
pub(crate) use crate::open::fit_drafting::{fit_drafting, fit_with_head};
use crate::open::headroom::UsableMemory;
pub(crate) use crate::open::memory_fit::{FittedConfig, MemoryRequest, fit, fit_with_draft};
use crate::progress::{TaskProgress, bytes_text};
use crate::settings::GenerationDefaults;
use crate::text::constraints::ModelConstraints;
use crate::text::model_context::{ModelContext, ModelDescription};
use devices::{DeviceChoice, RunAs};
use placement::PlacementChoice;

/// Device from flags.
pub(crate) fn device(args: &DeviceArgs) -> anyhow::Result<Box<dyn Backend>> {
    device_beside(args, choice(args)?, 0)
}

/// Device from flags, with `draft`, the device of drafts.
pub(crate) fn device_with_draft(
    args: &DeviceArgs,
    draft: Option<&str>,
) -> anyhow::Result<Box<dyn Backend>> {
    device_beside(args, choice_with_draft(args, draft)?, 0)
}

/// The device of a choice, where a scorer takes `scorer_bytes` of its memory.
pub(crate) fn device_beside(
    args: &DeviceArgs,
    mut choice: DeviceChoice,
    scorer_bytes: u64,
) -> anyhow::Result<Box<dyn Backend>> {
    let device = devices::choose(&choice)?;
    // A placement has all experts of a layer on its device.
    if choice.placement.is_some() {
        return Ok(device);
    }
    let info = device.probe()?;
    if info.id == "cpu" {
        return Ok(device);
    }
    // Experts beyond this stay in host memory.
    choice.gpu.expert_room = Some(UsableMemory::of(args, &info)?.beside(scorer_bytes).bytes);
    devices::choose(&choice)
}

/// Device selection from flags.
pub(crate) fn choice(args: &DeviceArgs) -> anyhow::Result<DeviceChoice> {
    let vram_limit = match &args.vram_limit {
        Some(text) => Some(
            bytes_of(text)
                .with_context(|| format!("--vram-limit {text}: use a size such as 24G"))?,
        ),
        None => None,
    };
    let run_as = match &args.gpu_like {
        Some(text) => Some(RunAs {
            class: cuda::driver::Arch::parse(text).with_context(|| {
                format!("--gpu-like {text}: name a class such as sm_86, sm_89 or sm_120")
            })?,
            sm_count: args.gpu_sms,
        }),
        None => None,
    };
    Ok(DeviceChoice {
        name: args.device.clone(),
        placement: PlacementChoice::of(args, None)?,
        run_as,
        cpu_reference: args.cpu_reference,
        threads: args.threads,
        gpu: cuda::Options {
            vram_limit,
            eager: args.eager,
            separate_gemms: args.separate_gemms,
            numerics: args.numerics.map(numerics),
            require_peer_access: args.peer_access,
            one_launch: one_launch(args.one_launch),
            compile: config::kernels::options(&args.compiler),
            ..cuda::Options::default()
        },
    })
}

/// Device selection from flags, with `draft`, the device of drafts.
pub(crate) fn choice_with_draft(
    args: &DeviceArgs,
    draft: Option<&str>,
) -> anyhow::Result<DeviceChoice> {
    Ok(DeviceChoice {
        placement: PlacementChoice::of(args, draft)?,
        ..choice(args)?
    })
}

/// The numerics of a setting.
pub(crate) fn numerics(setting: NumericsArg) -> cuda::Numerics {
    match setting {
        NumericsArg::BatchInvariant => cuda::Numerics::BatchInvariant,
        NumericsArg::Fastest => cuda::Numerics::Fastest,
    }
}

/// The switch of persistent launches of a setting.
fn one_launch(setting: OneLaunchArg) -> cuda::OneLaunch {
    match setting {
        OneLaunchArg::Auto => cuda::OneLaunch::Auto,
        OneLaunchArg::On => cuda::OneLaunch::On,
        OneLaunchArg::Clocks => cuda::OneLaunch::Clocks,
        OneLaunchArg::Off => cuda::OneLaunch::Off,
    }
}

/// A size such as `24G`, `512M` or plain bytes, in binary units.
pub(crate) fn bytes_of(text: &str) -> Option<u64> {
    let text = text.trim().trim_end_matches(['b', 'B', 'i']);
    let (digits, shift) = match text.chars().last()?.to_ascii_uppercase() {
        'K' => (&text[..text.len() - 1], 10),
        'M' => (&text[..text.len() - 1], 20),
        'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: f64 = digits.trim().parse().ok().filter(|n| *n > 0.0)?;
    Some((number * f64::from(1_u32 << shift)) as u64)
}

/// Loads a model file, or the model of a name in the cache.
pub(crate) fn load(path: &Path) -> anyhow::Result<model::LoadedModel> {
    let path = by_name::in_cache(path);
    model_path::check_model(&path)?;
    Ok(model::load(&path)?)
}

/// Loads a model file, or the bundled model when there is none.
pub(crate) fn load_or(path: Option<&Path>, bundled: Bundled) -> anyhow::Result<model::LoadedModel> {
    match path {
        Some(path) => load(path),
        None => {
            let bytes = gguf::FileBytes::embedded(bundled.gguf);
            Ok(model::load_bytes(bundled.name, bytes)?)
        }
    }
}

/// A tiny model with random weights.
#[cfg(test)]
pub(crate) fn tiny() -> model::LoadedModel {
    let spec = model::synth::SynthSpec::parse("tiny-hybrid:q8_0").unwrap();
    let bytes = gguf::FileBytes::shared(spec.bytes().unwrap().into());
    model::load_bytes("tiny synthetic model", bytes).unwrap()
}

/// The vocabulary with these tags; borrowed if it has them already.
fn with_markup(vocab: &Vocab, markup: TemplateMarkup) -> Cow<'_, Vocab> {
    if vocab.markup == markup {
        return Cow::Borrowed(vocab);
    }
    Cow::Owned(Vocab {
        markup,
        ..vocab.clone()
    })
}

/// Text side of a loaded model.
pub(crate) fn text_side(
    loaded: &model::LoadedModel,
    path: Option<&Path>,
    template_file: Option<&Path>,
    defaults: GenerationDefaults,
) -> anyhow::Result<ModelContext> {
    let source = template_file.map(|file| config::read_text("--chat-template-file", file));
    let source = source.transpose()?;
    let markup = match &source {
        Some(source) => model::markup::of_templates([source.as_str()]),
        None => loaded.vocab.markup.clone(),
    };
    let vocab = with_markup(&loaded.vocab, defaults.markup.over(markup));
    let file = || {
        path.map_or_else(
            || "the bundled model".to_owned(),
            |p| p.display().to_string(),
        )
    };
    let template = match (&source, template_file) {
        (Some(source), Some(file)) => ChatTemplate::from_source(source, &vocab)
            .with_context(|| format!("--chat-template-file {}", file.display()))?,
        _ => ChatTemplate::from_vocab(&vocab)
            .with_context(|| format!("{}: tokenizer.chat_template", file()))?,
    };
    let tokenizer =
        Tokenizer::new(&vocab).with_context(|| format!("{}: tokenizer.ggml", file()))?;
    let tokenizer = Arc::new(tokenizer);
    let eos = loaded.vocab.eos.clone();
    Ok(ModelContext {
        constraints: ModelConstraints::new(
            &tokenizer,
            &eos,
            loaded.spec.vocab,
            &defaults.reasoning,
        ),
        tokenizer,
        template,
        eos,
        defaults,
        compressor: None,
        description: ModelDescription {
            trained_context: loaded.spec.trained_context,
            vocab: loaded.spec.vocab,
            parameters: loaded.info.parameters,
            size_bytes: loaded.info.bytes,
            architecture: loaded.info.architecture.clone(),
            quantization: loaded.info.quantization.clone(),
            path: path.map(|path| path.display().to_string()),
            ..ModelDescription::default()
        },
    })
}

/// Opens a model with a progress bar; `also` receives the progress too.
pub(crate) fn open(
    backend: &dyn Backend,
    config: LoadConfig,
    also: &mut dyn FnMut(LoadProgress),
) -> anyhow::Result<Box<dyn Runner>> {
    let progress = TaskProgress::new(format!("loading {}", config.target.name));
    Ok(backend.open(config, &mut |at| {
        progress.set(at.done_bytes, at.total_bytes);
        also(at);
    })?)
}

/// Summary of what is opened: model, device, memory, and the reason of the KV cache type.
pub(crate) fn plan_lines(loaded: &model::LoadedModel, fitted: &FittedConfig) -> Vec<String> {
    let FittedConfig {
        config,
        memory,
        placement,
        device,
        usable,
        why,
    } = fitted;
    let info = &loaded.info;
    let mut lines = vec![
        format!(
            "model {}: {}, {} weights, {}",
            info.name,
            info.architecture,
            count_text(info.parameters),
            bytes_text(info.bytes)
        ),
        format!(
            "device {}: {} ({}), {} of {} free{}",
            device.id,
            device.name,
            device.features.join(", "),
            bytes_text(device.free_bytes),
            bytes_text(device.total_bytes),
            usable.left_text()
        ),
        format!(
            "memory {}: weights {} (and {} read in place from the file), cache {} for {} sequences of up to {} \
             tokens that share {} (keys {}, values {}), states {}, draft {}, scratch {}, driver {}; pinned on the host {}",
            bytes_text(memory.total_bytes()),
            bytes_text(memory.weights_bytes),
            bytes_text(memory.mapped_bytes),
            bytes_text(memory.kv_bytes),
            config.limits.sequences,
            config.limits.context,
            config.limits.clamped_pool_tokens(),
            config.kv.k.name(),
            config.kv.v.name(),
            bytes_text(memory.state_bytes),
            bytes_text(memory.draft_bytes),
            bytes_text(memory.scratch_bytes),
            bytes_text(memory.driver_bytes),
            bytes_text(memory.pinned_bytes)
        ),
        format!("keys and values {why}"),
    ];
    lines.extend(
        placement
            .iter()
            .flat_map(|all| placement::lines(all, &config.target)),
    );
    lines
}

/// A large number in words.
pub(crate) fn count_text(count: u64) -> String {
    match count {
        1_000_000_000.. => format!("{:.2} billion", count as f64 / 1e9),
        1_000_000.. => format!("{:.1} million", count as f64 / 1e6),
        _ => count.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_in_binary_units() {
        assert_eq!(bytes_of("24G"), Some(24 << 30));
        assert_eq!(bytes_of("24GiB"), Some(24 << 30));
        assert_eq!(bytes_of("1.5m"), Some(3 << 19));
        assert_eq!(bytes_of("4096"), Some(4096));
        for wrong in ["", "G", "-1G", "many"] {
            assert_eq!(bytes_of(wrong), None, "{wrong}");
        }
    }
}
