//! `hearth serve`: opens the port, starts the engine thread that loads the model, and handles
//! signals.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use contract::Limits;
use decode::{SchedulerConfig, SpeculationConfig};
use gguf::{GgufFile, OnTruncation};
use model::DraftFile;
use tokio::net::TcpListener;

use crate::cli::ServeArgs;
use crate::commands::hosting::{self, ModelEntry};
use crate::commands::listening::Port;
use crate::commands::requested_pulls::RequestedPulls;
use crate::commands::serving_plan::{self, FittedModel};
use crate::commands::session_folder::SessionFolder;
use crate::commands::{all_causes, listening, missing_draft, reload, supervisor};
use crate::commands::{caching, compressing};
use crate::config::card::{self, FoundCard, GenerationFlags};
use crate::config::server::{is_on, model_path, server_config};
use crate::config::{self, ResolvedSetting};
use crate::engine::handle::EngineHandle;
use crate::engine::{BoxError, Engine, EngineFactory, EnginePhase, Loaded};
use crate::error::ServeError;
use crate::http::serve::serve_models;
use crate::http::shutdown::ShutdownSignal;
use crate::kept_responses::ResponseStore;
use crate::models::{self, HostPolicy, HostedModel};
use crate::open;
use crate::open::bundled::{BUNDLED_NOTE, Bundled};
use crate::open::by_name::{self, Header};
use crate::open::drafting::{Drafting, OpenedModel, clock};
use crate::open::measured::MeasuredOnce;
use crate::open::model_path::{check_draft, check_model};
use crate::progress::percent;
use crate::scripted::{Script, ScriptedRunner, WARNING};
use crate::settings::{GenerationDefaults, ServerConfig};
use crate::text::model_context::ModelContext;

/// The most tokio workers; HTTP work is light, and the device needs the cores.
const MAX_WORKERS: usize = 4;
/// Context of scripted replies, which take no memory: longer than any client's prompt.
const SCRIPT_CONTEXT: usize = 262_144;
/// Prefill chunk of scripted replies, in tokens.
const SCRIPT_CHUNK: usize = 2048;
/// Interval of loading reports to the service manager.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of looks at a download.
const PULL_CHECK: Duration = Duration::from_millis(50);

pub(super) fn serve(
    mut args: ServeArgs,
    settings: &[ResolvedSetting],
    bundled: Bundled,
) -> anyhow::Result<()> {
    // Wrong settings are reported before a download.
    server_config(&args)?;
    compressing::settings(&args.compression)?;
    let _header = resolve_names(&mut args)?;
    let config = server_config(&args)?;
    check_files(&args)?;
    let entries = hosting::entries(&args)?;
    if args.dry_run {
        return dry_run(&args, bundled);
    }
    // The engine ends requests with an error; only then does the process end.
    gguf::watch_truncation(OnTruncation::ReadZeros);
    config::log(settings);
    if args.window.attention_window > 0 {
        tracing::warn!(
            "--attention-window {}: attention masks older tokens, so replies may ignore the system prompt{}",
            args.window.attention_window,
            if args.window.attention_window_force {
                " and tools"
            } else {
                "; requests with tools are exempt"
            }
        );
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.clamp(2, MAX_WORKERS))
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let served = runtime.block_on(listen_and_serve(args, config, entries, bundled));
    // A second signal must not wait for anything.
    runtime.shutdown_background();
    served
}

