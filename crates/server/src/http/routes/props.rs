//! Properties of the model and server. Keys are only added; features that do not exist are reported
//! as off.

use axum::Json;
use axum::extract::State;
use chat::Tokenizer;
use chat::request::CompressionMode;
use contract::TokenId;
use decode::{DraftSource, PrefixStats, Stats};
use serde_json::{Value, json};

use super::status::{NAME, VERSION};
use crate::compression::PromptCompressor;
use crate::engine::store::StoreStatus;
use crate::engine::{EnginePhase, ModelHandle};
use crate::error::ApiError;
use crate::http::state::App;
use crate::scripted;
use crate::settings::GenerationDefaults;
use crate::settings::compression::CompressionSettings;

/// Incremented when a key is removed, renamed or changes type.
const SCHEMA: u32 = 2;

/// Reasoning efforts of a request.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "x-high", "max"];

/// Effort tiers in ascending order.
const TIERS: [&str; 5] = ["low", "medium", "high", "x-high", "max"];

/// `GET /props`.
pub(super) async fn props(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let handle = app.model()?;
    let config = app.config();
    let ModelHandle { model, info, .. } = &*handle;
    let sources = model.description.draft_sources;
    // The first names the mode; suffix matches have no depth of their own.
    let source = sources.iter().next();
    let draft_depth = source
        .filter(|source| *source != DraftSource::Suffix)
        .map(|source| source.depth(info));
    let source = source.map(DraftSource::name);
    let by_source = app.engine().status().stats.by_source;
    let accepted: serde_json::Map<String, Value> = sources
        .iter()
        .map(|source| (source.name().to_owned(), by_source.accepted(source).into()))
        .collect();
    // File paths are shown only if API keys protect this page.
    let shown = |path: &Option<String>| path.clone().filter(|_| !config.api_keys.is_empty());
    let mut props = json!({
        "api": {"endpoints": super::paths().collect::<Vec<String>>()},
        "build_info": format!("{NAME} v{VERSION} props_schema={SCHEMA}"),
        "server": {"name": NAME, "version": VERSION, "props_schema": SCHEMA},
        "daemon": {"alive": app.engine().phase() == EnginePhase::Ready},
        "model_alias": config.model_name,
        "model_path": shown(&model.description.path),
        "model": {
            "arch": model.description.architecture,
            "draft_path": shown(&model.description.draft_path),
            "tokenizer_id": null,
        },
        "total_slots": info.limits.sequences,
        "modalities": {"vision": false, "audio": false},
        "is_sleeping": false,
        "runtime": {
            "backend": info.device.id,
            "device": info.device.name,
            "features": info.device.features,
            "device_class": info.device.class,
            "attention_window": config.window.window.tokens(),
            "attention_window_sinks": config.window.window.sinks(),
            "attention_window_force": config.window.force,
            // The keys of version 0.1.
            "fa_window": config.window.window.tokens(),
            "fa_window_sinks": config.window.window.sinks(),
            "fa_window_force": config.window.force,
            "kv_cache_k": info.kv.k.name(),
            "kv_cache_v": info.kv.v.name(),
            "kv_cache_choice": model.description.kv_choice,
            "lazy_draft": model.description.lazy_draft,
            "draft_residency": if model.description.lazy_draft { "auto" } else { "persistent" },
            "target_sharding": null,
            "target_device": info.device.id,
            "draft_device": info.draft_depth.map(|_| &info.device.id),
            "chunk": info.limits.prefill_chunk,
            "kv_pool": pool(&app.engine().status().stats),
            "memory_bytes": info.memory.total_bytes(),
        },
        "speculative": {
            "enabled": source.is_some(),
            "draft_depth": draft_depth,
            "source": source,
            "sources": sources.iter().map(DraftSource::name).collect::<Vec<_>>(),
            "accepted_by_source": accepted,
            "batch_invariant": info.batch_invariant,
            // The older name of the same.
            "exact": info.batch_invariant,
            "ddtree_budget": source.map(|_| info.limits.tree_nodes.saturating_sub(1)),
        },
        "speculative_mode": source.map_or("off", |source| match source {
            "block" => "dflash",
            other => other,
        }),
        "bos_token": null,
        "eos_token": special(&model.tokenizer, &model.eos),
    });
    if info.device.id == scripted::DEVICE {
        props["warning"] = json!(scripted::WARNING);
    }
    for part in [
        generation(&handle),
        template(&handle),
        json!({"pflash": compression(&handle, !config.api_keys.is_empty())}),
        caches(&handle, &app.engine().status().stats.prefix),
    ] {
        if let (Value::Object(props), Value::Object(part)) = (&mut props, part) {
            props.extend(part);
        }
    }
    Ok(Json(props))
}

/// Shared KV page pool, in tokens.
fn pool(stats: &Stats) -> Value {
    json!({
        "tokens": stats.pool_tokens,
        "in_use": stats.pool_tokens - stats.free_tokens,
        "evictable": stats.evictable_tokens,
        "free": stats.free_tokens - stats.evictable_tokens,
        "queue_blocked_on_pool": stats.blocked_on_pool,
        "preempted": stats.preempted,
        "preemptions": stats.preemptions,
        // The keys of version 0.1.
        "kept_by_cache": stats.evictable_tokens,
        "queue_waits_for_it": stats.blocked_on_pool,
        "parked": stats.preempted,
        "lifetime_parked": stats.preemptions,
    })
}

