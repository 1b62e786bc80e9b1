//! Measurement of pass costs on an idle runner.

use std::time::Duration;

use contract::{
    CommitItem, DeviceError, DraftItem, LogitsRequest, MtpDraftItem, MtpRow, NodeIdx, Runner,
    SeqId, TokenId, Tree, VerifyItem,
};

use crate::speculation::sources::{DraftSource, SourceSet};

use super::MTP_USUAL_DEPTH;
use super::table::{Clock, CostTable};

/// Verify sizes to measure, besides the largest. Start-up waits for them, and costs between them
/// are nearly linear.
const SIZES: [usize; 10] = [1, 2, 4, 8, 16, 24, 32, 40, 48, 64];
/// Maximum number of sequences measured together. A device may need several passes for the rows of
/// more.
const MAX_SEQUENCES: usize = 8;
/// A device on which so many rows cost less than this factor times two rows pads its passes. There,
/// one row more than a size costs as much as the next size.
const PADDED: (usize, f64) = (8, 1.1);
/// Repetitions of all passes. The fastest of each counts, since other load disturbs whole
/// stretches.
const REPETITIONS: usize = 4;
/// Prompt tokens before the measurement.
const CONTEXT: usize = 64;
/// Tokens that wait for a draft whose time shows what each of them takes.
const WAITING: usize = 16;
/// Maximum number of tokens that a repetition commits to a sequence.
const MAX_COMMITS_PER_REPETITION: usize = 4 * SIZES.len() + 2 * WAITING;

/// Rows of a measured draft of the multi-token-prediction head at each depth behind the first.
const MTP_MEASURED_WIDTH: u32 = 2;

/// Measures an idle runner with those of `sources` that it has within about `limit`. Returns `None`
/// if the clock stands still.
///
/// If the time runs out, the table holds what was measured.
///
/// # Errors
/// Those of the runner's calls.
pub fn measure(
    runner: &mut dyn Runner,
    sources: SourceSet,
    (clock, limit): (Clock, Duration),
) -> Result<Option<CostTable>, DeviceError> {
    let info = runner.info();
    let sources = sources.available(info).without(DraftSource::Suffix);
    let limits = info.limits;
    let context = CONTEXT
        .min(limits.prefill_chunk)
        .min(limits.context / 2)
        .max(1);
    let commits = (REPETITIONS + 1) * MAX_COMMITS_PER_REPETITION;
    let max_len = limits.context.min(context + commits + Tree::MAX_NODES);
    let mut seqs = vec![runner.open(max_len)?];
    // More sequences show the cost of shared drafts and passes, if memory allows.
    while seqs.len() < limits.sequences.min(MAX_SEQUENCES)
        && let Ok(seq) = runner.open(max_len)
    {
        seqs.push(seq);
    }
    let mut measurement = CostMeasurement {
        runner,
        clock,
        end: clock() + limit,
        tokens_left: max_len - context,
        context,
        sources,
    };
    let measured = measurement.table(&seqs);
    seqs.into_iter()
        .for_each(|seq| measurement.runner.close(seq));
    measured
}

/// One pass to measure repeatedly.
struct MeasuredPass {
    seqs: Vec<SeqId>,
    /// The source of a draft; `None` for a verify.
    draft: Option<DraftSource>,
    /// Rows of a verify in all.
    rows: usize,
    /// Tokens of each sequence that wait for a draft.
    waiting: usize,
    /// Seconds of the fastest so far.
    best: f64,
}

/// What is committed of a chain.
#[derive(Debug, Clone, Copy, PartialEq)]
enum CommitExtent {
    Nothing,
    Root,
    Chain,
}

/// A running measurement.
struct CostMeasurement<'a> {
    runner: &'a mut dyn Runner,
    clock: Clock,
    /// No repetition starts after this time.
    end: Duration,
    /// Tokens that may still be committed and verified.
    tokens_left: usize,
    context: usize,
    sources: SourceSet,
}

