//! Fits plans with the scorer of prompt compression.
//!
//! The scorer's memory grows with the longest prompt that it reads. Beside the model on one GPU, in
//! order:
//!
//! 1. Without `--max-ctx`, the context yields, to no less than half of what it would be.
//! 2. The scorer reads shorter prompts; longer ones are not compressed.
//! 3. The scorer runs on the CPU, which is slow.
//!
//! The KV cache type does not yield. A scorer on the CPU is not planned for. On a device of its
//! own, or one of several of the model, it takes what the model leaves.

use contract::{Backend, DeviceError, MemoryPlan, ScorerConfig};

use crate::cli::DeviceArgs;
use crate::open::drafting::Drafting;
use crate::open::fit_drafting::fit_drafting;
use crate::open::memory_fit::{FittedConfig, MemoryRequest, fit_beside};
use crate::progress::bytes_text;

/// The longest prompts that scorers are planned for, in tokens.
const PROMPTS: [usize; 5] = [262_144, 131_072, 65_536, 32_768, 16_384];

/// The longest prompt that a scorer reads, unless memory limits it.
pub(crate) const MAX_SCORED_TOKENS: usize = PROMPTS[0];

/// Where a scorer runs, and what it reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ScorerFit {
    /// The longest prompt, in tokens.
    pub max_tokens: usize,
    /// Its memory on the GPU; `None` if it runs on the CPU.
    pub memory: Option<MemoryPlan>,
    /// The id of its GPU, if that is not the model's only device.
    pub device: Option<String>,
    /// What yields to what, for a warning; `None` if nothing does.
    pub yields: Option<String>,
}

impl ScorerFit {
    fn on_the_cpu(yields: Option<String>) -> ScorerFit {
        ScorerFit {
            max_tokens: MAX_SCORED_TOKENS,
            memory: None,
            device: None,
            yields,
        }
    }

    /// Bytes of the model's only device that the scorer takes.
    pub(crate) fn device_bytes(&self) -> u64 {
        let beside = self.memory.as_ref().filter(|_| self.device.is_none());
        beside.map_or(0, MemoryPlan::total_bytes)
    }

    /// The line of the plan.
    pub(crate) fn line(&self, name: &str) -> String {
        let Some(memory) = &self.memory else {
            return format!(
                "scorer {name} on the CPU, for prompts of up to {} tokens",
                self.max_tokens
            );
        };
        let beside = memory.total_bytes() - memory.weights_bytes;
        let device = self.device.as_ref();
        let device = device.map_or_else(String::new, |id| format!("on {id}, "));
        format!(
            "scorer {name} {device}{}: weights {}, {} beside them for prompts of up to {} tokens; pinned on the host {}",
            bytes_text(memory.total_bytes()),
            bytes_text(memory.weights_bytes),
            bytes_text(beside),
            self.max_tokens,
            bytes_text(memory.pinned_bytes)
        )
    }
}