/// Replaces the names of models by files, which are downloaded where they are not in the cache.
/// With --dry-run only the model's header is read, and the file lasts as long as the result.
fn resolve_names(args: &mut ServeArgs) -> anyhow::Result<Option<Header>> {
    let last: Mutex<Option<Instant>> = Mutex::new(None);
    let report = |percent| {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= STATUS_INTERVAL) {
            *last = Some(Instant::now());
            supervisor::downloading(percent);
        }
    };
    let ServeArgs {
        model, model_flag, ..
    } = args;
    let mut header = None;
    for path in [model, model_flag].into_iter().flatten() {
        if args.dry_run {
            let found = by_name::header(path)?;
            path.clone_from(&found.path);
            header = Some(found);
        } else {
            *path = by_name::pulled(path, &report)?;
        }
    }
    let further = [&mut args.draft.draft, &mut args.compression.prefill_drafter];
    for path in further.into_iter().flatten() {
        *path = if args.dry_run {
            by_name::in_cache(path)
        } else {
            by_name::pulled(path, &report)?
        };
    }
    Ok(header)
}

/// Opens the files of the flags, so that a wrong one is reported before the port is open.
fn check_files(args: &ServeArgs) -> anyhow::Result<()> {
    if let Some(path) = model_path(args) {
        check_model(path)?;
        GgufFile::open(path)?;
    }
    if let Some(draft) = &args.draft.draft {
        check_draft(draft).context("--draft")?;
        DraftFile::open(draft).context("--draft")?;
    }
    if let Some(scorer) = &args.compression.prefill_drafter {
        check_model(scorer).context("--prefill-drafter")?;
        GgufFile::open(scorer).context("--prefill-drafter")?;
    }
    if let Some(file) = &args.chat_template_file {
        config::read_text("--chat-template-file", file)?;
    }
    if let Some(file) = &args.script {
        config::read_text("--script", file)?;
    }
    Ok(())
}

async fn listen_and_serve(
    args: ServeArgs,
    mut config: ServerConfig,
    entries: Option<Vec<ModelEntry>>,
    bundled: Bundled,
) -> anyhow::Result<()> {
    let settings = &args.listen.responses;
    if let Some(folder) = &settings.responses_dir {
        let (memory, budget) = (
            settings.responses_memory << 20,
            settings.responses_budget << 20,
        );
        config.responses = ResponseStore::with_folder(memory, folder, budget)
            .with_context(|| format!("--responses-dir {}", folder.display()))?;
    }
    reload::on_hangup(&mut config).context("cannot listen for signals")?;
    let stop = ShutdownSignal::on_signals().context("cannot listen for signals")?;
    let Port {
        listener,
        is_passed,
    } = listening::listen(&config).await?;
    let address = listener.local_addr().context("cannot read the port")?;
    let url = format!("http://{address}/v1");
    if !address.ip().is_loopback() && config.api_keys.is_empty() {
        tracing::warn!(
            "listening on {address} without --api-key: anyone who can reach this address can use the model"
        );
    }
    let pulled = RequestedPulls::default();
    config.pulls = pulled.policy(address, !config.api_keys.is_empty());
    if let Some(entries) = entries {
        let several = SeveralModels { entries, pulled };
        return serve_several(args, config, several, bundled, (listener, stop, url)).await;
    }
    tracing::info!("listening on http://{address}; loading");
    let load = factory(args, bundled, MeasuredOnce::default());
    let (engine, handle) = Engine::start(load, config.queue_limit)?;
    let stall = config.timeouts.stall;
    tokio::spawn(announce(handle.clone(), url));
    let watched = handle.clone();
    tokio::spawn(supervisor::feed_watchdog(move || watched.step_age(), stall));
    let announced = tokio::spawn(announce_stop(stop.clone()));
    if is_passed {
        // Connections wait in the socket's queue until the model is loaded or the load has failed.
        tokio::select! {
            _ = handle.wait_for(|phase| *phase != EnginePhase::Loading) => {}
            () = stop.requested(1) => {}
        }
    }
    let served = crate::serve_with(config, handle.clone(), listener, stop.clone()).await;
    let forced = matches!(served, Err(ServeError::Forced));
    // An idle server may stop before the task runs, so the task is awaited; a second signal skips
    // that.
    if stop.is_requested() && !forced {
        announced
            .await
            .context("the task that announces the stop failed")?;
    }
    // A load cannot be interrupted and a second signal must not wait: then the process's exit ends
    // the thread.
    if handle.phase() != EnginePhase::Loading && !forced {
        handle.drain(Duration::ZERO);
        let joined = tokio::task::spawn_blocking(move || engine.join()).await;
        joined.context("the engine thread cannot be joined")?;
    }
    served?;
    tracing::info!("stopped");
    Ok(())
}

