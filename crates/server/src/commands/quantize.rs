//! `hearth quantize`: converts a model to other weight types.

use std::io::Write;
use std::num::NonZero;

use anyhow::bail;
use model::quantize::QuantizeOptions;
use model::recipe::Recipe;

use crate::cli::QuantizeArgs;
use crate::commands::new_file::refuse_existing;
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
    refuse_existing(&args.output, args.force)?;
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let options = QuantizeOptions {
        recipe,
        threads: args.threads.unwrap_or(cores),
    };
    let progress = TaskProgress::new(format!("quantizing to {}", recipe.name()));
    let report = model::quantize::quantize(&args.input, &args.output, &options, &mut |at| {
        progress.set(at.done_bytes, at.total_bytes);
    })?;
    drop(progress);
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
