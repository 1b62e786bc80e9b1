//! From a path and device flags to an opened model: what every command that runs a model begins with.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use chat::Tokenizer;
use chat::template::ChatTemplate;
use contract::{
    Backend, DeviceInfo, KvFormat, KvFormats, Limits, LoadProgress, MemoryPlan, OpenPlan, Runner,
};

use crate::bundled::Bundled;
use crate::cli::DeviceArgs;
use crate::commands::drafting::Drafting;
use crate::commands::progress::{Progress, bytes_text};
use crate::config;
use crate::constrain::Constrain;
use crate::devices::{self, DeviceChoice};
use crate::served::{ModelFacts, ServedModel};
use crate::settings::GenerationDefaults;

/// The longest context that is planned for when nobody asked for one.
const AUTO_CONTEXT: usize = 32_768;
/// Contexts shorter than this help nobody; the last size tried when memory is short.
const LEAST_CONTEXT: usize = 1_024;
/// No model comes near this; a longer context is a slip of the keyboard.
const MOST_CONTEXT: usize = 1 << 24;
const DEFAULT_CHUNK: usize = 512;
/// A card needs more rows to be busy.
const CARD_CHUNK: usize = 2048;

/// The device that the flags mean.
pub(super) fn device(args: &DeviceArgs) -> anyhow::Result<Box<dyn Backend>> {
    Ok(devices::choose(&choice(args)?)?)
}

/// What the flags say of the device.
pub(super) fn choice(args: &DeviceArgs) -> anyhow::Result<DeviceChoice> {
    let vram_limit = match &args.vram_limit {
        Some(text) => Some(
            bytes_of(text)
                .with_context(|| format!("--vram-limit {text}: use a size such as 24G"))?,
        ),
        None => None,
    };
    Ok(DeviceChoice {
        name: args.device.clone(),
        cpu_reference: args.cpu_reference,
        threads: args.threads,
        card: cuda::Options {
            vram_limit,
            eager: args.eager,
            compile: config::kernels::options(&args.compiler),
            ..cuda::Options::default()
        },
    })
}