impl CostMeasurement<'_> {
    fn table(&mut self, seqs: &[SeqId]) -> Result<Option<CostTable>, DeviceError> {
        let vocab = self.runner.info().vocab;
        let tokens: Vec<TokenId> = (0..self.context).map(|i| varied(i, vocab)).collect();
        for seq in seqs {
            self.runner.prefill(*seq, &tokens, &[])?;
        }
        let limits = self.runner.info().limits;
        let max_nodes = limits.tree_nodes.min(Tree::MAX_NODES);
        let pass = |n: usize, rows: usize| MeasuredPass {
            seqs: seqs[..n].to_vec(),
            draft: None,
            rows,
            waiting: 0,
            best: f64::INFINITY,
        };
        let draft_pass = |n: usize, source, waiting| MeasuredPass {
            draft: Some(source),
            waiting,
            ..pass(n, 0)
        };
        // Sizes above what fewer sequences reach, up to the most of `n`.
        let sizes = |fewer: usize, n: usize| {
            let between = SIZES.into_iter();
            let between = between.filter(move |rows| (fewer + 1..n * max_nodes).contains(rows));
            between.chain([n * max_nodes]).map(move |rows| (n, rows))
        };
        // Blocks of four sequences fit one draft pass of a GPU, those of more do not.
        let mut several = vec![2, 4, seqs.len()];
        several.retain(|n| (2..=seqs.len()).contains(n));
        several.dedup();
        let counts = [1].into_iter().chain(several.iter().copied());
        let sources = self.sources.iter();
        let drafts = sources.flat_map(|source| counts.clone().map(move |n| (n, source)));
        let mut drafts: Vec<MeasuredPass> =
            drafts.map(|(n, source)| draft_pass(n, source, 1)).collect();
        let more = WAITING.min(max_nodes);
        let sources = self.sources.iter();
        let mut late: Vec<MeasuredPass> = sources
            .filter(|_| more > 1)
            .map(|source| draft_pass(1, source, more))
            .collect();
        drafts.append(&mut late);
        let mut verify: Vec<MeasuredPass> = sizes(0, 1).map(|(n, rows)| pass(n, rows)).collect();
        self.run_interleaved(&mut drafts)?;
        self.run_interleaved(&mut verify)?;
        if is_padded(&points(&verify)) {
            // Costs beyond one tree are not linear either.
            let mut fewer = 1;
            for n in several {
                let more = sizes(fewer * max_nodes, n);
                let mut more: Vec<MeasuredPass> = more.map(|(n, rows)| pass(n, rows)).collect();
                self.run_interleaved(&mut more)?;
                verify.append(&mut more);
                fewer = n;
            }
        }
        let mut table = CostTable::new(with_steps(&points(&verify)));
        for source in self.sources.iter() {
            let of_source = drafts.iter().filter(|pass| pass.draft == Some(source));
            let (late, of_source): (Vec<_>, Vec<_>) = of_source.partition(|pass| pass.waiting > 1);
            let mut draft: Vec<(usize, f64)> = Vec::new();
            for pass in of_source {
                // More sequences cannot cost less; such a time was disturbed.
                let least = draft.last().map_or(0.0, |before| before.1);
                draft.push((pass.seqs.len(), pass.best.max(least)));
            }
            if let [alone] = draft[..] {
                draft.push((2, 2.0 * alone.1));
            }
            let alone = draft.first().map_or(f64::INFINITY, |first| first.1);
            table = table.and_then(|table| table.with_draft(source, draft));
            for late in late {
                // A depth of the head is a mean, but tokens wait for the first one.
                let seconds = (late.best - alone) * self.depths(source) as f64;
                let each = seconds / (late.waiting - 1) as f64;
                table = table.map(|table| table.with_waiting(source, each));
            }
        }
        Ok(table)
    }

    /// Runs all passes, interleaved: once to warm up, then in repetitions while time and tokens
    /// last.
    fn run_interleaved(&mut self, passes: &mut [MeasuredPass]) -> Result<(), DeviceError> {
        for repetition in 0..=REPETITIONS {
            for pass in &mut *passes {
                let rows = pass.rows.div_ceil(pass.seqs.len());
                if self.tokens_left <= rows.max(pass.waiting + 1) {
                    continue;
                }
                if pass.draft.is_some() {
                    self.precede_draft(&pass.seqs, pass.waiting)?;
                }
                let seconds = match pass.draft {
                    Some(DraftSource::Mtp) => self.draft_mtp(&pass.seqs)?,
                    Some(_) => self.draft_block(&pass.seqs)?,
                    None => self.verify(&pass.seqs, pass.rows, CommitExtent::Root)?,
                };
                if repetition > 0 {
                    pass.best = pass.best.min(seconds);
                }
            }
            if repetition > 0 && (self.clock)() > self.end {
                break;
            }
        }
        Ok(())
    }

    /// What comes before a draft in a text: `waiting` tokens are committed, and the weights of the
    /// target have taken the place of the draft's in the caches of the processor. The last pass
    /// also waits for what a device may have deferred of the commit.
    fn precede_draft(&mut self, seqs: &[SeqId], waiting: usize) -> Result<(), DeviceError> {
        self.verify(seqs, waiting * seqs.len(), CommitExtent::Chain)?;
        self.verify(seqs, seqs.len(), CommitExtent::Nothing)?;
        Ok(())
    }

    /// Passes of a measured draft.
    fn depths(&self, source: DraftSource) -> usize {
        match source {
            DraftSource::Mtp => DraftSource::Mtp
                .depth(self.runner.info())
                .min(MTP_USUAL_DEPTH),
            DraftSource::Block | DraftSource::Suffix => 1,
        }
    }

    /// Seconds of a draft of the draft model for some sequences.
    fn draft_block(&mut self, seqs: &[SeqId]) -> Result<f64, DeviceError> {
        let root = TokenId(0);
        let items: Vec<DraftItem> = seqs.iter().map(|&seq| DraftItem { seq, root }).collect();
        let depth = DraftSource::Block.depth(self.runner.info());
        let start = (self.clock)();
        self.runner.draft(&items, depth, 8)?;
        Ok(((self.clock)() - start).as_secs_f64())
    }

    /// Mean seconds of a depth of the multi-token-prediction head, over a usual draft.
    fn draft_mtp(&mut self, seqs: &[SeqId]) -> Result<f64, DeviceError> {
        let info = self.runner.info();
        let depths = self.depths(DraftSource::Mtp);
        let k = info.vocab.min(8);
        let start = (self.clock)();
        let mut parent = None;
        for depth in 0..depths {
            let width = if depth == 0 { 1 } else { MTP_MEASURED_WIDTH };
            let rows = |&seq: &SeqId| {
                (0..width).map(move |token| MtpDraftItem {
                    seq,
                    parent,
                    token: TokenId(token),
                })
            };
            let items: Vec<MtpDraftItem> = seqs.iter().flat_map(rows).collect();
            self.runner.draft_mtp(&items, k)?;
            parent = Some(parent.map_or(MtpRow(0), |_| {
                MtpRow((1 + (depth as u32 - 1) * MTP_MEASURED_WIDTH) as u16)
            }));
        }
        Ok(((self.clock)() - start).as_secs_f64() / depths as f64)
    }

    /// Seconds of a verify of chains with `rows` in all, and of a commit.
    fn verify(
        &mut self,
        seqs: &[SeqId],
        rows: usize,
        committed: CommitExtent,
    ) -> Result<f64, DeviceError> {
        let vocab = self.runner.info().vocab;
        let chain = |at: usize, rows: usize| {
            let tokens: Vec<TokenId> = (at..at + rows).map(|i| varied(i, vocab)).collect();
            Tree::chain(&tokens).unwrap_or_else(|_| Tree::root(TokenId(0)))
        };
        let all = seqs.len();
        let trees: Vec<Tree> = (0..all)
            .map(|i| chain(i * rows, (rows + i) / all))
            .collect();
        let requests: Vec<Vec<LogitsRequest>> = trees
            .iter()
            .map(|t| vec![LogitsRequest::top_k(1); t.len()])
            .collect();
        let mut items = Vec::with_capacity(all);
        let mut paths = Vec::with_capacity(all);
        for ((&seq, tree), requests) in seqs.iter().zip(&trees).zip(&requests) {
            items.push(VerifyItem {
                seq,
                tree,
                requests,
            });
            let end = match committed {
                CommitExtent::Chain => tree.len() - 1,
                CommitExtent::Root | CommitExtent::Nothing => 0,
            };
            paths.push((seq, tree.path_to(NodeIdx(end as u16))));
        }
        let commits: Vec<CommitItem<'_>> = paths
            .iter()
            .map(|(seq, path)| CommitItem { seq: *seq, path })
            .collect();
        let start = (self.clock)();
        self.runner.verify(&items)?;
        if committed == CommitExtent::Nothing {
            for seq in seqs {
                self.runner.discard(*seq)?;
            }
            return Ok(((self.clock)() - start).as_secs_f64());
        }
        // A device may defer part of a commit to the next pass. In repetitions each commit is
        // followed by one.
        self.runner.commit(&commits)?;
        self.tokens_left -= paths.iter().map(|(_, path)| path.len()).max().unwrap_or(0);
        Ok(((self.clock)() - start).as_secs_f64())
    }
}

