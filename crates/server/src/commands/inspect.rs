//! `hearth inspect`: the contents of a file and the memory to run it.

use std::collections::BTreeMap;
use std::io::Write;

use gguf::GgufFile;
use serde_json::{Map, Value, json};

use crate::cli::InspectArgs;
use crate::commands::draft_sources::BlockDraft;
use crate::commands::{all_causes, compressing, draft_sources, shape};
use crate::open::by_name;
use crate::open::drafting::{Drafting, draft_config};
use crate::open::fit_scoring::{ScorerFit, fit_scoring};
use crate::open::known_model::KnownModel;
use crate::open::memory_plan;
use crate::open::model_path::check_model;
use crate::open::placement;
use crate::open::{self, FittedConfig, MemoryRequest, count_text};
use crate::progress::bytes_text;

pub(super) fn inspect(mut args: InspectArgs) -> anyhow::Result<()> {
    args.draft = args.draft.as_deref().map(by_name::in_cache);
    let found = by_name::header(&args.file).and_then(|header| {
        check_model(&header.path)?;
        Ok(header)
    });
    let header = match found {
        Ok(header) => header,
        Err(error) => {
            let known = KnownModel::instead(&args.file, &error).filter(|_| args.plan.plan);
            return known.map_or_else(|| Err(error), |known| plan_by_name(&args, &known));
        }
    };
    args.file.clone_from(&header.path);
    let args = &args;
    let file = GgufFile::open(&args.file)?;
    let mut report = Report::default();
    report.file(&file, args);
    // A file that cannot run is still shown; the error follows the report.
    let model = open::load(&args.file);
    let error = match model {
        Ok(loaded) => {
            report.section("model", shape::of(&loaded.spec));
            report.section("vocabulary", shape::of_vocabulary(&loaded.vocab));
            report.plan(&loaded, args)?
        }
        // A draft model does not run alone, but its file is shown.
        Err(error) => match model::DraftFile::open(&args.file) {
            Ok(draft) => {
                report.section("draft", shape::of_draft(&draft));
                None
            }
            Err(_) => Some(error),
        },
    };
    if args.tensors {
        report.tensors(&file);
    }
    if args.metadata {
        report.metadata(&file);
    }
    report.print(args.json)?;
    error.map_or(Ok(()), Err)
}

/// The plan of a model that is known by name, where its file cannot be read.
fn plan_by_name(args: &InspectArgs, known: &KnownModel) -> anyhow::Result<()> {
    tracing::warn!(
        "{} is not here and the hub is not asked or does not answer; this is the plan of the published shape {}",
        args.file.display(),
        known.what
    );
    let loaded = known.spec.load()?;
    let mut report = Report::default();
    report.section("model", shape::of(&loaded.spec));
    let error = report.plan(&loaded, args)?;
    report.print(args.json)?;
    error.map_or(Ok(()), Err)
}

/// The same facts as text for people and as JSON for programs.
#[derive(Default)]
struct Report {
    text: String,
    json: Map<String, Value>,
}

/// Totals of the tensors of one type.
#[derive(Default, Clone, Copy)]
struct TypeTotals {
    tensors: usize,
    values: u64,
    bytes: u64,
}