/// The models of a server that has several.
struct SeveralModels {
    /// Those of the flags.
    entries: Vec<ModelEntry>,
    /// Those that clients have had pulled.
    pulled: RequestedPulls,
}

/// Serves several models, which are loaded when requests name them. The model that the command line
/// names is loaded at once.
async fn serve_several(
    mut args: ServeArgs,
    mut config: ServerConfig,
    several: SeveralModels,
    bundled: Bundled,
    (listener, stop, url): (TcpListener, ShutdownSignal, String),
) -> anyhow::Result<()> {
    let SeveralModels { entries, pulled } = several;
    let sessions = if args.cache.kv_cache_dir.is_none() && args.cache.prefix_cache_entries > 0 {
        Some(SessionFolder::make()?)
    } else {
        None
    };
    if let Some(folder) = &sessions {
        args.cache.kv_cache_dir = Some(folder.states());
    }
    let policy = HostPolicy {
        max_loaded: args.hosting.models_max,
        idle: hosting::idle(&args)?,
        queue_limit: config.queue_limit,
    };
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    tracing::info!("models: {}", names.join(", "));
    config.model_name.clone_from(&entries[0].name);
    let loads_first = entries[0].is_main;
    let hosted = {
        let (args, url) = (args.clone(), url.clone());
        move |entry| hosted(&args, entry, bundled, &url)
    };
    let host = models::open(entries.into_iter().map(&hosted).collect(), policy);
    host.find_new_by(Arc::new(move || match hosting::entries(&args) {
        Ok(entries) => {
            let entries = entries.into_iter().flatten();
            entries.chain(pulled.entries()).map(&hosted).collect()
        }
        Err(error) => {
            tracing::warn!("{}", all_causes(&error));
            Vec::new()
        }
    }));
    if loads_first {
        let host = host.clone();
        // A failed load is logged, and stands in the list of models.
        tokio::spawn(async move { drop(host.acquire(0).await) });
    }
    let (watched, stall) = (host.clone(), config.timeouts.stall);
    tokio::spawn(supervisor::feed_watchdog(move || watched.step_age(), stall));
    tracing::info!("ready: serving at {url}; models are loaded when requests name them");
    supervisor::ready(&url);
    tokio::spawn(announce_stop(stop.clone()));
    serve_models(config, host, listener, stop).await?;
    // All states are written, so nothing is written into the folder any more.
    drop(sessions);
    tracing::info!("stopped");
    Ok(())
}

/// A model of a server that has several.
fn hosted(args: &ServeArgs, entry: ModelEntry, bundled: Bundled, url: &str) -> HostedModel {
    let own = hosting::args_of(args, &entry);
    let (for_fit, url, measured) = (own.clone(), url.to_owned(), MeasuredOnce::default());
    HostedModel {
        name: entry.name,
        open: Box::new(move || {
            pulling_factory(own.clone(), bundled, measured.clone(), url.clone())
        }),
        fits: Arc::new(move || hosting::fits(&for_fit)),
    }
}

/// Logs and notifies the service manager once the model is ready.
async fn announce(handle: EngineHandle, url: String) {
    if handle
        .wait_for(|phase| *phase != EnginePhase::Loading)
        .await
        == EnginePhase::Ready
    {
        tracing::info!("ready: serving at {url}");
        supervisor::ready(&url);
    }
}

async fn announce_stop(stop: ShutdownSignal) {
    stop.requested(1).await;
    supervisor::stopping();
}