/// Defaults of a request.
fn generation(handle: &ModelHandle) -> Value {
    let defaults = &handle.model.defaults;
    let settings = |defaults: &GenerationDefaults| {
        json!({
            "n_ctx": handle.info.limits.context,
            "n_predict": defaults.max_tokens,
            "temperature": defaults.temperature,
            "top_p": defaults.top_p,
            "top_k": defaults.top_k,
            "min_p": defaults.min_p,
            "repeat_penalty": defaults.repetition_penalty,
            "presence_penalty": defaults.presence_penalty,
        })
    };
    json!({
        "default_generation_settings": settings(defaults),
        "non_thinking_generation_settings": settings(&defaults.of_non_thinking()),
        "budget_envelope": envelope(handle),
        "model_card": handle.model.description.card.as_ref().and_then(|card| card.verbatim.clone()),
        "sampling": {"capabilities": {
            "supports_temperature": true, "supports_top_p": true, "supports_top_k": true,
            "supports_min_p": true, "supports_repetition_penalty": true,
            "supports_frequency_penalty": true, "supports_presence_penalty": true,
            "supports_seed": true, "supports_logit_bias": true, "supports_logprobs": true,
            "supports_n": true, "supports_stop": true,
        }},
    })
}

/// Limits of reasoning and reply.
fn envelope(handle: &ModelHandle) -> Value {
    let (description, defaults) = (&handle.model.description, &handle.model.defaults);
    let reasoning = &defaults.reasoning;
    let tiers = TIERS.iter().enumerate();
    let tiers = tiers.map(|(i, name)| ((*name).to_owned(), json!(reasoning.tiers.map(|t| t[i]))));
    json!({
        "model_card_source": description.card.as_ref().map(|card| &card.source),
        "default_max_tokens": defaults.max_tokens,
        "most_tokens": reasoning.max_total_tokens,
        "hard_limit_reply_budget": reasoning.reply_budget,
        "think_max_tokens": reasoning.think_max_tokens,
        "effort_tiers": tiers.collect::<serde_json::Map<String, Value>>(),
    })
}

/// Capabilities of the chat template.
fn template(handle: &ModelHandle) -> Value {
    let (model, can) = (&handle.model, handle.model.template.capabilities());
    let reasoning = can.thinking_switch || can.opens_reasoning;
    json!({
        "chat_template": model.template.source(),
        "chat_template_caps": {
            "supports_system_role": can.system,
            "supports_tools": can.tools,
            "supports_tool_responses": can.tool_results,
            "supports_enable_thinking": can.thinking_switch,
            "supports_reasoning_effort": can.effort,
        },
        "capabilities": {
            "speculative_supported": !handle.model.description.draft_sources.is_empty(),
            "tools_supported": can.tools,
            "reasoning_supported": reasoning,
        },
        "reasoning": {
            "supported": reasoning,
            "default": model.defaults.thinking.unwrap_or(can.opens_reasoning),
            "supported_efforts": EFFORTS,
        },
    })
}

/// Prompt compression; the scorer's path only if `shows_paths`.
fn compression(handle: &ModelHandle, shows_paths: bool) -> Value {
    let off = CompressionSettings::default();
    let compressor = handle.model.compressor.as_deref();
    let settings = compressor.map_or(&off, PromptCompressor::settings);
    let is_on = compressor.is_some();
    let alpha = settings.score.sparsity.alpha;
    let path = compressor.and_then(PromptCompressor::scorer_path);
    json!({
        "enabled": is_on && settings.mode != CompressionMode::Off,
        "mode": settings.mode.name(),
        "threshold": if is_on { settings.threshold } else { 0 },
        "keep_ratio": if is_on { settings.keep.of(settings.threshold) } else { 0.0 },
        "keep_by_session": settings.keep_by_session,
        "aged_messages": is_on && settings.ages,
        "drafter_gguf": path.filter(|_| shows_paths),
        "scores_itself": is_on && path.is_none(),
        "device": compressor.map(|compressor| &compressor.scorer().device),
        "exit_layer": compressor.map(|compressor| compressor.scorer().exit_layer),
        "max_tokens": compressor.map(|compressor| compressor.scorer().max_tokens),
        "skip_park": is_on,
        "bsa_enabled": is_on && alpha > 0.0,
        "bsa_alpha": if is_on { alpha } else { 0.0 },
        "lm_head_fix": false,
        "draft_residency": "persistent",
    })
}

/// Caches, under the keys of other servers.
fn caches(handle: &ModelHandle, prefix: &PrefixStats) -> Value {
    let store = handle.store.as_ref();
    let warmup = json!({
        "most_tokens": handle.prefix.warmup_tokens,
        "tokens": prefix.warmup_tokens,
        "saved": prefix.warmup_saved,
        "hits": prefix.warmup_hits,
    });
    json!({
        "prefix_cache": {
            "capacity": handle.prefix.max_entries,
            "in_use": prefix.entries,
            "lifetime_hits": prefix.hits,
            "lookups": prefix.lookups,
            "cached_tokens": prefix.cached_tokens,
            "bytes": prefix.bytes,
            "capacity_bytes": handle.prefix.bytes,
            "evicted": prefix.evicted,
            "failed": prefix.failed,
            "prefix_warmup": warmup,
            // The key of version 0.1.
            "read_ahead": warmup,
        },
        "full_cache": {
            "enabled": store.is_some(),
            "capacity_bytes": store.map_or(0, |store| store.budget),
            "stored": prefix.stored,
            "lifetime_hits": prefix.store_hits,
            "disk_policy": if store.is_some() { "full" } else { "off" },
            "trouble": store.and_then(StoreStatus::failure),
            "capacity": 0, "in_use": 0, "disk_bytes": 0,
        },
        "tool_replay": {
            "max_entries": 0, "max_bytes": 0, "current_entries": 0, "current_bytes": 0,
        },
    })
}

/// Text of the first of `ids`.
fn special(tokenizer: &Tokenizer, ids: &[TokenId]) -> Option<String> {
    ids.first().map(|id| tokenizer.decode(&[*id]))
}
