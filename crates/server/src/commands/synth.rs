//! `hearth synth`: writes a file with a real model's shapes and random weights.

use model::synth::SynthSpec;

use crate::cli::SynthArgs;
use crate::commands::new_file::{NewFile, written_line};
use crate::progress::TaskProgress;

pub(super) fn synth(args: &SynthArgs) -> anyhow::Result<()> {
    let mut spec = SynthSpec::parse(&args.what)?;
    spec.seed = args.seed;
    let total = spec.data_bytes()?;
    let (new, out) = NewFile::begin(&args.output, args.force)?;
    let progress = TaskProgress::new(format!("writing {}", args.output.display()));
    let out = spec.write(out, &mut |done| progress.set(done, total))?;
    drop(progress);
    new.keep(out)?;
    written_line(&args.output)
}