/// The memory of a scorer of prompts of `max_tokens` tokens on a device; `None` if it would run on
/// the CPU.
///
/// # Errors
/// If the scorer's weights are not valid.
pub(crate) fn scorer_memory(
    backend: &dyn Backend,
    scorer: &ScorerConfig,
    max_tokens: usize,
) -> Result<Option<MemoryPlan>, DeviceError> {
    let config = ScorerConfig {
        max_tokens,
        ..scorer.clone()
    };
    match backend.estimate_scorer(&config) {
        Ok(memory) => Ok(Some(memory)),
        Err(DeviceError::Unsupported { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A device that is named for the scorer.
pub(crate) struct ScorerDevice {
    pub id: String,
    pub backend: Box<dyn Backend>,
    /// What a model may take of it.
    pub usable_bytes: u64,
}

impl ScorerDevice {
    /// The place of a scorer beside the parts of a model that run on the device.
    fn fit(&self, model: &FittedConfig, scorer: &ScorerConfig) -> Result<ScorerFit, DeviceError> {
        let parts = model
            .placement
            .iter()
            .flat_map(|placement| &placement.parts);
        let here = parts.filter(|part| part.device == self.id);
        let taken: u64 = here.map(|part| part.memory.total_bytes()).sum();
        let left = self.usable_bytes.saturating_sub(taken);
        let mut wanted = 0;
        for max_tokens in PROMPTS {
            let Some(memory) = scorer_memory(self.backend.as_ref(), scorer, max_tokens)? else {
                return Ok(ScorerFit::on_the_cpu(None));
            };
            wanted = memory.total_bytes();
            if wanted <= left {
                return Ok(ScorerFit {
                    max_tokens,
                    memory: Some(memory),
                    device: Some(self.id.clone()),
                    yields: yields((0, 0), max_tokens),
                });
            }
        }
        Ok(ScorerFit::on_the_cpu(Some(format!(
            "the scorer runs on the CPU, which takes minutes for a long prompt: {} has {} left of \
             the {} that it takes for prompts of {} tokens; use another --prefill-device, a \
             shorter --max-ctx or a smaller --prefill-drafter",
            self.id,
            bytes_text(left),
            bytes_text(wanted),
            PROMPTS[PROMPTS.len() - 1],
        ))))
    }
}

/// Fits a plan and, if there is a scorer, finds its place. `device` is the device beside a scorer
/// of so many bytes.
///
/// # Errors
/// If the model does not fit even without the scorer.
pub(crate) fn fit_scoring(
    device: &dyn Fn(u64) -> anyhow::Result<Box<dyn Backend>>,
    loaded: &model::LoadedModel,
    args: &DeviceArgs,
    (request, drafting): (MemoryRequest, &mut Drafting),
    (scorer, named): (Option<&ScorerConfig>, Option<&ScorerDevice>),
) -> anyhow::Result<(FittedConfig, Option<ScorerFit>)> {
    let backend = device(0)?;
    let alone = fit_drafting(backend.as_ref(), loaded, args, (request, drafting))?;
    let Some(scorer) = scorer else {
        return Ok((alone, None));
    };
    if let Some(named) = named.filter(|named| named.id != alone.device.id) {
        let place = named.fit(&alone, scorer)?;
        return Ok((alone, Some(place)));
    }
    let asked = args.max_ctx.or(request.context);
    let context = |fitted: &FittedConfig| fitted.config.limits.context;
    for max_tokens in PROMPTS {
        let Some(memory) = scorer_memory(backend.as_ref(), scorer, max_tokens)? else {
            return Ok((alone, Some(ScorerFit::on_the_cpu(None))));
        };
        let bytes = memory.total_bytes();
        let beside = device(bytes)?;
        let fitted = fit_beside(beside.as_ref(), loaded, args, (request, drafting), bytes);
        let Ok(fitted) = fitted else { continue };
        let is_enough = asked.is_some() || 2 * context(&fitted) >= context(&alone);
        if !is_enough || fitted.config.kv != alone.config.kv {
            continue;
        }
        let yields = yields((context(&alone), context(&fitted)), max_tokens);
        let place = ScorerFit {
            max_tokens,
            memory: Some(memory),
            device: None,
            yields,
        };
        return Ok((fitted, Some(place)));
    }
    let shortest = PROMPTS[PROMPTS.len() - 1];
    let wanted = scorer_memory(backend.as_ref(), scorer, shortest)?;
    let wanted = wanted.map_or(0, |memory| memory.total_bytes());
    let yields = format!(
        "the scorer runs on the CPU, which takes minutes for a long prompt: beside a context of {} \
         tokens there is no room for the {} that it takes for prompts of {shortest} tokens; use a \
         shorter --max-ctx, a coarser --kv-type or a smaller --prefill-drafter",
        context(&alone),
        bytes_text(wanted)
    );
    Ok((alone, Some(ScorerFit::on_the_cpu(Some(yields)))))
}

/// What yields in a plan whose context would be `alone` without the scorer, and is `beside` it.
fn yields((alone, beside): (usize, usize), max_tokens: usize) -> Option<String> {
    let mut parts = Vec::new();
    if beside < alone {
        parts.push(format!(
            "the default context is {beside} tokens instead of {alone}, which leaves room for the scorer"
        ));
    }
    if max_tokens < MAX_SCORED_TOKENS {
        parts.push(format!(
            "the scorer reads prompts of up to {max_tokens} tokens, and longer ones are not \
             compressed; a shorter --max-ctx makes room for more"
        ));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::open::tiny;
    use clap::Parser;
    use contract::{DeviceInfo, LoadConfig, LoadProgress, Runner};

    const MIB: u64 = 1 << 20;
    /// The model's weights, and those of the scorer, in MiB.
    const WEIGHTS: (u64, u64) = (1000, 100);

    /// A GPU on which a token of context takes a MiB divided by 8, and a token of a scored prompt a
    /// MiB divided by 1,024.
    struct FakeGpu {
        free_mib: u64,
        scores: bool,
    }

    impl Backend for FakeGpu {
        fn probe(&self) -> Result<DeviceInfo, DeviceError> {
            Ok(DeviceInfo {
                id: "cuda:0".to_owned(),
                name: "fake".to_owned(),
                features: Vec::new(),
                class: None,
                total_bytes: self.free_mib * MIB,
                free_bytes: self.free_mib * MIB,
            })
        }

        fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
            Ok(MemoryPlan {
                weights_bytes: WEIGHTS.0 * MIB,
                kv_bytes: config.limits.context as u64 * MIB / 8,
                ..MemoryPlan::default()
            })
        }

        fn open(
            &self,
            _: LoadConfig,
            _: &mut dyn FnMut(LoadProgress),
        ) -> Result<Box<dyn Runner>, DeviceError> {
            unreachable!("only planned for")
        }

        fn estimate_scorer(&self, config: &ScorerConfig) -> Result<MemoryPlan, DeviceError> {
            if !self.scores {
                return Err(DeviceError::Unsupported {
                    what: "scoring".to_owned(),
                    device: "this".to_owned(),
                    instead: "the CPU scores".to_owned(),
                });
            }
            Ok(MemoryPlan {
                weights_bytes: WEIGHTS.1 * MIB,
                scratch_bytes: config.max_tokens as u64 * MIB / 1024,
                ..MemoryPlan::default()
            })
        }
    }

    /// The context and the scorer's place on a GPU with so many MiB.
    fn fitted(free_mib: u64, words: &[&str], scores: bool) -> (usize, ScorerFit) {
        fitted_with(free_mib, words, (scores, None))
    }

    /// The same with a scorer's own GPU.
    fn fitted_with(
        free_mib: u64,
        words: &[&str],
        (scores, own_mib): (bool, Option<u64>),
    ) -> (usize, ScorerFit) {
        let own = own_mib.map(|free_mib| ScorerDevice {
            id: "cuda:1".to_owned(),
            backend: Box::new(FakeGpu { free_mib, scores }),
            usable_bytes: free_mib * MIB,
        });
        let words = [
            "hearth",
            "serve",
            "--vram-headroom",
            "0",
            "--kv-type",
            "q8_0",
        ]
        .iter()
        .chain(words);
        let args = match Cli::try_parse_from(words).unwrap().command {
            Command::Serve(args) => args.device,
            other => panic!("{other:?}"),
        };
        let loaded = tiny();
        let scorer = ScorerConfig {
            model: loaded.spec.clone(),
            weights: loaded.weights.clone(),
            exit_layer: None,
            max_tokens: 1,
        };
        let request = MemoryRequest {
            sequences: 1,
            context: None,
            tree_nodes: 1,
        };
        let device = |_| Ok(Box::new(FakeGpu { free_mib, scores }) as Box<dyn Backend>);
        let drafting = &mut Drafting::none();
        let scorer = (Some(&scorer), own.as_ref());
        let found = fit_scoring(&device, &loaded, &args, (request, drafting), scorer);
        let (fitted, place) = found.unwrap();
        let place = place.unwrap();
        let taken = fitted.memory.total_bytes() + place.device_bytes();
        assert!(taken <= free_mib * MIB, "{taken}");
        (fitted.config.limits.context, place)
    }

    /// The tiny model was trained for 8,192 tokens, which take 1,024 MiB.
    #[test]
    fn nothing_yields_if_both_fit() {
        let (context, place) = fitted(1000 + 1024 + 100 + 256, &[], true);
        assert_eq!(
            (context, place.max_tokens, place.yields.clone()),
            (8192, 262_144, None)
        );
        let line = place.line("small");
        assert!(line.contains("262144 tokens"), "{line}");
    }

    #[test]
    fn the_default_context_yields_down_to_half_and_then_the_prompts_length() {
        let (context, place) = fitted(1000 + 512 + 100 + 256, &[], true);
        // 868 MiB would hold 6,944 tokens without the scorer.
        assert_eq!((context, place.max_tokens), (4096, 262_144));
        let yields = place.yields.unwrap();
        assert!(yields.contains("4096 tokens instead of 6912"), "{yields}");
        let (context, place) = fitted(1000 + 356, &[], true);
        assert_eq!((context, place.max_tokens), (1536, 65_536));
        let yields = place.yields.unwrap();
        assert!(yields.contains("instead of 2816"), "{yields}");
        assert!(yields.contains("up to 65536 tokens"), "{yields}");
    }

    #[test]
    fn a_device_of_its_own_takes_what_fits_and_the_context_stays() {
        let (context, place) = fitted_with(1000 + 512, &[], (true, Some(100 + 128)));
        assert_eq!((context, place.max_tokens), (4096, 131_072));
        assert_eq!(
            (place.device.as_deref(), place.device_bytes()),
            (Some("cuda:1"), 0)
        );
        assert!(place.line("small").contains("on cuda:1, "));
        let (context, place) = fitted_with(1000 + 512, &[], (true, Some(100)));
        assert_eq!((context, place.memory), (4096, None));
        let yields = place.yields.unwrap();
        assert!(yields.contains("cuda:1 has 100"), "{yields}");
    }

    #[test]
    fn a_named_context_does_not_yield() {
        let words = ["--max-ctx", "8192"];
        let (context, place) = fitted(1000 + 1024 + 100 + 128, &words, true);
        assert_eq!((context, place.max_tokens), (8192, 131_072));
        let (context, place) = fitted(1000 + 1024 + 100, &words, true);
        assert_eq!((context, place.memory), (8192, None));
        let yields = place.yields.unwrap();
        assert!(
            yields.contains("on the CPU") && yields.contains("--max-ctx"),
            "{yields}"
        );
    }

    #[test]
    fn a_device_without_scorers_leaves_scoring_to_the_cpu() {
        let (context, place) = fitted(4000, &[], false);
        assert_eq!((context, place), (8192, ScorerFit::on_the_cpu(None)));
    }
}
