//! The configuration of the prefix cache and of its store on disk, from the flags.

use anyhow::{Context, bail};
use chat::conversation::{Conversation, Message, Role};
use contract::vocab::TokenKind;
use contract::{Backend, DeviceError, DeviceInfo, LoadConfig, Runner, SnapshotLocation, TokenId};
use decode::{PrefixConfig, SavePointConfig};

use crate::cli::CacheArgs;
use crate::engine::store::{DiskStore, StoreConfig};
use crate::open;
use crate::progress::bytes_text;
use crate::text::model_context::ModelContext;

/// Tokens between saved states within a prompt.
const SAVE_INTERVAL: usize = 4096;
/// States kept for a conversation on a terminal: its head, its last turns, and one spare.
const CONVERSATION_ENTRIES: usize = 4;
/// Version of the states that equal tokens lead to; stored states of another version are not used.
const STATE_VERSION: &str = "hearth state 1";

/// The prefix cache of `serve`.
///
/// # Errors
/// If the size of --prefix-cache-bytes is invalid.
pub(super) fn prefix(args: &CacheArgs, model: &ModelContext) -> anyhow::Result<PrefixConfig> {
    let bytes = match &args.prefix_cache_bytes {
        Some(text) => open::bytes_of(text)
            .with_context(|| format!("--prefix-cache-bytes {text}: use a size such as 8G"))?,
        // States live in host memory on every device. KV rows move there once the GPU's cache needs
        // their pages, and rows that are still on the GPU count too.
        None => {
            cpu::CpuBackend::new(cpu::CpuOptions::default())
                .probe()?
                .free_bytes
                / 4
        }
    };
    Ok(PrefixConfig {
        max_entries: args.prefix_cache_entries,
        bytes,
        save_points: SavePointConfig {
            turn_starts: turn_starts(model),
            interval: SAVE_INTERVAL,
            ..SavePointConfig::default()
        },
        location: SnapshotLocation::Host,
        min_store_tokens: args.kv_cache_min_tokens.max(1),
        warmup_tokens: args.prefix_warmup,
    })
}

/// The prefix cache of one conversation on a terminal.
pub(super) fn for_conversation(model: &ModelContext) -> PrefixConfig {
    PrefixConfig {
        max_entries: CONVERSATION_ENTRIES,
        save_points: SavePointConfig {
            turn_starts: turn_starts(model),
            ..SavePointConfig::default()
        },
        ..PrefixConfig::default()
    }
}

/// The store on disk of a model to open or opened, if the flags name a directory.
///
/// # Errors
/// If the prefix cache is off, or the directory cannot be used.
pub(super) fn store(
    args: &CacheArgs,
    config: &LoadConfig,
    device: &DeviceInfo,
) -> anyhow::Result<Option<DiskStore>> {
    let Some(dir) = &args.kv_cache_dir else {
        return Ok(None);
    };
    if args.prefix_cache_entries == 0 {
        bail!(
            "--kv-cache-dir needs the prefix cache, which --prefix-cache-entries 0 turns off; remove one of them"
        );
    }
    let store = StoreConfig {
        dir: dir.clone(),
        budget: args.kv_cache_budget.saturating_mul(1 << 20),
        owner: owner(config, device),
    };
    let store = DiskStore::open(store);
    let store = store.with_context(|| format!("--kv-cache-dir {}", dir.display()))?;
    Ok(Some(store))
}

/// Saves and frees the state of an empty sequence.
///
/// A GPU pins host memory for its first snapshot, which takes as long as the prefill of a thousand
/// tokens. This moves that time from the first prompt to the start.
pub(super) fn warm(runner: &mut dyn Runner, location: SnapshotLocation) -> Result<(), DeviceError> {
    let seq = runner.open(1)?;
    let saved = runner.snapshot(seq, location);
    runner.close(seq);
    match saved {
        Ok(info) => runner.free_snapshot(info.id),
        // The scheduler reports the same error at its first snapshot.
        Err(error) => tracing::warn!(%error, "prompt states cannot be saved"),
    }
    Ok(())
}

/// A hash of all that a stored state depends on besides its tokens: model, draft, formats and this
/// program.
///
/// The device's instruction set is part of it, because another set rounds differently and a state
/// must have the bits of prefilling the prompt.
fn owner(config: &LoadConfig, device: &DeviceInfo) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for part in [Some(&device.id), device.features.first()] {
        hasher
            .update(part.map_or(&[], |part| part.as_bytes()))
            .update(&[0]);
    }
    hasher.update(STATE_VERSION.as_bytes());
    hasher.update(&config.target.hash.0);
    hasher.update(&[u8::from(config.target.mtp.is_some())]);
    hasher.update(&contract::snapshot::LAYOUT_VERSION.to_le_bytes());
    for format in [config.kv.k, config.kv.v] {
        hasher.update(format.name().as_bytes()).update(&[0]);
    }
    if let Some(draft) = &config.draft {
        hasher.update(&draft.spec.hash.0);
        hasher.update(draft.kv.name().as_bytes());
    }
    let mut owner = [0; 16];
    owner.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    owner
}

