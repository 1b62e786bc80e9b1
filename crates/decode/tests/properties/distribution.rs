//! Sampled output follows the target's distribution, with and without trees. A slightly wrong
//! sampler is detected.

use conformance::fake::{FakeDraft, FakeSpec, Language};
use contract::{LogitsRequest, TokenId};
use decode::{GenerationParams, Sampling};

use crate::fixture::{SchedulerFixture, config, job, prompt, spec};

const TINY: Language = Language {
    vocab: 8,
    spread: 2.0,
    ending: None,
    salt: 3,
};
const DRAWS: u64 = 20_000;

/// The distribution of a raw row under the parameters, by definition: `[vocab]` probabilities.
fn probabilities(history: &[TokenId], prompt_len: usize, sampling: &Sampling) -> Vec<f64> {
    let row = TINY.row(TINY.begin().then_all(history), &LogitsRequest::full());
    let mut logits: Vec<f64> = row.raw.iter().map(|x| f64::from(*x)).collect();
    for (id, x) in logits.iter_mut().enumerate() {
        let generated = history[prompt_len..]
            .iter()
            .filter(|t| t.index() == id)
            .count() as f64;
        if history.iter().any(|t| t.index() == id) {
            let repetition = f64::from(sampling.repetition);
            *x = if *x > 0.0 {
                *x / repetition
            } else {
                *x * repetition
            };
        }
        let presence = f64::from(sampling.presence) * f64::from(u8::from(generated > 0.0));
        *x -= f64::from(sampling.frequency) * generated + presence;
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let weight = |id: &usize| (logits[*id] / f64::from(sampling.temperature)).exp();
    let sum: f64 = order.iter().map(weight).sum();
    let (mut mass, mut kept) = (0.0, Vec::new());
    for id in order {
        if mass >= f64::from(sampling.top_p) {
            break;
        }
        mass += weight(&id) / sum;
        kept.push(id);
    }
    let mut all = vec![0.0; logits.len()];
    let sum: f64 = kept.iter().map(weight).sum();
    kept.iter().for_each(|id| all[*id] = weight(id) / sum);
    all
}

/// Counts of token pairs, `[vocab, vocab]`, one draw per seed. A share `wrong` of the seeds uses
/// another temperature.
fn pair_counts(sampling: &Sampling, drafted: bool, wrong: f64) -> Vec<u64> {
    let mut counts = vec![0; TINY.vocab * TINY.vocab];
    let mut fixture = SchedulerFixture::new(
        FakeSpec {
            draft: drafted.then_some(FakeDraft {
                depth: 3,
                acceptance_rate: 0.5,
            }),
            ..spec(TINY)
        },
        config(),
    );
    for seed in 0..DRAWS {
        let spoiled = (seed as f64 * 0.618_034).fract() < wrong;
        let params = GenerationParams {
            sampling: Sampling {
                seed: seed * 7919,
                temperature: sampling.temperature * if spoiled { 2.0 } else { 1.0 },
                ..sampling.clone()
            },
            max_tokens: 2,
            ignore_eos: true,
            ..GenerationParams::default()
        };
        fixture.submit(job(seed, start(), params));
        fixture.finish();
        let outputs = fixture.outputs();
        let ids = outputs[&(seed, 0)].ids();
        counts[ids[0].index() * TINY.vocab + ids[1].index()] += 1;
        fixture.events.clear();
    }
    counts
}

fn start() -> Vec<TokenId> {
    prompt(5, 2).into_iter().map(|t| TokenId(t.0 % 8)).collect()
}

/// Chi-square over the pairs, with cells of fewer than five expected draws merged, and the bound
/// that a correct sampler exceeds with a probability of about 0.001.
fn chi_square(sampling: &Sampling, counts: &[u64]) -> (f64, f64) {
    let prompt = start();
    let first = probabilities(&prompt, prompt.len(), sampling);
    let (mut chi, mut cells) = (0.0, 0);
    let (mut rest, mut rest_expected) = (0.0, 0.0);
    for (a, p) in first.iter().enumerate() {
        let history = [prompt.clone(), vec![TokenId(a as u32)]].concat();
        let second = probabilities(&history, prompt.len(), sampling);
        for (b, q) in second.iter().enumerate() {
            let (found, expected) = (counts[a * TINY.vocab + b] as f64, p * q * DRAWS as f64);
            if expected < 1e-9 {
                assert_eq!(found, 0.0, "{a} then {b} is impossible");
            } else if expected < 5.0 {
                rest += found;
                rest_expected += expected;
            } else {
                chi += (found - expected).powi(2) / expected;
                cells += 1;
            }
        }
    }
    if rest_expected > 0.0 {
        chi += (rest - rest_expected).powi(2) / rest_expected;
        cells += 1;
    }
    // Wilson and Hilferty's approximation of the 0.999 quantile.
    let free = f64::from(cells - 1);
    let cube = 1.0 - 2.0 / (9.0 * free) + 3.09 * (2.0 / (9.0 * free)).sqrt();
    (chi, free * cube.powi(3))
}

fn cases() -> [Sampling; 3] {
    let plain = Sampling {
        temperature: 0.9,
        ..Sampling::default()
    };
    [
        plain.clone(),
        Sampling {
            top_k: 5,
            top_p: 0.8,
            ..plain.clone()
        },
        Sampling {
            repetition: 1.3,
            frequency: 0.4,
            presence: 0.5,
            top_p: 0.95,
            ..plain
        },
    ]
}

#[test]
fn sampled_token_pairs_follow_the_target_distribution() {
    for sampling in cases() {
        for drafted in [false, true] {
            let (chi, bound) = chi_square(&sampling, &pair_counts(&sampling, drafted, 0.0));
            assert!(
                chi < bound,
                "{chi} over {bound}, drafted {drafted}, {sampling:?}"
            );
        }
    }
}

#[test]
fn chi_square_test_detects_a_sampler_wrong_one_time_in_five() {
    let sampling = &cases()[0];
    let (chi, bound) = chi_square(sampling, &pair_counts(sampling, true, 0.2));
    assert!(chi > bound, "{chi} under {bound}: the test detects nothing");
}