/// The function that loads the model on the engine thread. `measured` is shared by its loads.
fn factory(args: ServeArgs, bundled: Bundled, measured: MeasuredOnce) -> EngineFactory {
    Box::new(move |progress| {
        let mut last: Option<Instant> = None;
        let mut report = |at: contract::LoadProgress| {
            progress(at);
            if last.is_none_or(|last: Instant| last.elapsed() >= STATUS_INTERVAL) {
                last = Some(Instant::now());
                supervisor::loading(percent(at.done_bytes, at.total_bytes));
            }
        };
        let loaded = load(&args, bundled, &mut report, &measured);
        loaded.map_err(|error| BoxError::from(all_causes(&error)))
    })
}

/// As [`factory`], of one of several models: it is pulled first if its name is not in the cache,
/// and the server at `url` goes on serving when its load has ended.
fn pulling_factory(
    mut args: ServeArgs,
    bundled: Bundled,
    measured: MeasuredOnce,
    url: String,
) -> EngineFactory {
    Box::new(move |progress| {
        let mut load = || {
            if let Some(model) = &mut args.model {
                let pulled = pulled_with_progress(model, progress);
                *model = pulled.map_err(|error| BoxError::from(all_causes(&error)))?;
            }
            factory(args.clone(), bundled, measured.clone())(progress)
        };
        let loaded = load();
        supervisor::serving(&url);
        loaded
    })
}

/// The file of a name. Its download is shown as the progress of the load, in percent.
fn pulled_with_progress(
    model: &Path,
    progress: &mut dyn FnMut(contract::LoadProgress),
) -> anyhow::Result<PathBuf> {
    let percent = AtomicU64::new(0);
    thread::scope(|scope| {
        let report = |now| percent.store(now, Ordering::Relaxed);
        let pull = scope.spawn(move || by_name::pulled(model, &report));
        while !pull.is_finished() {
            thread::sleep(PULL_CHECK);
            let done_bytes = percent.load(Ordering::Relaxed);
            progress(contract::LoadProgress {
                done_bytes,
                total_bytes: 100,
            });
            supervisor::downloading(done_bytes);
        }
        match pull.join() {
            Ok(pulled) => pulled,
            Err(_) => bail!("{}: the download panicked", model.display()),
        }
    })
}

fn load(
    args: &ServeArgs,
    bundled: Bundled,
    progress: &mut dyn FnMut(contract::LoadProgress),
    measured: &MeasuredOnce,
) -> anyhow::Result<Loaded> {
    let path = model_path(args).map(|path| path.as_path());
    let loaded = open::load_or(path, bundled)?;
    if path.is_none() && args.script.is_none() {
        tracing::warn!("{BUNDLED_NOTE}");
    }
    let (found, defaults, settings) = generation(args, &loaded);
    tracing::info!("model card: {}", found.place);
    config::log(&settings);
    let template = args.chat_template_file.as_deref();
    let mut model = open::text_side(&loaded, path, template, defaults)?;
    model.description.card = Some(found.description());
    model.description.lazy_draft = args.draft.lazy_draft;
    model.description.draft_path = args
        .draft
        .draft
        .as_ref()
        .map(|path| path.display().to_string());
    if let Some(file) = &args.script {
        return scripted(args, file, &loaded, model);
    }
    let planned = serving_plan::fit(args, &loaded, bundled)?;
    for line in planned.lines(&loaded) {
        tracing::info!("{line}");
    }
    if let Some(yields) = planned.yields() {
        tracing::warn!("{yields}");
    }
    let backend = serving_plan::device(args, planned.scorer_bytes())?;
    let FittedModel {
        fitted,
        drafting,
        scorer,
    } = planned;
    if !args.draft.no_speculation {
        let name = &loaded.spec.name;
        if let Some(line) = missing_draft::line(&found.card, name, &drafting) {
            tracing::info!("{line}");
        }
    }
    model.description.kv_choice = Some(fitted.why.clone());
    let prefill_chunk = fitted.config.limits.prefill_chunk;
    let prefix = caching::prefix(&args.cache, &model)?;
    // An unusable folder is refused before the model loads.
    drop(caching::store(&args.cache, &fitted.config, &fitted.device)?);
    let OpenedModel {
        mut runner,
        speculation,
        config,
    } = drafting.open(backend.as_ref(), fitted.config, progress, measured)?;
    // States depend on the drafts that were opened.
    let store = caching::store(&args.cache, &config, &fitted.device)?;
    tracing::info!("{}", caching::line(&prefix, store.as_ref()));
    model.description.draft_sources = speculation.active_sources(runner.info());
    if let Some((scorer, place)) = scorer {
        model.compressor = Some(compressing::open(args, &loaded, (scorer, &place))?);
    }
    if prefix.max_entries > 0 {
        caching::warm(&mut *runner, prefix.location)?;
    }
    let scheduler = SchedulerConfig {
        prefix,
        ..scheduler(args, &model, prefill_chunk, speculation)
    };
    Ok(Loaded {
        runner,
        scheduler,
        model,
        store,
    })
}