/// A size such as `24G`, `512M` or plain bytes, in binary units.
pub(super) fn bytes_of(text: &str) -> Option<u64> {
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

/// Loads a model file.
pub(super) fn load(path: &Path) -> anyhow::Result<model::Loaded> {
    Ok(model::load(path)?)
}

/// Loads a model file, or the bundled model when there is none.
pub(super) fn load_or(path: Option<&Path>, bundled: Bundled) -> anyhow::Result<model::Loaded> {
    match path {
        Some(path) => load(path),
        None => {
            let bytes = gguf::Mapped::embedded(bundled.gguf);
            Ok(model::load_bytes(bundled.name, bytes)?)
        }
    }
}

/// A tiny model with random weights.
#[cfg(test)]
pub(super) fn tiny() -> model::Loaded {
    let spec = model::synth::SynthSpec::parse("tiny-hybrid:q8_0").unwrap();
    let bytes = gguf::Mapped::shared(spec.bytes().unwrap().into());
    model::load_bytes("tiny synthetic model", bytes).unwrap()
}

/// The text side of a loaded model.
pub(super) fn text_side(
    loaded: &model::Loaded,
    path: Option<&Path>,
    template_file: Option<&Path>,
    defaults: GenerationDefaults,
) -> anyhow::Result<ServedModel> {
    let template = match template_file {
        Some(file) => {
            let source = config::read_text("--chat-template-file", file)?;
            let template = ChatTemplate::from_source(&source, &loaded.vocab);
            template.with_context(|| format!("--chat-template-file {}", file.display()))?
        }
        None => ChatTemplate::from_vocab(&loaded.vocab)?,
    };
    let tokenizer = Arc::new(Tokenizer::new(&loaded.vocab)?);
    let eos = loaded.vocab.eos.clone();
    Ok(ServedModel {
        constrain: Constrain::new(&tokenizer, &eos, loaded.spec.vocab, &defaults.reasoning),
        tokenizer,
        template,
        eos,
        defaults,
        facts: ModelFacts {
            trained_context: loaded.spec.trained_context,
            vocab: loaded.spec.vocab,
            parameters: loaded.facts.parameters,
            size_bytes: loaded.facts.bytes,
            architecture: loaded.facts.architecture.clone(),
            path: path.map(|path| path.display().to_string()),
            ..ModelFacts::default()
        },
    })
}

/// Storages of keys and values that the flags mean, best first; a device takes the first that it has.
pub(super) fn kv_choices(args: &DeviceArgs) -> anyhow::Result<Vec<KvFormats>> {
    let parse = |flag: &str, name: &str| -> anyhow::Result<KvFormat> {
        let known = KvFormat::ALL
            .into_iter()
            .find(|format| format.name().eq_ignore_ascii_case(name));
        known.with_context(|| {
            let names: Vec<&str> = KvFormat::ALL.iter().map(|format| format.name()).collect();
            format!(
                "{flag} {name}: unknown type, use one of {}",
                names.join(", ")
            )
        })
    };
    // The reference judges others, so it rounds nothing unless it is told to.
    let usual = match args.cpu_reference {
        true => KvFormat::F32,
        false => KvFormat::F16,
    };
    let single = |flag: &str, name: &Option<String>| {
        let name = name.as_ref();
        name.map(|name| parse(flag, name)).transpose()
    };
    let k = single("--cache-type-k", &args.cache_type_k)?;
    let v = single("--cache-type-v", &args.cache_type_v)?;
    let pair = |both: KvFormat| KvFormats {
        k: k.unwrap_or(both),
        v: v.unwrap_or(both),
    };
    match &args.kv_type {
        None => Ok(vec![pair(usual)]),
        Some(names) => names
            .split(',')
            .map(|name| Ok(pair(parse("--kv-type", name.trim())?)))
            .collect(),
    }
}

/// The first choice that the device has; its refusal of the last one if it has none.
fn stored(
    choices: &[KvFormats],
    estimate: impl Fn(KvFormats) -> Result<MemoryPlan, contract::DeviceError>,
) -> anyhow::Result<KvFormats> {
    let name = |kv: &KvFormats| format!("keys as {} and values as {}", kv.k.name(), kv.v.name());
    let (last, others) = choices
        .split_last()
        .context("--kv-type: no type is named")?;
    for kv in others {
        match estimate(*kv) {
            Err(contract::DeviceError::Unsupported { .. }) => {
                tracing::warn!("the device does not store {}; trying the next", name(kv));
            }
            _ => return Ok(*kv),
        }
    }
    Ok(*last)
}

/// What a command wants to open, before the context is fitted to the memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    /// Sequences open at once.
    pub sequences: usize,
    /// Context in tokens when no flag says otherwise; `None` for as much as fits.
    pub context: Option<usize>,
    /// Nodes of the widest tree.
    pub tree_nodes: usize,
}

/// A plan that fits, what it takes, and of what.
pub(super) struct Fitted {
    /// What to open.
    pub plan: OpenPlan,
    /// What it takes.
    pub memory: MemoryPlan,
    /// The device it fits on.
    pub device: DeviceInfo,
}

/// Makes a plan without a draft.
pub(super) fn fit(
    backend: &dyn Backend,
    loaded: &model::Loaded,
    args: &DeviceArgs,
    wish: Wish,
) -> anyhow::Result<Fitted> {
    fit_beside(backend, loaded, args, (wish, &Drafting::none()))
}

