//! DFlash2 and DSpark drafts on this device against an independent implementation: logits, chains,
//! candidates given the token before, and confidences, before and after commits.
#![expect(
    clippy::unwrap_used,
    reason = "an unreadable fixture and a wrong value fail the test"
)]

use conformance::drafts2::{Draft2Case, Draft2Format, Draft2Mistake, NAMES, TARGET, worst_at};
use conformance::golden::Golden;
use contract::{DraftItem, KvFormat, KvFormats, Limits, LoadConfig, QuantType, Runner, TokenId};
use cpu::{CpuBackend, CpuOptions};

const REFERENCE: CpuOptions = CpuOptions {
    reference: true,
    threads: Some(2),
};
const FAST: CpuOptions = CpuOptions {
    reference: false,
    threads: Some(2),
};
/// The largest difference from the independent implementation.
const TOLERANCE: f32 = 1e-3;
const SPELLINGS: [Draft2Format; 2] = [
    Draft2Format::Gguf(QuantType::F32),
    Draft2Format::Safetensors,
];

fn config(options: CpuOptions, kv: KvFormat) -> (LoadConfig, Vec<TokenId>) {
    let golden = Golden::open(TARGET).unwrap();
    let limits = Limits {
        sequences: 1,
        context: 200,
        tree_nodes: 8,
        prefill_chunk: 200,
        pool_tokens: None,
    };
    let kv = KvFormats { k: kv, v: kv };
    let config = if options.reference {
        golden.load_config(kv, limits).unwrap()
    } else {
        golden.load_config_of_floats(kv, limits).unwrap()
    };
    (config, golden.ids)
}

fn open(
    case: &Draft2Case,
    file: (Draft2Format, Option<Draft2Mistake>),
    (options, kv): (CpuOptions, KvFormat),
) -> (Box<dyn Runner>, Vec<TokenId>) {
    let (config, ids) = config(options, kv);
    let draft = case.load(file, &config.target).unwrap();
    let runner = Draft2Case::open_on(&CpuBackend::new(options), config, (draft, kv));
    (runner.unwrap(), ids)
}

/// The largest difference at all positions, each reached from the one before by commits.
fn worst_of(
    case: &Draft2Case,
    file: (Draft2Format, Option<Draft2Mistake>),
    how: (CpuOptions, KvFormat),
) -> (f32, f32) {
    let (mut runner, ids) = open(case, file, how);
    case.worst_on(&mut *runner, &ids).unwrap()
}

#[test]
fn reference_matches_the_independent_implementation_in_both_spellings() {
    for name in NAMES {
        let case = Draft2Case::open(name).unwrap();
        for format in SPELLINGS {
            let (logits, candidates) = worst_of(&case, (format, None), (REFERENCE, KvFormat::F32));
            assert!(logits < TOLERANCE, "{name} {format:?}: logits {logits}");
            assert!(
                candidates < TOLERANCE,
                "{name} {format:?}: candidates {candidates}"
            );
        }
    }
}

#[test]
fn prompts_in_one_piece_match_too() {
    for name in NAMES {
        let case = Draft2Case::open(name).unwrap();
        let file = (Draft2Format::Gguf(QuantType::F32), None);
        let (mut runner, ids) = open(&case, file, (REFERENCE, KvFormat::F32));
        for result in &case.results {
            let seq = runner.open(180).unwrap();
            runner.prefill(seq, &ids[..result.at], &[]).unwrap();
            let root = ids[result.at];
            let (logits, candidates) =
                worst_at(&mut *runner, DraftItem { seq, root }, result).unwrap();
            assert!(
                logits.max(candidates) < TOLERANCE,
                "{name}: {logits} {candidates}"
            );
            runner.close(seq);
        }
    }
}

#[test]
fn fast_path_matches_without_quantisation() {
    for name in NAMES {
        let case = Draft2Case::open(name).unwrap();
        let file = (Draft2Format::Gguf(QuantType::F32), None);
        let (logits, candidates) = worst_of(&case, file, (FAST, KvFormat::F32));
        assert!(logits < TOLERANCE, "{name}: logits {logits}");
        assert!(candidates < TOLERANCE, "{name}: candidates {candidates}");
    }
}

#[test]
fn quantised_drafts_stay_near() {
    for name in NAMES {
        let case = Draft2Case::open(name).unwrap();
        for ty in [QuantType::Q8_0, QuantType::Q4_K] {
            let (mut runner, ids) =
                open(&case, (Draft2Format::Gguf(ty), None), (FAST, KvFormat::F16));
            let result = &case.results[1];
            let seq = runner.open(180).unwrap();
            runner.prefill(seq, &ids[..result.at], &[]).unwrap();
            let root = ids[result.at];
            let found = runner.draft_logits(DraftItem { seq, root }).unwrap();
            // Later rows of a Markov head depend on the tokens that the first ones choose.
            let pairs = result.logits.iter().zip(&found.logits).take(512);
            let (mut off, mut size) = (0.0_f64, 0.0_f64);
            for (expected, found) in pairs.filter(|(expected, _)| expected.is_finite()) {
                off += f64::from(expected - found).powi(2);
                size += f64::from(*expected).powi(2);
            }
            let share = (off / size).sqrt();
            let allowed = if ty == QuantType::Q8_0 { 0.1 } else { 0.6 };
            assert!(share < allowed, "{name} {ty:?}: {share}");
        }
    }
}

#[test]
fn mistakes_in_files_are_detected() {
    use Draft2Mistake::{
        Causality, GroupsInterleaved, NoDynamicPart, NoSinks, SidesSwapped, TapsSwapped, VocabMap,
        Window,
    };
    let of = |name: &str, mistakes: &[Draft2Mistake]| {
        let name = NAMES.iter().find(|other| **other == name).unwrap();
        let case = Draft2Case::open(name).unwrap();
        for mistake in mistakes {
            let file = (Draft2Format::Gguf(QuantType::F32), Some(*mistake));
            let (logits, _) = worst_of(&case, file, (REFERENCE, KvFormat::F32));
            assert!(
                logits > 50.0 * TOLERANCE,
                "{name} with {mistake:?} is {logits} off"
            );
        }
    };
    let convolutions = [TapsSwapped, SidesSwapped, GroupsInterleaved, NoDynamicPart];
    of("pairs", &[&convolutions[..], &[Causality, Window]].concat());
    of("pairs_full", &[&convolutions[..], &[NoSinks]].concat());
    of("markov", &[Causality]);
    of("markov_part", &[Causality, Window, NoSinks, VocabMap]);
}
