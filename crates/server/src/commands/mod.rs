//! The commands, one per file. Each combines functions of the other crates.
//!
//! Results go to standard output, everything else to standard error.

mod bench;
mod caching;
mod compressing;
mod connect;
mod crash;
mod doctor;
mod documents;
mod draft_sources;
mod eval;
mod eval_draft;
mod generate;
mod hosting;
mod http_client;
mod imatrix;
mod inspect;
mod kernel_targets;
mod kernels;
mod kernels_cost;
mod kernels_explain;
mod listening;
mod markdown;
mod missing_draft;
mod new_file;
mod npy;
mod probe;
mod pull;
mod quantize;
mod reload;
mod request_spans;
mod requested_pulls;
mod run;
mod running_models;
mod serve;
mod serving_plan;
mod session_folder;
mod shape;
mod show;
mod spill_record;
mod supervisor;
mod synth;
mod terminal;
mod tokenize;
mod tree;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use gguf::{OnTruncation, TRUNCATED_EXIT};
use request_spans::RequestSpans;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::{Cli, Command, ConfigCommand, LogFormat};
use crate::config::{self, ConfigError};
use crate::error::ServeError;
use crate::open::bundled::Bundled;
use crate::progress::LogWriter;

/// The text side of a tiny model with random weights.
#[cfg(test)]
pub(crate) fn tiny_model() -> crate::text::model_context::ModelContext {
    let defaults = crate::settings::GenerationDefaults::default();
    crate::open::text_side(&crate::open::tiny(), None, None, defaults)
        .expect("a tiny model has a vocabulary")
}

/// Exit status after a second interrupt, as shells report a process that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// Runs the command line of this process; `bundled` is the model of commands without a file.
pub fn main(bundled: Bundled) -> ExitCode {
    crash::describe_panics();
    let parsed = match config::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(ConfigError::Usage(usage)) => {
            // A closed standard error leaves nowhere to report to.
            let _ = usage.print();
            return ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(1));
        }
        Err(error) => return fail(&error.into()),
    };
    let cli = parsed.cli;
    let spans = request_spans(&cli.command).and_then(|spans| {
        start_logging(&cli, spans.as_ref())?;
        Ok(spans)
    });
    // The last spans are sent when it is dropped.
    let _spans = match spans {
        Ok(spans) => spans,
        Err(error) => return fail(&error),
    };
    for variable in &parsed.unknown_variables {
        tracing::warn!("{variable}");
    }
    if cli.offline {
        config::hub::set_offline();
    }
    gguf::watch_truncation(OnTruncation::EndProcess);
    let result = match cli.command {
        Command::Serve(args) => serve::serve(*args, &parsed.settings, bundled),
        Command::Config(ConfigCommand::Show(args)) => show::show(&args, parsed.settings, bundled),
        Command::Doctor(args) => doctor::doctor(&args, bundled),
        Command::Connect(args) => connect::connect(&args),
        Command::Launch(args) => connect::launch(&args),
        Command::Completions(args) => documents::completions(&args),
        Command::Man(args) => documents::man(&args),
        Command::Probe(args) => probe::probe(&args),
        Command::Run(args) => run::run(args, bundled, cli.no_color),
        Command::Pull(args) => pull::pull(&args),
        Command::List(args) => pull::list(&args),
        Command::Rm(args) => pull::rm(&args),
        Command::Ps(args) => running_models::ps(&args),
        Command::Stop(args) => running_models::stop(&args),
        Command::Inspect(args) => inspect::inspect(args),
        Command::Tree(args) => tree::tree(&args),
        Command::Quantize(args) => quantize::quantize(&args),
        Command::Imatrix(args) => imatrix::imatrix(&args),
        Command::Synth(args) => synth::synth(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Tokenize(args) => tokenize::tokenize(&args),
        Command::Kernels(args) => kernels::kernels(&args),
        Command::Bench(args) => bench::bench(&args, bundled),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output closed the pipe, as in `hearth inspect … | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => match error.downcast_ref() {
            Some(ServeError::Forced) => {
                fail(&error);
                ExitCode::from(INTERRUPTED)
            }
            _ if gguf::truncated_file().is_some() => {
                fail(&error);
                ExitCode::from(TRUNCATED_EXIT)
            }
            _ => fail(&error),
        },
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    let mut err = std::io::stderr().lock();
    // A closed standard error leaves nowhere to report to.
    let _ = writeln!(err, "error: {}", all_causes(error));
    ExitCode::FAILURE
}

/// An error and its causes in one line, without causes that the text already contains.
fn all_causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
    })
}

/// Sends logs to standard error, because standard output is for results only, and spans to their
/// collector.
fn start_logging(cli: &Cli, spans: Option<&RequestSpans>) -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(&cli.log)
        .map_err(|error| anyhow::anyhow!("--log {}: {error}", cli.log))?;
    let (filter, handle) = tracing_subscriber::reload::Layer::new(filter);
    reload::set_log_handle(move |filter| handle.reload(filter).is_ok());
    let colours = std::io::stderr().is_terminal() && !cli.no_color;
    let logs = tracing_subscriber::fmt::layer()
        .with_writer(|| LogWriter)
        .with_ansi(colours);
    let logs = match cli.log_format {
        LogFormat::Text => logs.with_target(false).boxed(),
        LogFormat::Json => logs.json().boxed(),
    };
    tracing_subscriber::registry()
        .with(logs.with_filter(filter))
        .with(spans.map(RequestSpans::layer))
        .init();
    Ok(())
}

/// The collector of a server's spans, if its flags name one.
fn request_spans(command: &Command) -> anyhow::Result<Option<RequestSpans>> {
    match command {
        Command::Serve(args) => {
            let endpoint = args.otlp_endpoint.as_deref().filter(|url| !url.is_empty());
            endpoint.map(RequestSpans::to_collector).transpose()
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn repeated_cause_is_printed_once() {
        let io = || std::io::Error::other("no such file");
        let twice = Err::<(), _>(io())
            .context("a.gguf: no such file")
            .unwrap_err();
        assert_eq!(all_causes(&twice), "a.gguf: no such file");
        let once = Err::<(), _>(io())
            .context("a.gguf")
            .context("loading")
            .unwrap_err();
        assert_eq!(all_causes(&once), "loading: a.gguf: no such file");
    }
}
