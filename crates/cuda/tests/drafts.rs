//! Random drafts against the published PyTorch module: within sum-order differences for f32 weights
//! and caches, and within half precision otherwise. Without a GPU the test prints SKIPPED and
//! passes.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this file is a test"
)]

mod fixtures {
    pub mod gpu;
    pub mod model;
}

use conformance::compare::Tolerance;
use conformance::drafts::{DRAFTS, DraftFileFormat, DraftFileQuirks, RandomDraft, WeightPrecision};
use contract::{KvFormat, QuantType};

use fixtures::model::{ModelDevice, open_device};

/// Accepts every number and rejects NaN.
const ANY: Tolerance = Tolerance {
    absolute: f32::MAX,
    relative: 0.0,
};
/// Tolerance for other sum orders and for the GPU's exponentials and roots, relative to the logits'
/// deviation. Logits reach twenty.
const CLOSE: f32 = 1e-4;

/// The standard deviation.
fn spread(values: &[f32]) -> f32 {
    let n = values.len() as f64;
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let square = |v: &f32| (f64::from(*v) - mean).powi(2);
    (values.iter().map(square).sum::<f64>() / n).sqrt() as f32
}

/// Mean error of half precision for logits that spread by up to 5: GEMMs of a target and a draft,
/// up to nine layers in sequence, and twice that for targets in block formats.
fn half(draft: &RandomDraft) -> f32 {
    if draft.target.ends_with("f16") {
        0.02
    } else {
        0.07
    }
}

fn logits(
    device: &ModelDevice,
    draft: &RandomDraft,
    (ty, kv, weights): (QuantType, KvFormat, WeightPrecision),
) -> Vec<f32> {
    let config = draft.load_config(kv, weights).unwrap();
    let ids = draft.target().unwrap().ids;
    let quirks = DraftFileQuirks {
        ty: Some(ty),
        ..DraftFileQuirks::default()
    };
    let loaded = draft
        .load((DraftFileFormat::C, quirks), &config.target)
        .unwrap();
    let device = &device.backend;
    draft.logits(device, (config, &ids), (loaded, kv)).unwrap()
}

#[test]
fn f32_draft_logits_match_the_published_module() {
    let Some(device) = open_device(false) else {
        return;
    };
    for draft in DRAFTS {
        let floats = (QuantType::F32, KvFormat::F32, WeightPrecision::Floats);
        let found = logits(&device, &draft, floats);
        let off = draft.check(&found, ANY).unwrap();
        let spread = spread(&draft.expected().unwrap().values);
        eprintln!(
            "  {}: {:.1e} at most, logits spread by {spread:.1}",
            draft.name, off.worst
        );
        assert!(off.worst <= CLOSE * spread, "{}: {off:?}", draft.name);
    }
}

#[test]
fn f16_draft_logits_stay_within_half_precision_of_the_published_module() {
    let Some(device) = open_device(false) else {
        return;
    };
    for draft in DRAFTS {
        let stored = (QuantType::BF16, KvFormat::F16, WeightPrecision::AsStored);
        let off = draft.check(&logits(&device, &draft, stored), ANY).unwrap();
        let (worst, mean) = (off.worst, off.mean);
        eprintln!(
            "  {}: {worst:.1e} at most, {mean:.1e} on average",
            draft.name
        );
        assert!(mean <= half(&draft), "{}: {off:?}", draft.name);
    }
}

#[test]
fn draft_logits_do_not_depend_on_when_features_are_appended() {
    let Some(device) = open_device(false) else {
        return;
    };
    for draft in DRAFTS {
        let config = draft
            .load_config(KvFormat::F16, WeightPrecision::AsStored)
            .unwrap();
        let ids = draft.target().unwrap().ids;
        for ty in [QuantType::BF16, QuantType::Q8_0] {
            let quirks = DraftFileQuirks {
                ty: Some(ty),
                ..DraftFileQuirks::default()
            };
            let loaded = draft
                .load((DraftFileFormat::C, quirks), &config.target)
                .unwrap();
            let on_progress = (config.clone(), &ids[..]);
            let checked =
                draft.check_waiting(&device.backend, on_progress, (loaded, KvFormat::F16));
            checked.unwrap_or_else(|error| panic!("{ty:?}: {error}"));
        }
    }
}