/// Defaults of requests: the model's card, its values overridden by the flags, and each value's
/// origin.
pub(super) fn generation(
    args: &ServeArgs,
    loaded: &model::LoadedModel,
) -> (FoundCard, GenerationDefaults, Vec<ResolvedSetting>) {
    let info = &loaded.info;
    let found = card::find(info, args.model_cards_dir.as_deref());
    let flags = GenerationFlags {
        max_tokens: args.reasoning.answer_tokens(),
        thinking: args.reasoning.thinking_default.map(is_on),
        reasoning: args.reasoning.flags(),
        sampling: args.sampling.flags(),
    };
    let by_file = &loaded.card.sampling;
    let (defaults, settings) = card::generation_defaults(flags, &found, by_file);
    (found, defaults, settings)
}

fn scheduler(
    args: &ServeArgs,
    model: &ModelContext,
    prefill_chunk: usize,
    speculation: SpeculationConfig,
) -> SchedulerConfig {
    SchedulerConfig {
        max_sequences: args.max_sequences,
        // The server bounds the queue with its own permits.
        queue_limit: usize::MAX,
        reserve: args.kv_reserve,
        prefill_chunk,
        eos: model.eos.clone(),
        speculation,
        clock: Some(clock),
        ..SchedulerConfig::default()
    }
}

/// The model's text side with a script instead of a device.
fn scripted(
    args: &ServeArgs,
    file: &Path,
    loaded: &model::LoadedModel,
    model: ModelContext,
) -> anyhow::Result<Loaded> {
    let script = Script::parse(&config::read_text("--script", file)?)
        .with_context(|| format!("--script {}", file.display()))?;
    tracing::warn!(
        "{WARNING} (--script {}, {} replies)",
        file.display(),
        script.replies()
    );
    let drafting = Drafting::none();
    let limits = Limits {
        sequences: args.max_sequences,
        context: args.device.max_ctx.unwrap_or(SCRIPT_CONTEXT),
        tree_nodes: drafting.tree_nodes(),
        prefill_chunk: SCRIPT_CHUNK,
        pool_tokens: None,
    };
    let tokenizer = Arc::clone(&model.tokenizer);
    let runner = ScriptedRunner::new(script, tokenizer, &loaded.spec, limits);
    Ok(Loaded {
        runner: Box::new(runner),
        scheduler: scheduler(args, &model, SCRIPT_CHUNK, drafting.speculation),
        model,
        store: None,
    })
}

/// Prints the memory plan and starts nothing.
fn dry_run(args: &ServeArgs, bundled: Bundled) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in serving_plan::plan(args, bundled)? {
        writeln!(out, "{line}")?;
    }
    Ok(())
}