/// Tokens as unlike each other as those of a text: rows of equal tokens choose equal experts, and a
/// step of few experts costs less than a real one.
fn varied(i: usize, vocab: usize) -> TokenId {
    /// The golden ratio's share of a 32-bit circle.
    const STEP: u32 = 0x9E37_79B9;
    let place = u64::from((i as u32).wrapping_mul(STEP));
    let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
    TokenId(((place * u64::from(vocab)) >> 32) as u32)
}

/// The measured `(rows, seconds)`. More rows cannot cost less; such a time was disturbed.
fn points(passes: &[MeasuredPass]) -> Vec<(usize, f64)> {
    let measured = passes.iter().filter(|pass| pass.best.is_finite());
    let mut points: Vec<(usize, f64)> = measured.map(|pass| (pass.rows, pass.best)).collect();
    let mut least = f64::INFINITY;
    for point in points.iter_mut().rev() {
        least = least.min(point.1);
        point.1 = least;
    }
    points
}

/// Whether two rows cost nearly as much as several.
fn is_padded(verify: &[(usize, f64)]) -> bool {
    let of = |rows: usize| verify.iter().find(|point| point.0 == rows);
    matches!((of(2), of(PADDED.0)), (Some(two), Some(many)) if many.1 < two.1 * PADDED.1)
}

