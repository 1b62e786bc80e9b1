use std::time::Duration;

use crate::stats::StepTimes;

use super::online::OnlineCostModel;
use super::table::{CostTable, DraftUse};
use crate::speculation::sources::{DraftSource, SourceSet};

/// A draft of the draft model for one sequence.
const BLOCK: DraftUse = DraftUse {
    block: 1,
    mtp: 0,
    mtp_depths: 0,
    waiting: [0; 3],
};
use super::tree_sizes::{NodeAcceptance, choose_sizes};

fn table() -> CostTable {
    CostTable::new(vec![(1, 1.0), (8, 1.7), (16, 4.0)])
        .and_then(|table| table.with_draft(DraftSource::Block, vec![(1, 0.5), (2, 1.0)]))
        .unwrap()
}

#[test]
fn costs_are_interpolated_and_extrapolated_linearly() {
    let costs = table();
    for (rows, seconds) in [(1, 1.0), (8, 1.7), (12, 2.85), (16, 4.0), (31, 7.0)] {
        assert!((costs.verify(rows) - seconds).abs() < 1e-9, "{rows}");
    }
    assert!((costs.draft(DraftSource::Block, 4) - 2.0).abs() < 1e-9);
    assert!(costs.draft(DraftSource::Mtp, 4) == 0.0 && costs.draft(DraftSource::Suffix, 4) == 0.0);
    for bad in [vec![], vec![(2, 1.0), (1, 1.0)], vec![(1, f64::NAN)]] {
        assert_eq!(CostTable::new(bad.clone()), None);
        assert_eq!(table().with_draft(DraftSource::Mtp, bad), None);
    }
}

#[test]
fn tokens_that_wait_add_to_the_drafts_that_store_them() {
    let costs = table().with_waiting(DraftSource::Block, 0.01);
    let late = DraftUse {
        waiting: [30, 50, 50],
        ..BLOCK
    };
    assert!((costs.drafts(late) - costs.drafts(BLOCK) - 0.3).abs() < 1e-9);
    for noise in [-0.1, f64::NAN, f64::INFINITY] {
        let costs = costs.clone().with_waiting(DraftSource::Block, noise);
        assert_eq!(costs.drafts(late), costs.drafts(BLOCK));
    }
}

#[test]
fn cost_model_follows_slower_steps_and_ignores_a_stopped_clock() {
    let ms = Duration::from_millis;
    let mut cost_model = OnlineCostModel::new(table());
    cost_model.observe((8, BLOCK), StepTimes::default());
    assert_eq!(cost_model.now(), &table());
    let times = StepTimes {
        draft: ms(1000),
        verify: ms(2000),
        commit: ms(550),
    };
    for _ in 0..40 {
        cost_model.observe((8, BLOCK), times);
    }
    let now = cost_model.now();
    assert!(
        (now.draft(DraftSource::Block, 1) - 1.0).abs() < 0.01
            && (now.verify(8) - 2.55).abs() < 0.01
    );
    // Distant sizes follow more slowly.
    assert!(now.verify(16) > 5.5 && now.verify(1) > 1.05 && now.verify(1) < 1.3);
    let before = now.verify(8);
    // One delayed step moves little.
    let held_up = StepTimes {
        verify: ms(90_000),
        ..times
    };
    cost_model.observe((8, BLOCK), held_up);
    assert!(cost_model.now().verify(8) < 1.21 * before);
}

/// Steps without drafts whose times are 0.7 to 3 times `seconds`, most of them near it.
fn plain_rounds(cost_model: &mut OnlineCostModel, n: usize, seconds: f64) {
    let mut rng = 5_u64;
    for _ in 0..n {
        // Knuth's MMIX generator; its high bits suffice here.
        rng = rng
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let draw = (rng >> 40) as f64 / f64::from(1 << 24);
        let times = StepTimes {
            verify: Duration::from_secs_f64(seconds * (0.7 + 2.3 * draw.powi(6))),
            ..StepTimes::default()
        };
        cost_model.observe((1, DraftUse::default()), times);
    }
}

#[test]
fn noise_of_small_passes_leaves_large_costs_unchanged() {
    let mut cost_model = OnlineCostModel::new(table());
    let before = table().verify(16) / table().verify(1);
    for _ in 0..20 {
        plain_rounds(&mut cost_model, 500, 1.0);
        let now = cost_model.now();
        let deviation = now.verify(16) / now.verify(1) / before;
        assert!((0.7..1.4).contains(&deviation), "{deviation}");
        assert!(
            (0.3..0.8).contains(&now.draft(DraftSource::Block, 1)),
            "{now:?}"
        );
    }
}

#[test]
fn cost_model_recovers_after_a_slow_period() {
    let mut cost_model = OnlineCostModel::new(table());
    let times = |ms: u64| StepTimes {
        draft: Duration::from_millis(ms),
        verify: Duration::from_millis(8 * ms),
        ..StepTimes::default()
    };
    // Drafts and large passes take three times as long as measured, and then drafting stops.
    for _ in 0..60 {
        cost_model.observe((16, BLOCK), times(1500));
    }
    assert!(
        cost_model.now().draft(DraftSource::Block, 1) > 1.4 && cost_model.now().verify(16) > 11.0
    );
    plain_rounds(&mut cost_model, 1500, 1.0);
    let now = cost_model.now();
    assert!(
        now.draft(DraftSource::Block, 1) < 0.7 && now.verify(16) < 5.5,
        "{now:?}"
    );
}

#[test]
fn max_speedup_assumes_full_acceptance() {
    let block = SourceSet::of(&[DraftSource::Block]);
    // Eight rows of 1.7 and a draft of 0.5 for eight tokens that take 8 in plain decoding.
    assert!((table().max_speedup(block, 7) - 8.0 / 2.2).abs() < 1e-9);
    assert!((table().max_speedup(block, 1) - 2.0 / 1.6).abs() < 1e-9);
    // The head drafts one depth per token, and a suffix match for nothing.
    let head = SourceSet::of(&[DraftSource::Mtp]);
    let table = table()
        .with_draft(DraftSource::Mtp, vec![(1, 0.3)])
        .unwrap();
    assert!((table.max_speedup(head, 1) - 2.0 / 1.4).abs() < 1e-9);
    let suffix = SourceSet::of(&[DraftSource::Suffix]);
    assert!((table.max_speedup(suffix, 7) - 8.0 / 1.7).abs() < 1e-9);
}

#[test]
fn confident_draft_gets_more_nodes_than_a_poor_one() {
    let sure = NodeAcceptance {
        base_nodes: 1,
        probabilities: vec![0.95; 15],
    };
    let poor = NodeAcceptance {
        base_nodes: 1,
        probabilities: vec![0.05; 15],
    };
    assert_eq!(choose_sizes(&table(), &[poor], (0.5, 0)).nodes, [0]);
    assert_eq!(choose_sizes(&table(), &[sure], (0.5, 0)).nodes, [7]);
}

#[test]
fn step_nodes_are_shared_by_expected_tokens() {
    let of = |probability: f64| NodeAcceptance {
        base_nodes: 1,
        probabilities: vec![probability; 15],
    };
    let sizes = choose_sizes(&table(), &[of(0.01), of(0.5)], (1.0, 0));
    assert_eq!(sizes.nodes, [0, 6]);
    assert!((sizes.tokens - 5.0).abs() < 1e-9 && (sizes.seconds - 2.7).abs() < 1e-9);
}
