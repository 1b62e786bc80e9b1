//! The property of a draft that is loaded at its first use.
//!
//! Its memory is planned from the start and no weight is read before the first prompt. A failing
//! source is reported and tried again. The loaded draft gives the logits of one loaded at open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use contract::{
    Backend, DeviceError, DraftCandidates, DraftItem, DraftLoad, LoadConfig, Runner, TokenId,
    WeightError, WeightRef, WeightSource,
};

/// A source that counts reads and fails on demand.
struct ReadCounter {
    inner: Arc<dyn WeightSource>,
    reads: AtomicUsize,
    fails: AtomicBool,
}

impl WeightSource for ReadCounter {
    fn bytes(&self, weight: &WeightRef) -> Result<&[u8], WeightError> {
        self.reads.fetch_add(1, SeqCst);
        if self.fails.load(SeqCst) {
            Err(WeightError::Missing {
                name: Arc::clone(&weight.name),
            })
        } else {
            self.inner.bytes(weight)
        }
    }
}

/// The draft's candidates after a prompt; opens a sequence and closes it.
fn drafted(
    runner: &mut dyn Runner,
    prompt: &[TokenId],
) -> Result<Vec<DraftCandidates>, DeviceError> {
    let depth = runner.info().draft_depth.unwrap_or(0);
    let seq = runner.open(prompt.len() + 1)?;
    let read = runner.prefill(seq, prompt, &[]);
    let root = TokenId(1);
    let found = read.and_then(|_| runner.draft(&[DraftItem { seq, root }], depth, 4));
    runner.close(seq);
    found
}

/// Checks the property on a model with a draft.
///
/// # Errors
/// The violation.
pub fn loads_at_first_use(backend: &dyn Backend, config: &LoadConfig) -> Result<(), String> {
    let Some(draft) = &config.draft else {
        return Err("the model has no draft".to_owned());
    };
    let prompt: Vec<TokenId> = (0..40).map(|i| TokenId(i * i % 97)).collect();
    let source = Arc::new(ReadCounter {
        inner: Arc::clone(&draft.weights),
        reads: AtomicUsize::new(0),
        fails: AtomicBool::new(false),
    });
    let of = |load: DraftLoad| {
        let mut draft = draft.clone();
        draft.load = load;
        draft.weights = source.clone();
        LoadConfig {
            draft: Some(draft),
            ..config.clone()
        }
    };
    let at = |what: &'static str| move |error: DeviceError| format!("{what}: {error}");
    let bytes = |config: &LoadConfig| backend.estimate(config).map(|memory| memory.draft_bytes);
    let now = bytes(&of(DraftLoad::AtOpen)).map_err(at("estimate"))?;
    let later = bytes(&of(DraftLoad::AtFirstUse)).map_err(at("estimate"))?;
    if now != later || now == 0 {
        return Err(format!("{later} bytes are reserved for a draft of {now}"));
    }
    let eager = backend.open(of(DraftLoad::AtOpen), &mut |_| {});
    let expected = drafted(&mut *eager.map_err(at("open"))?, &prompt).map_err(at("draft"))?;
    source.reads.store(0, SeqCst);
    let lazy = backend.open(of(DraftLoad::AtFirstUse), &mut |_| {});
    let mut lazy = lazy.map_err(at("open"))?;
    if source.reads.load(SeqCst) != 0 {
        return Err("weights of the draft were read before its first use".to_owned());
    }
    source.fails.store(true, SeqCst);
    match drafted(&mut *lazy, &prompt) {
        Err(DeviceError::Weight(_)) => {}
        other => return Err(format!("a source that fails gave {other:?}")),
    }
    source.fails.store(false, SeqCst);
    let found = drafted(&mut *lazy, &prompt).map_err(at("the draft after a failure"))?;
    // A GPU's summation order may differ between runs.
    let sums =
        |all: &[DraftCandidates]| all.iter().flat_map(|c| c.lse.clone()).collect::<Vec<f32>>();
    let (found, expected) = (sums(&found), sums(&expected));
    let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let off = off.fold(0.0, f32::max);
    if found.len() != expected.len() || found.is_empty() || off > 0.01 {
        return Err(format!("a draft loaded at its first use is {off} off"));
    }
    let reads = source.reads.load(SeqCst);
    drafted(&mut *lazy, &prompt).map_err(at("the second draft"))?;
    if source.reads.load(SeqCst) == reads && reads >= draft.spec.weights().len() {
        Ok(())
    } else {
        Err(format!("weights were read {reads} times, and again later"))
    }
}
