//! Drafts whose candidates depend on the token before: trees grow behind the candidates they belong
//! to.

use conformance::fake::{FakeDraft, FakeSpec};
use decode::{SchedulerConfig, SpeculationConfig, TreeInit};

use crate::fixture::{
    ENDLESS, SchedulerFixture, config, greedy, job, prompt, reference_outputs, spec,
};

/// Decode steps of 40 tokens, whose ids must be those of plain decoding.
fn steps(acceptance_rate: f64, init: TreeInit) -> usize {
    let job = job(0, prompt(9, 1), greedy(40));
    let plain = reference_outputs(&spec(ENDLESS), &job).remove(0);
    let drafting = FakeSpec {
        draft: Some(FakeDraft {
            depth: 7,
            acceptance_rate,
        }),
        conditional_draft: true,
        ..spec(ENDLESS)
    };
    let config = SchedulerConfig {
        speculation: SpeculationConfig {
            init,
            ..SpeculationConfig::default()
        },
        ..config()
    };
    let mut fixture = SchedulerFixture::new(drafting, config);
    fixture.submit(job);
    fixture.finish();
    let outputs = &fixture.outputs()[&(0, 0)];
    assert_eq!(outputs.tokens, plain.tokens);
    outputs.stats.decode_steps
}

#[test]
fn perfect_conditional_draft_yields_whole_paths() {
    for init in [TreeInit::None, TreeInit::Chain, TreeInit::ChainOnly] {
        // 39 tokens after the first, 8 per step.
        assert_eq!(steps(1.0, init), 5, "{init:?}");
    }
}

#[test]
fn trees_follow_the_second_candidate_to_its_own_successors() {
    // The target's token is always the second candidate. A tree holds it from the first step on,
    // and a chain once calibration has learned it.
    for init in [TreeInit::None, TreeInit::ChainOnly] {
        let steps = steps(0.0, init);
        assert!(steps < 20, "{steps} steps for 39 tokens, {init:?}");
    }
}