/// Makes a plan. An asked-for context is taken or refused; otherwise the longest that fits is found.
pub(super) fn fit_beside(
    backend: &dyn Backend,
    loaded: &model::Loaded,
    args: &DeviceArgs,
    (wish, drafting): (Wish, &Drafting),
) -> anyhow::Result<Fitted> {
    let trained = loaded.spec.trained_context;
    let device = backend.probe()?;
    let usual_chunk = match device.id.as_str() {
        "cpu" => DEFAULT_CHUNK,
        _ => CARD_CHUNK,
    };
    let prefill_chunk = args.chunk.unwrap_or(usual_chunk);
    if prefill_chunk == 0 || !prefill_chunk.is_multiple_of(64) {
        bail!("--chunk {prefill_chunk}: use a multiple of 64");
    }
    let plan_with = |kv: KvFormats, context: usize| OpenPlan {
        target: Arc::clone(&loaded.spec),
        weights: Arc::clone(&loaded.weights),
        draft: drafting.plan.clone(),
        exact: drafting.exact,
        kv,
        limits: Limits {
            sequences: wish.sequences,
            context,
            tree_nodes: wish.tree_nodes,
            prefill_chunk,
        },
    };
    let kv = stored(&kv_choices(args)?, |kv| {
        backend.estimate(&plan_with(kv, LEAST_CONTEXT))
    })?;
    let plan_for = |context: usize| plan_with(kv, context);
    let free = device.free_bytes;
    if let Some(context) = args.max_ctx.or(wish.context) {
        if context > MOST_CONTEXT {
            bail!(
                "--max-ctx {context}: use at most {MOST_CONTEXT}; the model was trained for {trained}"
            );
        }
        if context > trained {
            tracing::warn!(
                context,
                trained,
                "the context is longer than the model was trained for"
            );
        }
        let plan = plan_for(context);
        let memory = backend.estimate(&plan)?;
        if memory.total_bytes() > free {
            bail!(
                "--max-ctx {context}: a context of {context} tokens for {} sequences takes {}, but only {} \
                 are free; lower --max-ctx or --max-sequences, or use --kv-type q8_0",
                wish.sequences,
                bytes_text(memory.total_bytes()),
                bytes_text(free)
            );
        }
        return Ok(Fitted {
            plan,
            memory,
            device,
        });
    }
    let mut context = trained.min(AUTO_CONTEXT);
    loop {
        let plan = plan_for(context);
        let memory = backend.estimate(&plan)?;
        // A fifth stays free for the rest of the machine and for the mapped file's pages.
        if memory.total_bytes() <= free / 5 * 4 {
            return Ok(Fitted {
                plan,
                memory,
                device,
            });
        }
        if context <= LEAST_CONTEXT {
            bail!(
                "even a context of {context} tokens takes {}, but only {} are free",
                bytes_text(memory.total_bytes()),
                bytes_text(free)
            );
        }
        context = (context / 2).max(LEAST_CONTEXT);
    }
}

/// Opens a plan, with a progress bar named after the model; `also` hears of the progress too.
pub(super) fn open(
    backend: &dyn Backend,
    plan: OpenPlan,
    also: &mut dyn FnMut(LoadProgress),
) -> anyhow::Result<Box<dyn Runner>> {
    let progress = Progress::new(format!("loading {}", plan.target.name));
    Ok(backend.open(plan, &mut |at| {
        progress.set(at.done_bytes, at.total_bytes);
        also(at);
    })?)
}

/// The plan in three lines: model, device, memory.
pub(super) fn plan_lines(loaded: &model::Loaded, fitted: &Fitted) -> [String; 3] {
    let Fitted {
        plan,
        memory,
        device,
    } = fitted;
    let facts = &loaded.facts;
    [
        format!(
            "model {}: {}, {} weights, {}",
            facts.name,
            facts.architecture,
            count_text(facts.parameters),
            bytes_text(facts.bytes)
        ),
        format!(
            "device {}: {} ({}), {} of {} free",
            device.id,
            device.name,
            device.features.join(", "),
            bytes_text(device.free_bytes),
            bytes_text(device.total_bytes)
        ),
        format!(
            "memory {}: weights {} (and {} read in place from the file), cache {} for {} sequences of {} \
             tokens (keys {}, values {}), states {}, draft {}, scratch {}, driver {}; pinned on the host {}",
            bytes_text(memory.total_bytes()),
            bytes_text(memory.weights_bytes),
            bytes_text(memory.mapped_bytes),
            bytes_text(memory.kv_bytes),
            plan.limits.sequences,
            plan.limits.context,
            plan.kv.k.name(),
            plan.kv.v.name(),
            bytes_text(memory.state_bytes),
            bytes_text(memory.draft_bytes),
            bytes_text(memory.scratch_bytes),
            bytes_text(memory.driver_bytes),
            bytes_text(memory.pinned_bytes)
        ),
    ]
}

