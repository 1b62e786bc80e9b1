//! From the flags about saved states to what the prefix cache and the store are told.

use anyhow::{Context, bail};
use chat::conversation::{Conversation, Message, Role};
use contract::vocab::TokenKind;
use contract::{Backend, DeviceError, Runner, SnapshotLocation, TokenId};
use decode::{PrefixConfig, SavePointConfig};

use crate::cli::CacheArgs;
use crate::engine::store::{DiskStore, StoreConfig};
use crate::open::{self, FittedPlan};
use crate::progress::bytes_text;
use crate::text::model_context::ModelContext;

/// Tokens between states while a prompt is read.
const EVERY: usize = 4096;
/// States of a conversation on a terminal: its head, its last turns, and one to fall back on.
const TALK_SLOTS: usize = 4;
/// Changes whenever equal tokens may lead to other states than before, in which case stored ones are of no use.
const ENGINE: &str = "hearth state 1";

/// What is saved of prompts.
pub(super) fn prefix(args: &CacheArgs, model: &ModelContext) -> anyhow::Result<PrefixConfig> {
    let bytes = match &args.prefix_cache_bytes {
        Some(text) => open::bytes_of(text)
            .with_context(|| format!("--prefix-cache-bytes {text}: use a size such as 8G"))?,
        // States lie in the machine's memory wherever the model runs, and rows go there when a card's cache is
        // needed for others; those that are still on the card count too.
        None => {
            cpu::CpuBackend::new(cpu::CpuOptions::default())
                .probe()?
                .free_bytes
                / 4
        }
    };
    Ok(PrefixConfig {
        slots: args.prefix_cache_slots,
        bytes,
        boundaries: SavePointConfig {
            turn_starts: turn_starts(model),
            interval: EVERY,
            ..SavePointConfig::default()
        },
        place: SnapshotLocation::Host,
        min_store_tokens: args.kv_cache_min_tokens.max(1),
        warmup_tokens: args.read_ahead,
    })
}

/// What is saved of the prompts of one conversation on a terminal.
pub(super) fn of_talk(model: &ModelContext) -> PrefixConfig {
    PrefixConfig {
        slots: TALK_SLOTS,
        boundaries: SavePointConfig {
            turn_starts: turn_starts(model),
            ..SavePointConfig::default()
        },
        ..PrefixConfig::default()
    }
}

/// The store of the flags, if they name one.
pub(super) fn store(args: &CacheArgs, fitted: &FittedPlan) -> anyhow::Result<Option<DiskStore>> {
    let Some(dir) = &args.kv_cache_dir else {
        return Ok(None);
    };
    if args.prefix_cache_slots == 0 {
        bail!("--kv-cache-dir needs saved states, and --prefix-cache-slots 0 saves none");
    }
    let config = StoreConfig {
        dir: dir.clone(),
        budget: args.kv_cache_budget.saturating_mul(1 << 20),
        owner: owner(fitted),
    };
    let store = DiskStore::open(config);
    let store = store.with_context(|| format!("--kv-cache-dir {}", dir.display()))?;
    Ok(Some(store))
}

/// Saves the state of an empty sequence and forgets it: a card locks memory for the first state it saves, which takes as
/// long as reading a thousand tokens, and better at the start than in the first prompt.
pub(super) fn warm(runner: &mut dyn Runner, place: SnapshotLocation) -> Result<(), DeviceError> {
    let seq = runner.open(1)?;
    let saved = runner.snapshot(seq, place);
    runner.close(seq);
    match saved {
        Ok(info) => runner.free_snapshot(info.id),
        // Whoever saves a state hears of it again.
        Err(error) => tracing::warn!(%error, "no state can be saved"),
    }
    Ok(())
}

/// What states must have in common to be looked at: model, draft, formats, and what this program makes of them.
///
/// The instructions a device uses count too: another set rounds otherwise, and a state must give the bits of
/// reading the prompt.
fn owner(fitted: &FittedPlan) -> [u8; 16] {
    let (plan, device) = (&fitted.plan, &fitted.device);
    let mut hasher = blake3::Hasher::new();
    for part in [Some(&device.id), device.features.first()] {
        hasher
            .update(part.map_or(&[], |part| part.as_bytes()))
            .update(&[0]);
    }
    hasher.update(ENGINE.as_bytes());
    hasher.update(&plan.target.hash.0);
    hasher.update(&contract::snapshot::LAYOUT_VERSION.to_le_bytes());
    for format in [plan.kv.k, plan.kv.v] {
        hasher.update(format.name().as_bytes()).update(&[0]);
    }
    if let Some(draft) = &plan.draft {
        hasher.update(&draft.spec.hash.0);
        hasher.update(draft.kv.name().as_bytes());
    }
    let mut owner = [0; 16];
    owner.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    owner
}

/// The tokens that begin a turn in the model's prompts: the first control token that a conversation of five
/// turns shows once a turn, or at least in every turn of the user.
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
            "the chat template cannot express a conversation, so prompts are saved at their ends only"
        );
        return Vec::new();
    };
    let users = roles.iter().filter(|role| **role == Role::User).count();
    let often = |id: &TokenId| tokens.iter().filter(|token| *token == id).count() >= users;
    let control = |id: &TokenId| model.tokenizer.kind(*id) == TokenKind::Control;
    let found = tokens.iter().find(|id| control(id) && often(id));
    found.copied().into_iter().collect()
}

/// What is told at the start.
pub(super) fn line(prefix: &PrefixConfig, store: Option<&DiskStore>) -> String {
    if prefix.slots == 0 {
        return "prompts: nothing of them is kept".to_owned();
    }
    let disk = store.map(|store| {
        let facts = store.status();
        let (n, budget) = (store.token_lists().len(), bytes_text(facts.budget));
        format!("; {n} on disk in {}, at most {budget}", facts.dir.display())
    });
    format!(
        "prompts: up to {} states in {} of memory{}",
        prefix.slots,
        bytes_text(prefix.bytes),
        disk.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::GenerationDefaults;

    fn served() -> (model::LoadedModel, ModelContext) {
        let loaded = open::tiny();
        let model = open::text_side(&loaded, None, None, GenerationDefaults::default()).unwrap();
        (loaded, model)
    }

    #[test]
    fn the_token_that_begins_a_turn_is_found_in_the_template() {
        let (_, model) = served();
        let starts = turn_starts(&model);
        let names: Vec<String> = starts
            .iter()
            .map(|id| String::from_utf8_lossy(model.tokenizer.bytes(*id)).into_owned())
            .collect();
        assert_eq!(names, ["<|im_start|>"]);
    }
}
