//! The memory plan of `hearth serve`: the model, its drafts and the scorer of its prompts.

use crate::cli::ServeArgs;
use crate::commands::compressing::{self, PlannedScorer};
use crate::config::server::model_path;
use crate::open::bundled::Bundled;
use crate::open::drafting::Drafting;
use crate::open::fit_scoring::{ScorerFit, fit_scoring};
use crate::open::{self, FittedConfig, MemoryRequest};

/// A plan of the flags.
pub(super) struct FittedModel {
    pub(super) fitted: FittedConfig,
    pub(super) drafting: Drafting,
    /// The scorer, and its place.
    pub(super) scorer: Option<(PlannedScorer, ScorerFit)>,
}

impl FittedModel {
    /// The model, the device and the memory, in lines.
    pub(super) fn lines(&self, loaded: &model::LoadedModel) -> Vec<String> {
        let lines = open::plan_lines(loaded, &self.fitted).into_iter();
        let scorer = self.scorer.as_ref();
        let scorer = scorer.map(|(scorer, place)| place.line(scorer.name()));
        lines.chain(scorer).chain(self.drafting.line()).collect()
    }

    /// What yields to or because of the scorer.
    pub(super) fn yields(&self) -> Option<&str> {
        self.scorer.as_ref()?.1.yields.as_deref()
    }

    /// Bytes of the model's only device that the scorer takes.
    pub(super) fn scorer_bytes(&self) -> u64 {
        let scorer = self.scorer.as_ref();
        scorer.map_or(0, |(_, place)| place.device_bytes())
    }
}

/// Fits the model of `loaded`, its drafts and its scorer.
///
/// # Errors
/// If the model does not fit.
pub(super) fn fit(
    args: &ServeArgs,
    loaded: &model::LoadedModel,
    bundled: Bundled,
) -> anyhow::Result<FittedModel> {
    let scorer = compressing::planned(&args.compression, loaded)?;
    let mut drafting = drafting(args, loaded, bundled)?;
    let request = MemoryRequest {
        sequences: args.max_sequences,
        context: None,
        tree_nodes: drafting.tree_nodes(),
    };
    let named = compressing::device(args)?;
    let (fitted, place) = fit_scoring(
        &|scorer_bytes| device(args, scorer_bytes),
        loaded,
        &args.device,
        (request, &mut drafting),
        (scorer.as_ref().map(PlannedScorer::config), named.as_ref()),
    )?;
    Ok(FittedModel {
        fitted,
        drafting,
        scorer: scorer.zip(place),
    })
}

/// The model, the device and the memory of the flags, in lines. No weight is read.
///
/// # Errors
/// If the model does not open or does not fit.
pub(super) fn plan(args: &ServeArgs, bundled: Bundled) -> anyhow::Result<Vec<String>> {
    let loaded = open::load_or(model_path(args).map(|path| path.as_path()), bundled)?;
    let found = fit(args, &loaded, bundled)?;
    let yields = found.yields().map(str::to_owned);
    Ok(found.lines(&loaded).into_iter().chain(yields).collect())
}

/// The device of the flags beside a scorer of so many bytes, with attention windows if one is set.
pub(super) fn device(
    args: &ServeArgs,
    scorer_bytes: u64,
) -> anyhow::Result<Box<dyn contract::Backend>> {
    let mut choice = open::choice_with_draft(&args.device, args.draft.draft_device.as_deref())?;
    choice.gpu.windows = args.window.attention_window > 0;
    open::device_beside(&args.device, choice, scorer_bytes)
}

fn drafting(
    args: &ServeArgs,
    loaded: &model::LoadedModel,
    bundled: Bundled,
) -> anyhow::Result<Drafting> {
    let bundled = model_path(args).is_none().then_some(bundled);
    Drafting::of(&args.draft, &args.device, loaded, bundled)
}