/// The table of a padding device, with the step behind each size; other tables unchanged.
fn with_steps(verify: &[(usize, f64)]) -> Vec<(usize, f64)> {
    let padded = is_padded(verify);
    let mut all = Vec::with_capacity(2 * verify.len());
    for (i, point) in verify.iter().enumerate() {
        all.push(*point);
        if let Some(next) = verify.get(i + 1).filter(|next| next.0 > point.0 + 1)
            && padded
            && point.0 >= PADDED.0
        {
            all.push((point.0 + 1, next.1));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeSet;

    use conformance::fake::{FakeDraft, FakeRunner, FakeSpec, RunnerMethod};

    use super::*;

    thread_local! {
        /// Microseconds since the test began.
        static NOW: Cell<u64> = const { Cell::new(0) };
    }

    fn now() -> Duration {
        Duration::from_micros(NOW.get())
    }

    #[test]
    fn measurement_interleaves_passes_and_restores_the_runner() {
        let spec = FakeSpec {
            draft: Some(FakeDraft {
                depth: 7,
                acceptance_rate: 0.5,
            }),
            ..FakeSpec::default()
        };
        let mut calls = 0_u64;
        // Every fifth pass is delayed.
        let hook = move |call| {
            calls += 1;
            let delay = if calls.is_multiple_of(5) { 9000 } else { 0 };
            let micros = match call {
                RunnerMethod::Draft => 300 + delay,
                RunnerMethod::Verify => 1000 + delay,
                _ => 0,
            };
            NOW.set(NOW.get() + micros);
        };
        let mut runner = FakeRunner::new(spec.clone()).with_hook(hook);
        let before = runner.capacity();
        let at = (now as Clock, Duration::from_secs(1));
        let costs = measure(&mut runner, SourceSet::ALL, at).unwrap().unwrap();
        assert_eq!(runner.capacity(), before);
        for n in [1, 2] {
            assert!((costs.draft(DraftSource::Block, n) - 300e-6).abs() < 1e-9);
        }
        assert!(costs.draft_points(DraftSource::Mtp).is_empty());
        for rows in [1, 5, 17, 64] {
            assert!((costs.verify(rows) - 1000e-6).abs() < 1e-9, "{rows}");
        }
        // The shared cost of several sequences is measured, not guessed.
        let sizes = |points: &[(usize, f64)]| points.iter().map(|p| p.0).collect::<Vec<_>>();
        assert_eq!(sizes(costs.draft_points(DraftSource::Block)), [1, 2, 4, 8]);
        assert!(sizes(costs.verify_points()).ends_with(&[64, 65, 128, 129, 256, 257, 512]));
        let stopped_clock = measure(
            &mut FakeRunner::new(spec),
            SourceSet::ALL,
            (|| Duration::ZERO, Duration::ZERO),
        );
        assert_eq!(stopped_clock.unwrap(), None);
    }

    #[test]
    fn runner_without_drafts_is_measured_for_suffix_matches() {
        let hook = |_| NOW.set(NOW.get() + 1000);
        let mut plain = FakeRunner::new(FakeSpec::default()).with_hook(hook);
        let at = (now as Clock, Duration::from_secs(1));
        let costs = measure(&mut plain, SourceSet::ALL, at).unwrap().unwrap();
        assert!(costs.verify(9) > 0.0);
        for source in DraftSource::ALL {
            assert!(costs.draft_points(source).is_empty());
        }
    }

    #[test]
    fn head_is_measured_over_several_depths() {
        let spec = FakeSpec {
            mtp: Some(FakeDraft {
                depth: 7,
                acceptance_rate: 0.5,
            }),
            ..FakeSpec::default()
        };
        let hook = move |call| {
            let micros = match call {
                RunnerMethod::Draft => 100,
                RunnerMethod::Verify => 1000,
                _ => 0,
            };
            NOW.set(NOW.get() + micros);
        };
        let runner = FakeRunner::new(spec).with_hook(hook);
        let mut runner = contract::checked::CheckedRunner::new(runner);
        let at = (now as Clock, Duration::from_secs(1));
        let costs = measure(&mut runner, SourceSet::ALL, at).unwrap().unwrap();
        for n in [1, 4] {
            // A depth is one pass of this clock.
            let depth = costs.draft(DraftSource::Mtp, n);
            assert!((depth - 100e-6).abs() < 1e-9, "{costs:?}");
        }
    }

    #[test]
    fn padded_devices_get_step_shaped_costs() {
        let padded = [(1, 7.0), (2, 7.4), (8, 7.4), (16, 8.3), (24, 9.6)];
        let found = with_steps(&padded);
        let expected = [
            (1, 7.0),
            (2, 7.4),
            (8, 7.4),
            (9, 8.3),
            (16, 8.3),
            (17, 9.6),
            (24, 9.6),
        ];
        assert_eq!(found, expected);
        let straight = [(1, 0.7), (2, 0.8), (8, 2.0), (16, 3.4)];
        assert_eq!(with_steps(&straight), straight);
    }

    #[test]
    fn measured_rows_have_different_tokens_of_the_vocabulary() {
        for vocab in [64, 1000, 248_320] {
            let tokens: BTreeSet<TokenId> = (0..64).map(|i| varied(i, vocab)).collect();
            let least = if vocab == 64 { 48 } else { 64 };
            assert!(tokens.len() >= least, "{} of 64 in {vocab}", tokens.len());
            assert!(tokens.iter().all(|token| token.index() < vocab));
        }
        assert_eq!(varied(usize::MAX, 1), TokenId(0));
    }

    #[test]
    fn measured_costs_never_fall_with_rows() {
        let pass = |(rows, best)| MeasuredPass {
            seqs: Vec::new(),
            draft: None,
            rows,
            waiting: 0,
            best,
        };
        let passes = [(1, 0.6), (8, 8.0), (16, 3.4), (24, f64::INFINITY)].map(pass);
        assert_eq!(points(&passes), [(1, 0.6), (8, 3.4), (16, 3.4)]);
    }
}
