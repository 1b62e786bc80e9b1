//! `hearth doctor`: what would stop `hearth serve` with the same flags, or make it slow.
//!
//! Nothing is changed, downloaded or sent beyond this machine.

mod finding;
mod folders;
mod gpu;
pub(super) mod machine;
mod models;
mod network;
mod service;

use std::io::Write;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::cli::DoctorArgs;
use crate::config::surroundings;
use crate::open;
use crate::open::bundled::Bundled;
use finding::{Finding, Severity};
use machine::Machine;

pub(super) fn doctor(args: &DoctorArgs, bundled: Bundled) -> anyhow::Result<()> {
    let serve = &args.serve;
    let choice = open::choice(&serve.device)?;
    let machine = Machine::read(&choice.gpu.compile.nvrtc);
    let surroundings = surroundings::of_process();
    let mut findings = gpu::findings(&machine, &choice, &surroundings);
    findings.extend(folders::findings(serve, &choice));
    findings.extend(network::findings(serve, &surroundings));
    findings.extend(service::findings());
    findings.extend(models::findings(serve, bundled));
    let mut out = std::io::stdout().lock();
    let problems = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Problem)
        .count();
    if args.json {
        let head: serde_json::Map<String, Value> = machine
            .lines()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        let findings: Vec<Value> = findings.iter().map(Finding::json).collect();
        let report = json!({"machine": head, "findings": findings, "can_serve": problems == 0});
        let text = serde_json::to_string_pretty(&report).context("cannot format the report")?;
        writeln!(out, "{text}")?;
    } else {
        writeln!(out, "{}", machine.text())?;
        for finding in &findings {
            write!(out, "{}", finding.text())?;
        }
        writeln!(out, "\n{}", summary(&findings))?;
    }
    match problems {
        0 => Ok(()),
        1 => bail!("1 problem stops serving"),
        _ => bail!("{problems} problems stop serving"),
    }
}

fn summary(findings: &[Finding]) -> String {
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let warnings = match count(Severity::Warning) {
        0 => "no warnings".to_owned(),
        1 => "1 warning".to_owned(),
        n => format!("{n} warnings"),
    };
    match count(Severity::Problem) {
        0 => format!("nothing stops serving; {warnings}"),
        n => format!("problems: {n}; {warnings}"),
    }
}
