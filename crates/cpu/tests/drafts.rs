//! Random-weight drafts in all four file formats against the publisher's module in PyTorch. The
//! cases cover full and sliding layers, every rule of causal blocks, blocks of 4 to 20 rows, one to
//! five layers, tied and separate heads, and the known errors of each format's converters.

#![expect(
    clippy::unwrap_used,
    reason = "an unreadable fixture and a wrong value fail the test"
)]

use conformance::compare::Tolerance;
use conformance::drafts::{DRAFTS, DraftFileFormat, DraftFileQuirks, RandomDraft, WeightPrecision};
use contract::{KvFormat, QuantType};
use cpu::{CpuBackend, CpuOptions};

const REFERENCE: CpuOptions = CpuOptions {
    reference: true,
    threads: Some(2),
};
const FAST: CpuOptions = CpuOptions {
    reference: false,
    threads: Some(2),
};
/// The reference implementation's numerics: f32 everywhere.
const AS_REFERENCE: (CpuOptions, KvFormat, WeightPrecision) =
    (REFERENCE, KvFormat::F32, WeightPrecision::AsStored);
/// Only the order of sums differs.
const CLOSE: Tolerance = Tolerance {
    absolute: 1e-4,
    relative: 0.0,
};
/// Any finite difference.
const ANY: Tolerance = Tolerance {
    absolute: f32::MAX,
    relative: 0.0,
};

/// Logits of a draft in a file format, with all keys and values as `kv`.
fn logits(
    draft: &RandomDraft,
    (format, quirks): (DraftFileFormat, DraftFileQuirks),
    (options, kv, weights): (CpuOptions, KvFormat, WeightPrecision),
) -> Vec<f32> {
    let config = draft.load_config(kv, weights).unwrap();
    let ids = draft.target().unwrap().ids;
    let loaded = draft.load((format, quirks), &config.target).unwrap();
    assert_eq!(draft.is(&loaded.spec), quirks.are_correct());
    let backend = CpuBackend::new(options);
    draft
        .logits(&backend, (config, &ids), (loaded, kv))
        .unwrap()
}

#[test]
fn reference_draft_logits_match_the_golden_files_in_every_format() {
    let mut checked = 0;
    for draft in DRAFTS {
        let config = draft
            .load_config(KvFormat::F32, WeightPrecision::AsStored)
            .unwrap();
        let theta = config.target.attention_layers().next().unwrap().rope.theta;
        let mut first: Option<Vec<f32>> = None;
        for file_format in draft.file_formats(theta) {
            let file = (file_format, DraftFileQuirks::default());
            let found = logits(&draft, file, AS_REFERENCE);
            draft
                .check(&found, CLOSE)
                .unwrap_or_else(|error| panic!("{file_format:?}: {error}"));
            // All file formats hold the same values.
            let first = first.get_or_insert_with(|| found.clone());
            assert!(*first == found, "{} as {file_format:?}", draft.name);
            checked += 1;
        }
    }
    assert_eq!(checked, 23, "some file formats were not checked");
}

#[test]
fn fast_path_draft_logits_match_without_quantization() {
    let fast = (FAST, KvFormat::F32, WeightPrecision::Floats);
    for draft in DRAFTS {
        for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
            let quirks = DraftFileQuirks {
                ty: Some(ty),
                ..DraftFileQuirks::default()
            };
            let found = logits(&draft, (DraftFileFormat::C, quirks), fast);
            draft
                .check(&found, CLOSE)
                .unwrap_or_else(|error| panic!("{ty:?}: {error}"));
        }
    }
}

#[test]
fn fast_path_rounding_error_is_small_on_average() {
    let fast = (FAST, KvFormat::F16, WeightPrecision::AsStored);
    for draft in DRAFTS {
        let file = (DraftFileFormat::Safetensors, DraftFileQuirks::default());
        let off = draft.check(&logits(&draft, file, fast), ANY).unwrap();
        let allowed = if draft.target.ends_with("f16") {
            // Keys and values are stored in half precision.
            0.003
        } else {
            // The target's activations have eight bits.
            0.3
        };
        assert!(off.mean < allowed, "{}: {off:?}", draft.name);
    }
}

#[test]
fn drafts_do_not_depend_on_when_features_are_projected() {
    for draft in DRAFTS {
        let config = draft
            .load_config(KvFormat::F16, WeightPrecision::AsStored)
            .unwrap();
        let ids = draft.target().unwrap().ids;
        let file = (DraftFileFormat::C, DraftFileQuirks::default());
        let loaded = draft.load(file, &config.target).unwrap();
        let backend = CpuBackend::new(FAST);
        let checked = draft.check_waiting(&backend, (config, &ids), (loaded, KvFormat::F16));
        checked.unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn incorrect_draft_files_are_detected() {
    let of = |name: &str| *DRAFTS.iter().find(|draft| draft.name == name).unwrap();
    let (sliding, full, causal) = (of("sliding"), of("full"), of("causal"));
    let plain = DraftFileQuirks::default();
    let wrong = [
        // Target layers numbered as in the other file formats.
        (
            of("one_layer"),
            DraftFileQuirks {
                capture_layers_offset: -1,
                ..plain
            },
        ),
        (
            full,
            DraftFileQuirks {
                theta_factor: 0.1,
                ..plain
            },
        ),
        (
            sliding,
            DraftFileQuirks {
                window_offset: 1,
                ..plain
            },
        ),
        (
            sliding,
            DraftFileQuirks {
                flip_causal: true,
                ..plain
            },
        ),
        (
            causal,
            DraftFileQuirks {
                flip_causal: true,
                ..plain
            },
        ),
        (
            full,
            DraftFileQuirks {
                mask: Some(510),
                ..plain
            },
        ),
    ];
    for (draft, quirks) in wrong {
        let file = (DraftFileFormat::C, quirks);
        let found = logits(&draft, file, AS_REFERENCE);
        let off = draft.check(&found, ANY).unwrap();
        assert!(
            off.worst > 100.0 * CLOSE.absolute,
            "{} with {quirks:?} is only {off:?} off",
            draft.name
        );
    }
}
