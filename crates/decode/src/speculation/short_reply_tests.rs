//! Short replies on a virtual clock: what a server may lose by trials on them, and what it gains
//! from what earlier replies have taught.

use super::simulated::{Device, Kind, Seconds, Server, cpu, gpu, kind};
use super::sources::{DraftSource, SourceSet};

/// Tokens of a short reply.
const SHORT: usize = 22;
const REPLIES: usize = 200;

/// The seeds of the texts. The constants of the controller were chosen on others.
const SEEDS: [u64; 2] = [11, 12];

/// The time of short replies of these kinds in turn, by kind.
fn replies<const N: usize>(mut server: Server, kinds: [Kind; N]) -> [Seconds; N] {
    let mut sums = [Seconds::default(); N];
    for n in 0..REPLIES {
        sums[n % N].add(server.reply(kinds[n % N], SHORT));
    }
    sums
}

/// The speed-up of the best fixed choice among `sources`.
fn best_fixed(device: &Device, sources: SourceSet, of: Kind, seed: u64) -> f64 {
    let fixed = sources.plans().map(|choice| {
        let [sum] = replies(Server::fixed(device, choice, seed), [of]);
        sum.speedup()
    });
    fixed.fold(1.0, f64::max)
}

#[test]
fn drafts_that_never_pay_cost_short_replies_at_most_3_percent() {
    for seed in SEEDS {
        for sources in [SourceSet::of(&[DraftSource::Block]), SourceSet::ALL] {
            for surprisal in [0.0005, 0.02, 0.4] {
                let of = kind("wrong", (0.02, 0.02), 0.0, surprisal);
                let [sum] = replies(Server::new(&cpu(), sources, seed), [of]);
                let found = format!("surprisal {surprisal}, {sources:?}: {:.3}", sum.speedup());
                println!("{found}");
                assert!(sum.speedup() >= 0.97, "{found} of plain decoding");
            }
        }
    }
}

#[test]
fn gains_on_some_short_replies_do_not_pay_for_losses_on_others() {
    // Only the drafts' results distinguish the kinds.
    for seed in SEEDS {
        let kinds = [0.95, 0.02].map(|right| kind("short", (right, right), 0.0, 0.002));
        let [right, wrong] = replies(Server::new(&cpu(), SourceSet::ALL, seed), kinds);
        let found = format!("right {:.3}, wrong {:.3}", right.speedup(), wrong.speedup());
        println!("{found}");
        assert!(
            wrong.speedup() >= 0.97 && right.speedup() >= 0.97,
            "{found}"
        );
    }
}

#[test]
fn drafts_that_pay_speed_short_replies_up_nearly_as_the_best_fixed_choice() {
    // Where a draft costs two plain steps, the budget pays for one trial in several replies.
    for (device, least) in [(gpu(), 0.9), (cpu(), 0.75)] {
        for (right, surprisal) in [(0.6, 0.02), (0.9, 0.0005), (0.95, 0.4), (0.99, 0.02)] {
            let of = kind("right", (right, 0.9 * right), 0.0, surprisal);
            for sources in [SourceSet::of(&[DraftSource::Block]), SourceSet::ALL] {
                let best = best_fixed(&device, sources, of, SEEDS[0]);
                let [sum] = replies(Server::new(&device, sources, SEEDS[0]), [of]);
                let found = format!(
                    "{}, {sources:?}, right {right}: {:.3} of {best:.3}",
                    device.name,
                    sum.speedup()
                );
                println!("{found}");
                assert!(sum.speedup() >= least * best, "{found}");
            }
        }
    }
}
