//! `hearth quantize`: converts a model to other weight types.

use std::io::Write;
use std::num::NonZero;

use anyhow::bail;
use gguf::GgufFile;
use model::ImportanceMatrix;
use model::quantize::QuantizeOptions;
use model::recipe::Recipe;

use crate::cli::QuantizeArgs;
use crate::commands::new_file::{NewFile, check_not_input, check_output};
use crate::open::model_path::check_model;
use crate::progress::{TaskProgress, bytes_text};

pub(super) fn quantize(args: &QuantizeArgs) -> anyhow::Result<()> {
    let Some(recipe) = Recipe::parse(&args.recipe) else {
        let known: Vec<&str> = Recipe::ALL.iter().map(|recipe| recipe.name()).collect();
        bail!(
            "recipe {}: unknown; use one of {}",
            args.recipe,
            known.join(", ")
        );
    };
    if recipe.needs_importance() && args.imatrix.is_none() {
        bail!(
            "recipe {}: needs an importance matrix, give one with --imatrix FILE; \
             q4_k_m and iq3_s need none",
            recipe.name()
        );
    }
    let importance = args
        .imatrix
        .as_deref()
        .map(ImportanceMatrix::open)
        .transpose()?;
    check_model(&args.input)?;
    for part in GgufFile::open(&args.input)?.paths() {
        check_not_input(part, &args.output)?;
    }
    check_output(&args.output, args.force)?;
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let options = QuantizeOptions {
        recipe,
        threads: args.threads.unwrap_or(cores),
        importance: importance.as_ref(),
    };
    let progress = TaskProgress::new(format!("quantizing to {}", recipe.name()));
    let (new, out) = NewFile::begin(&args.output, args.force)?;
    let (report, out) = model::quantize::quantize(&args.input, out, &options, &mut |at| {
        progress.set(at.done_bytes, at.total_bytes);
    })?;
    drop(progress);
    new.keep(out)?;
    let again = report.requantised();
    if again > 0 {
        tracing::warn!(
            "{again} tensors were already quantized and now have the errors of both types; \
             quantize the original model instead"
        );
    }
    writeln!(
        std::io::stderr(),
        "{}: {} tensors, {} of weights, from {}",
        args.output.display(),
        report.tensors.len(),
        bytes_text(report.output_bytes),
        bytes_text(report.input_bytes)
    )?;
    Ok(())
}
