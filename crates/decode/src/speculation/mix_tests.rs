//! The choice of sources, against each source alone: scripted sources whose acceptance differs by
//! text, on a virtual clock.

use super::simulated::{cpu, gpu, speedups};
use super::sources::{DraftSource, SourceSet};

/// The required share of the best single source's speed-up on every kind of text, with seeds on
/// which no constant was chosen.
const OF_BEST: f64 = 0.95;
/// The required share of plain decoding.
const OF_PLAIN: f64 = 0.97;

#[test]
fn mix_is_as_good_as_the_best_source_on_every_text_and_better_on_average() {
    let (mut shares, mut wrong) = (Vec::new(), Vec::new());
    for device in [cpu(), gpu()] {
        for (lengths, seed) in [((16, 128), 11), ((16, 128), 12), ((6, 600), 13)] {
            let with =
                |sources: &[DraftSource]| speedups(&device, SourceSet::of(sources), lengths, seed);
            let alone = DraftSource::ALL.map(|source| with(&[source]));
            for (kind, mixed) in with(&DraftSource::ALL) {
                let single = alone.each_ref().map(|one| one[kind]);
                let best = single.into_iter().fold(1.0, f64::max);
                let cell = format!(
                    "{} {lengths:?} {kind:>7}: mixed {mixed:.3} of plain, [block, mtp, suffix] \
                     {single:.3?}: {:.3} of the best",
                    device.name,
                    mixed / best
                );
                println!("{cell}");
                shares.push(mixed / best);
                if mixed < OF_PLAIN || mixed < OF_BEST * best {
                    wrong.push(cell);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    assert!(mean > 1.0, "{mean}");
}