/// A large number as people say it.
pub(super) fn count_text(count: u64) -> String {
    match count {
        1_000_000_000.. => format!("{:.2} billion", count as f64 / 1e9),
        1_000_000.. => format!("{:.1} million", count as f64 / 1e6),
        _ => count.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    #[test]
    fn sizes_are_read_in_binary_units() {
        assert_eq!(bytes_of("24G"), Some(24 << 30));
        assert_eq!(bytes_of("24GiB"), Some(24 << 30));
        assert_eq!(bytes_of("1.5m"), Some(3 << 19));
        assert_eq!(bytes_of("4096"), Some(4096));
        for wrong in ["", "G", "-1G", "many"] {
            assert_eq!(bytes_of(wrong), None, "{wrong}");
        }
    }

    fn device_args(words: &[&str]) -> DeviceArgs {
        let words = ["hearth", "serve", "--device", "cpu"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Serve(args) => args.device,
            other => panic!("{other:?}"),
        }
    }

    fn check_refused(words: &[&str], parts: &[&str]) {
        let args = device_args(words);
        let loaded = tiny();
        let backend = device(&args).unwrap();
        let wish = Wish {
            sequences: 4,
            context: None,
            tree_nodes: 1,
        };
        let Err(error) = fit(backend.as_ref(), &loaded, &args, wish) else {
            panic!("{words:?} was taken");
        };
        for part in parts {
            assert!(error.to_string().contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn one_flag_sets_both_cache_types_and_the_single_ones_win() {
        let check = |words: &[&str], expected: &[(KvFormat, KvFormat)]| {
            let choices = kv_choices(&device_args(words)).unwrap();
            let pairs: Vec<_> = choices.iter().map(|kv| (kv.k, kv.v)).collect();
            assert_eq!(pairs, expected, "{words:?}");
        };
        use KvFormat::{F16, F32, Q4_0, Q8_0, Tq3_0};
        check(&["--kv-type", "q8_0"], &[(Q8_0, Q8_0)]);
        let words = ["--kv-type", "q8_0", "--cache-type-v", "F16"];
        check(&words, &[(Q8_0, F16)]);
        check(&["--cpu-reference"], &[(F32, F32)]);
        let words = ["--kv-type", "tq3_0,q4_0"];
        check(&words, &[(Tq3_0, Tq3_0), (Q4_0, Q4_0)]);
    }

    #[test]
    fn a_type_that_the_device_lacks_gives_way_to_the_next_one_named() {
        let pair = |both| KvFormats { k: both, v: both };
        let lacks = |kv: KvFormats| match kv.k {
            KvFormat::Tq3_0 => Err(contract::DeviceError::Unsupported {
                what: "tq3_0".to_owned(),
                device: "this".to_owned(),
                instead: "use q4_0".to_owned(),
            }),
            _ => Ok(MemoryPlan::default()),
        };
        let choose = |types: &[KvFormat]| {
            let choices: Vec<_> = types.iter().map(|both| pair(*both)).collect();
            stored(&choices, lacks).unwrap().k
        };
        assert_eq!(choose(&[KvFormat::Tq3_0, KvFormat::Q4_0]), KvFormat::Q4_0);
        assert_eq!(choose(&[KvFormat::Q8_0, KvFormat::Tq3_0]), KvFormat::Q8_0);
        // The last is left to be refused by the device in its own words.
        assert_eq!(choose(&[KvFormat::Tq3_0]), KvFormat::Tq3_0);
    }

    #[test]
    fn what_cannot_be_planned_is_refused_by_its_flag() {
        check_refused(&["--kv-type", "q7"], &["--kv-type q7", "q8_0"]);
        check_refused(&["--chunk", "100"], &["--chunk 100", "multiple of 64"]);
        check_refused(
            &["--max-ctx", "99999999999"],
            &["--max-ctx 99999999999", "at most"],
        );
        check_refused(
            &["--max-ctx", "16777216", "--kv-type", "f16"],
            &["--max-ctx 16777216", "free"],
        );
    }

    #[test]
    fn a_tiny_model_opens_with_the_context_it_was_trained_for() {
        let args = device_args(&[]);
        let loaded = tiny();
        let backend = device(&args).unwrap();
        let wish = Wish {
            sequences: 1,
            context: None,
            tree_nodes: 1,
        };
        let fitted = fit(backend.as_ref(), &loaded, &args, wish).unwrap();
        assert_eq!(fitted.plan.limits.context, loaded.spec.trained_context);
        let runner = open(backend.as_ref(), fitted.plan, &mut |_| {}).unwrap();
        assert_eq!(runner.info().vocab, loaded.spec.vocab);
    }
}
