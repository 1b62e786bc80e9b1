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

fn plan(budget: Option<(usize, usize)>) -> CoursePlan {
    let mut ends = TokenMask::none(100);
    ends.insert(TokenId(STOP));
    CoursePlan {
        opening: Opening::Thinking,
        tags: Some(ThinkTags {
            open: TokenId(OPEN),
            close: TokenId(CLOSE),
        }),
        budget: budget.map(|(tokens, soft)| Budget {
            tokens,
            soft,
            lift: 8.0,
            sentence_ends: Arc::new(ends),
        }),
        closing: ids(&[70, CLOSE, 71]).into(),
        gap: ids(&[71]).into(),
        in_thinking: None,
        call_tags: Some((TokenId(CALL), TokenId(CALL_END))),
        grammar: None,
    }
}

/// Says `wanted`, one after another, where nothing is forced, and gives all that came.
fn said(course: &mut Course, wanted: &[u32], told_every: usize) -> Vec<u32> {
    let mut all: Vec<TokenId> = Vec::new();
    let mut told = 0;
    let mut wanted = wanted.iter();
    loop {
        let token = match course.forced(&all[told..]) {
            Some(token) => token,
            None => match wanted.next() {
                Some(token) => TokenId(*token),
                None => break,
            },
        };
        all.push(token);
        if all.len() - told == told_every {
            course.advance(&all[told..]);
            told = all.len();
        }
    }
    course.advance(&all[told..]);
    all.iter().map(|token| token.0).collect()
}

#[track_caller]
fn check(plan: CoursePlan, wanted: &[u32], expected: &[u32], close: Close) {
    for told_every in [1, 2, 3, 100] {
        let reins = Arc::new(Reins::default());
        let mut course = Course::new(Arc::new(plan.clone()), Arc::clone(&reins));
        assert_eq!(
            said(&mut course, wanted, told_every),
            expected,
            "told every {told_every}"
        );
        assert_eq!(reins.close(), close, "told every {told_every}");
    }
}

#[test]
fn thinking_is_closed_when_its_budget_is_used_up_and_never_in_the_text() {
    check(
        plan(Some((3, 0))),
        &[1, 2, 3, 4, 5, 6, 7, 8],
        &[1, 2, 3, 70, CLOSE, 71, 4, 5, 6, 7, 8],
        Close::Hard,
    );
    let early = [1, CLOSE, 3, 4, 5, 6, 7, 8];
    check(plan(Some((3, 0))), &early, &early, Close::Natural);
    check(plan(None), &early, &early, Close::Natural);
    let mut text = plan(Some((3, 0)));
    text.opening = Opening::Text;
    check(text, &[1, 2, 3, 4, 5], &[1, 2, 3, 4, 5], Close::Natural);
}

#[test]
fn a_reply_may_open_its_thinking_itself() {
    let mut either = plan(Some((2, 0)));
    either.opening = Opening::Either;
    check(
        either.clone(),
        &[OPEN, 1, 2, 3],
        &[OPEN, 1, 2, 70, CLOSE, 71, 3],
        Close::Hard,
    );
    check(either, &[1, OPEN, 3, 4], &[1, OPEN, 3, 4], Close::Natural);
}

#[test]
fn a_call_in_thinking_is_not_cut() {
    let call = [1, CALL, 2, 3, 4, 5, CALL_END, 6, 7];
    check(plan(Some((3, 0))), &call, &call, Close::Natural);
}

#[test]
fn the_end_of_a_sentence_leans_towards_the_close_the_more_the_nearer_the_budget() {
    let lean = |path: &[u32]| {
        let mut course = Course::new(Arc::new(plan(Some((8, 4)))), Arc::default());
        course.lean(&ids(path)).map(|lean| {
            assert_eq!(lean.token, TokenId(CLOSE));
            lean.lift
        })
    };
    assert_eq!(lean(&[1, 1, STOP]), None, "too early");
    assert_eq!(lean(&[1, 1, 1, STOP]), Some(2.0));
    assert_eq!(lean(&[1, 1, 1, 1, STOP]), Some(4.0));
    assert_eq!(lean(&[1, 1, 1, 1, 1, 1, STOP]), Some(8.0));
    assert_eq!(lean(&[1, 1, 1, 1, STOP, 1]), None, "in a sentence");
    assert_eq!(lean(&[1, 1, 1, STOP, CLOSE]), None, "in the text");
    check(
        plan(Some((8, 4))),
        &[1, 1, 1, 1, STOP, CLOSE, 3],
        &[1, 1, 1, 1, STOP, CLOSE, 3],
        Close::Soft,
    );
}

#[test]
fn reins_close_thinking_between_two_rounds() {
    let reins = Arc::new(Reins::default());
    let mut course = Course::new(Arc::new(plan(None)), Arc::clone(&reins));
    course.advance(&ids(&[1, 2]));
    reins.close_thinking();
    assert_eq!(course.forced(&ids(&[3])), None, "not in the middle of one");
    course.advance(&ids(&[3]));
    assert_eq!(
        said(&mut course, &[4], 2),
        [70, CLOSE, 71, 4],
        "the closing text comes whole"
    );
    assert_eq!(reins.close(), Close::Hard);
}