impl Report {
    /// Prints the facts as JSON or as text.
    fn print(self, json: bool) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        if json {
            writeln!(out, "{}", Value::Object(self.json))?;
        } else {
            out.write_all(self.text.as_bytes())?;
        }
        Ok(())
    }

    fn line(&mut self, name: &str, value: &str) {
        self.text.push_str(&format!("{name:<22}{value}\n"));
    }

    fn title(&mut self, name: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(&format!("{name}\n"));
    }

    /// Adds a titled list of facts.
    fn section(&mut self, name: &str, facts: Vec<shape::Fact>) {
        self.title(&name.replace('_', " "));
        let mut map = Map::new();
        for fact in facts {
            self.line(&format!("  {}", fact.key.replace('_', " ")), &fact.shown);
            map.insert(fact.key.to_owned(), fact.value);
        }
        self.json.insert(name.to_owned(), Value::Object(map));
    }

    fn file(&mut self, file: &GgufFile, args: &InspectArgs) {
        let text = |key: &str| match file.meta().get(key) {
            Some(gguf::Value::String(text)) => text.shown().into_owned(),
            _ => String::new(),
        };
        let mut totals: BTreeMap<String, TypeTotals> = BTreeMap::new();
        let mut all = TypeTotals::default();
        for tensor in file.tensors() {
            let bytes = tensor.n_bytes().unwrap_or(0) as u64;
            for total in [totals.entry(tensor.ty().to_string()).or_default(), &mut all] {
                total.tensors += 1;
                total.values += tensor.values();
                total.bytes += bytes;
            }
        }
        let bits = all.bytes as f64 * 8.0 / all.values.max(1) as f64;
        self.section(
            "file",
            vec![
                shape::fact("path", args.file.display().to_string()),
                shape::fact("gguf_version", file.version()),
                shape::fact("parts", file.n_parts()),
                shape::shown("bytes", file.size_bytes(), bytes_text(file.size_bytes())),
                shape::fact("name", text("general.name")),
                shape::fact("architecture", text("general.architecture")),
                shape::fact("tensors", all.tensors),
                shape::shown("weights", all.values, count_text(all.values)),
                shape::shown("bits_per_weight", json!(bits), format!("{bits:.2}")),
            ],
        );
        self.title("tensors by type");
        let mut types = Map::new();
        let mut rows: Vec<(String, TypeTotals)> = totals.into_iter().collect();
        rows.sort_by_key(|(_, total)| std::cmp::Reverse(total.bytes));
        for (ty, total) in rows {
            let TypeTotals {
                tensors,
                values,
                bytes,
            } = total;
            self.text.push_str(&format!(
                "  {ty:<20}{tensors:>6}  {:>12}\n",
                bytes_text(bytes)
            ));
            types.insert(
                ty,
                json!({ "tensors": tensors, "values": values, "bytes": bytes }),
            );
        }
        self.json.insert("types".to_owned(), Value::Object(types));
    }

    /// The memory plan, and which draft sources fit. Returns why the draft of `--draft` does not.
    fn plan(
        &mut self,
        loaded: &model::LoadedModel,
        args: &InspectArgs,
    ) -> anyhow::Result<Option<anyhow::Error>> {
        let mut drafting = Drafting::none();
        drafting.mtp = loaded.spec.mtp.is_some() && args.draft.is_none();
        let mut block = BlockDraft::None;
        if let Some(path) = &args.draft {
            let draft = model::DraftFile::open(path)?;
            self.section("draft", shape::of_draft(&draft));
            block = match draft.fit(&loaded.spec, model::DraftOptions::default()) {
                Ok(found) => {
                    let config = draft_config(found, args.device.cpu_reference, false);
                    BlockDraft::Fits(draft.metadata.kind, config)
                }
                Err(error) => BlockDraft::Refused(error.into()),
            };
        }
        if let BlockDraft::Fits(_, config) = &block {
            drafting.config = Some(config.clone());
        }
        let request = MemoryRequest {
            sequences: args.max_sequences,
            context: None,
            tree_nodes: drafting.tree_nodes(),
        };
        let scorer = args.plan.prefill_drafter.as_deref();
        let scorer = scorer.map(compressing::scorer_of).transpose()?;
        let device = |scorer_bytes| memory_plan::device(args, scorer_bytes);
        let (fitted, place) = match &scorer {
            Some((_, config)) => {
                let with = (request, &mut drafting);
                let found = fit_scoring(&device, loaded, &args.device, with, (Some(config), None));
                found.map_or_else(
                    |error| (Err(error), None),
                    |(fitted, place)| (Ok(fitted), place),
                )
            }
            None => {
                let with = (request, &drafting);
                let backend = device(0)?;
                let fitted = open::fit_with_draft(backend.as_ref(), loaded, &args.device, with);
                (fitted, None)
            }
        };
        let scorer_bytes = place.as_ref().map_or(0, ScorerFit::device_bytes);
        let backend = device(scorer_bytes)?;
        if args.plan.plan {
            let with = (&drafting, scorer_bytes);
            let (text, json) = memory_plan::table(backend.as_ref(), loaded, args, with)?;
            self.text.push_str(&text);
            self.json.insert("memory".to_owned(), json);
        }
        if let (Some((name, _)), Some(place)) = (&scorer, &place) {
            let mut facts = vec![
                shape::fact("memory", place.line(name)),
                shape::fact("longest_prompt", place.max_tokens),
                shape::fact("device_bytes", place.device_bytes()),
            ];
            facts.extend(
                place
                    .yields
                    .as_deref()
                    .map(|text| shape::fact("yields", text)),
            );
            self.section("scorer", facts);
        }
        let FittedConfig {
            config,
            memory,
            placement,
            device,
            usable,
            why,
        } = match fitted {
            Ok(fitted) => fitted,
            Err(error) => {
                let why = all_causes(&error);
                // The sources are still named, for the limits without the draft.
                drafting.config = None;
                let with = (request, &drafting);
                if let Ok(fitted) =
                    open::fit_with_draft(backend.as_ref(), loaded, &args.device, with)
                {
                    let config = &fitted.config;
                    let sources = draft_sources::facts(backend.as_ref(), loaded, config, &block);
                    self.section("draft_sources", sources);
                }
                self.section("plan", vec![shape::fact("does_not_fit", why)]);
                return Ok(block.refusal());
            }
        };
        let sources = draft_sources::facts(backend.as_ref(), loaded, &config, &block);
        self.section("draft_sources", sources);
        let bytes = |key: &'static str, bytes: u64| shape::shown(key, bytes, bytes_text(bytes));
        self.section(
            "plan",
            vec![
                shape::fact("device", format!("{}: {}", device.id, device.name)),
                shape::fact("features", device.features.join(", ")),
                bytes("free_bytes", device.free_bytes),
                bytes("headroom_bytes", usable.headroom),
                shape::fact("context", config.limits.context),
                shape::fact("sequences", config.limits.sequences),
                shape::fact("pool_tokens", config.limits.clamped_pool_tokens()),
                shape::fact("keys", config.kv.k.name()),
                shape::fact("values", config.kv.v.name()),
                shape::fact("why", why),
                bytes("weights_bytes", memory.weights_bytes),
                bytes("mapped_bytes", memory.mapped_bytes),
                bytes("cache_bytes", memory.kv_bytes),
                bytes("state_bytes", memory.state_bytes),
                bytes("scratch_bytes", memory.scratch_bytes),
                bytes("draft_bytes", memory.draft_bytes),
                bytes("driver_bytes", memory.driver_bytes),
                bytes("pinned_bytes", memory.pinned_bytes),
                bytes("total_bytes", memory.total_bytes()),
            ],
        );
        if let Some(placement) = &placement {
            self.title("placement");
            for line in placement::lines(placement, &config.target) {
                self.text.push_str(&format!("  {line}\n"));
            }
            let parts = placement::json_of(placement);
            self.json.insert("placement".to_owned(), parts);
        }
        Ok(block.refusal())
    }

    fn tensors(&mut self, file: &GgufFile) {
        self.title("tensors");
        let mut all = Vec::new();
        for tensor in file.tensors() {
            let (name, ty, shape) = (tensor.name(), tensor.ty().to_string(), tensor.shape());
            self.text
                .push_str(&format!("  {name:<40} {ty:<8} {shape}\n"));
            all.push(json!({ "name": &**name, "type": ty, "dims": tensor.dims() }));
        }
        self.json.insert("tensors".to_owned(), Value::Array(all));
    }

    fn metadata(&mut self, file: &GgufFile) {
        self.title("metadata");
        let mut all = Map::new();
        for (key, value) in file.meta().iter() {
            let shown = shape::metadata(value);
            self.text
                .push_str(&format!("  {key}: {} = {shown}\n", value.type_name()));
            all.insert(
                key.to_owned(),
                json!({ "type": value.type_name(), "value": shown }),
            );
        }
        self.json.insert("metadata".to_owned(), Value::Object(all));
    }
}