/// The tokens that begin a turn in the model's prompts.
///
/// It is the first control token that occurs at least once per user turn in a conversation of five
/// turns.
fn turn_starts(model: &ModelContext) -> Vec<TokenId> {
    let roles = [
        Role::User,
        Role::Assistant,
        Role::User,
        Role::Assistant,
        Role::User,
    ];
    let conversation = Conversation {
        messages: roles.map(|role| Message::new(role, "words")).into(),
        ..Conversation::default()
    };
    let rendered = model.template.render(&conversation).ok();
    let Some(tokens) = rendered.and_then(|text| model.tokenizer.encode_rendered(&text).ok()) else {
        tracing::warn!(
            "the chat template cannot render a conversation, so states are saved at the ends of prompts only"
        );
        return Vec::new();
    };
    let users = roles.iter().filter(|role| **role == Role::User).count();
    let in_every_turn = |id: &TokenId| tokens.iter().filter(|token| *token == id).count() >= users;
    let control = |id: &TokenId| model.tokenizer.kind(*id) == TokenKind::Control;
    let found = tokens.iter().find(|id| control(id) && in_every_turn(id));
    found.copied().into_iter().collect()
}

/// One line about the prefix cache for the log.
pub(super) fn line(prefix: &PrefixConfig, store: Option<&DiskStore>) -> String {
    if prefix.max_entries == 0 {
        return "prefix cache: off".to_owned();
    }
    let disk = store.map(|store| {
        let status = store.status();
        let (n, budget) = (store.token_lists().len(), bytes_text(status.budget));
        format!(
            "; {n} on disk in {}, at most {budget}",
            status.dir.display()
        )
    });
    format!(
        "prefix cache: up to {} states in {} of memory{}",
        prefix.max_entries,
        bytes_text(prefix.bytes),
        disk.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::settings::GenerationDefaults;
    use contract::{DraftLoad, DraftLoadConfig, KvFormat, KvFormats, Limits, QuantType};

    fn tiny_model() -> (model::LoadedModel, ModelContext) {
        let loaded = open::tiny();
        let model = open::text_side(&loaded, None, None, GenerationDefaults::default()).unwrap();
        (loaded, model)
    }

    #[test]
    fn turn_start_token_is_found_in_the_template() {
        let (_, model) = tiny_model();
        let starts = turn_starts(&model);
        let names: Vec<String> = starts
            .iter()
            .map(|id| String::from_utf8_lossy(model.tokenizer.bytes(*id)).into_owned())
            .collect();
        assert_eq!(names, ["<|im_start|>"]);
    }

    #[test]
    fn states_of_other_drafts_have_another_owner() {
        let backend = cpu::CpuBackend::new(cpu::CpuOptions::default());
        let device = backend.probe().unwrap();
        let spec = model::synth::SynthSpec::parse("tiny-hybrid+mtp:q8_0").unwrap();
        let loaded = spec.load().unwrap();
        let made = model::synth::draft_for(&loaded, QuantType::Q8_0, 1);
        let kv = KvFormat::F16;
        let alone = LoadConfig {
            target: Arc::clone(&loaded.spec),
            weights: Arc::clone(&loaded.weights),
            draft: None,
            batch_invariant: false,
            kv: KvFormats { k: kv, v: kv },
            limits: Limits {
                sequences: 1,
                context: 64,
                tree_nodes: 16,
                prefill_chunk: 64,
                pool_tokens: None,
            },
        };
        let with_draft = LoadConfig {
            draft: Some(DraftLoadConfig {
                spec: made.spec,
                weights: made.weights,
                kv,
                load: DraftLoad::AtOpen,
            }),
            ..alone.clone()
        };
        let mut headless = (*alone.target).clone();
        assert!(headless.mtp.take().is_some());
        let without_head = LoadConfig {
            target: Arc::new(headless),
            ..alone.clone()
        };
        let owners = [&alone, &with_draft, &without_head].map(|config| owner(config, &device));
        assert_ne!(owners[0], owners[1]);
        assert_ne!(owners[0], owners[2]);
        assert_eq!(owners[0], owner(&alone.clone(), &device));
    }
}
