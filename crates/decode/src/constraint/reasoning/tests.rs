use super::*;
use contract::TokenId;

const OPEN: u32 = 90;
const CLOSE: u32 = 91;
const CALL: u32 = 92;
const CALL_END: u32 = 93;
/// Ends a sentence.
const STOP: u32 = 5;

fn ids(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().map(|id| TokenId(*id)).collect()
}

fn plan(budget: Option<(usize, usize)>) -> ReasoningConfig {
    let mut sentence_ends = TokenMask::none(100);
    sentence_ends.insert(TokenId(STOP));
    ReasoningConfig {
        initial_phase: InitialPhase::Reasoning,
        tags: Some(ReasoningTags {
            open: TokenId(OPEN),
            close: TokenId(CLOSE),
        }),
        budget: budget.map(|(tokens, soft)| ReasoningBudget {
            tokens,
            soft_window: soft,
            boost: 8.0,
            sentence_ends: Arc::new(sentence_ends),
        }),
        end_sequence: ids(&[70, CLOSE, 71]).into(),
        separator: ids(&[71]).into(),
        allowed_in_reasoning: None,
        tool_call_tags: Some((TokenId(CALL), TokenId(CALL_END))),
        grammar: None,
    }
}

/// Generates `wanted` token by token except where a token is forced, and returns all tokens.
fn generate(machine: &mut ReasoningMachine, wanted: &[u32], advance_every: usize) -> Vec<u32> {
    let mut all: Vec<TokenId> = Vec::new();
    let mut advanced = 0;
    let mut wanted = wanted.iter();
    loop {
        let token = match machine.forced(&all[advanced..]) {
            Some(token) => token,
            None => match wanted.next() {
                Some(token) => TokenId(*token),
                None => break,
            },
        };
        all.push(token);
        if all.len() - advanced == advance_every {
            machine.advance(&all[advanced..]);
            advanced = all.len();
        }
    }
    machine.advance(&all[advanced..]);
    all.iter().map(|token| token.0).collect()
}

#[track_caller]
fn check(plan: ReasoningConfig, wanted: &[u32], expected: &[u32], close: ReasoningEnd) {
    for advance_every in [1, 2, 3, 100] {
        let handle = Arc::new(ReasoningHandle::default());
        let mut machine = ReasoningMachine::new(Arc::new(plan.clone()), Arc::clone(&handle));
        assert_eq!(
            generate(&mut machine, wanted, advance_every),
            expected,
            "advanced every {advance_every}"
        );
        assert_eq!(handle.end(), close, "advanced every {advance_every}");
    }
}

#[test]
fn reasoning_ends_at_its_budget_and_answer_is_unlimited() {
    check(
        plan(Some((3, 0))),
        &[1, 2, 3, 4, 5, 6, 7, 8],
        &[1, 2, 3, 70, CLOSE, 71, 4, 5, 6, 7, 8],
        ReasoningEnd::Hard,
    );
    let early = [1, CLOSE, 3, 4, 5, 6, 7, 8];
    check(plan(Some((3, 0))), &early, &early, ReasoningEnd::Natural);
    check(plan(None), &early, &early, ReasoningEnd::Natural);
    let mut text = plan(Some((3, 0)));
    text.initial_phase = InitialPhase::Answer;
    check(
        text,
        &[1, 2, 3, 4, 5],
        &[1, 2, 3, 4, 5],
        ReasoningEnd::Natural,
    );
}

#[test]
fn model_may_open_reasoning_itself() {
    let mut either = plan(Some((2, 0)));
    either.initial_phase = InitialPhase::Undecided;
    check(
        either.clone(),
        &[OPEN, 1, 2, 3],
        &[OPEN, 1, 2, 70, CLOSE, 71, 3],
        ReasoningEnd::Hard,
    );
    check(
        either,
        &[1, OPEN, 3, 4],
        &[1, OPEN, 3, 4],
        ReasoningEnd::Natural,
    );
}

#[test]
fn tool_call_within_reasoning_is_not_interrupted() {
    let call = [1, CALL, 2, 3, 4, 5, CALL_END, 6, 7];
    check(plan(Some((3, 0))), &call, &call, ReasoningEnd::Natural);
}

#[test]
fn sentence_ends_boost_reasoning_end_more_near_the_budget() {
    let boost = |path: &[u32]| {
        let mut machine = ReasoningMachine::new(Arc::new(plan(Some((8, 4)))), Arc::default());
        machine.logit_boost(&ids(path)).map(|boost| {
            assert_eq!(boost.token, TokenId(CLOSE));
            boost.boost
        })
    };
    assert_eq!(boost(&[1, 1, STOP]), None, "too early");
    assert_eq!(boost(&[1, 1, 1, STOP]), Some(2.0));
    assert_eq!(boost(&[1, 1, 1, 1, STOP]), Some(4.0));
    assert_eq!(boost(&[1, 1, 1, 1, 1, 1, STOP]), Some(8.0));
    assert_eq!(boost(&[1, 1, 1, 1, STOP, 1]), None, "within a sentence");
    assert_eq!(boost(&[1, 1, 1, STOP, CLOSE]), None, "in the answer");
    check(
        plan(Some((8, 4))),
        &[1, 1, 1, 1, STOP, CLOSE, 3],
        &[1, 1, 1, 1, STOP, CLOSE, 3],
        ReasoningEnd::Soft,
    );
}

#[test]
fn handle_ends_reasoning_between_decode_steps() {
    let handle = Arc::new(ReasoningHandle::default());
    let mut machine = ReasoningMachine::new(Arc::new(plan(None)), Arc::clone(&handle));
    machine.advance(&ids(&[1, 2]));
    handle.end_reasoning();
    assert_eq!(machine.forced(&ids(&[3])), None, "not within a call");
    machine.advance(&ids(&[3]));
    assert_eq!(
        generate(&mut machine, &[4], 2),
        [70, CLOSE, 71, 4],
        "the closing text comes whole"
    );
    assert_eq!(handle.end(), ReasoningEnd::Hard);
}
