//! In which order the steps of a model sum: the one place that decides it.

use contract::OpenPlan;

use super::layers::shape;
use crate::launch::attention::Card;
use crate::launch::delta::Exactness;

/// In which order a step of trees sums what a row of it sees.
///
/// Products, norms and the head give a row the same bits whoever shares the step, so this is about attention and about
/// the delta rule. A draft's own layers and the ends of prompts always take the fastest: what a draft proposes is judged,
/// and a prompt is read alike whatever is made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// In an order that follows from the row's path alone: a node of a tree has the bits of its token fed by itself.
    ByPath,
    /// In whichever is fastest for the trees that share the step.
    Fast,
}

impl Sums {
    /// What a plan is opened with: what it promises comes first, then what was wished for.
    pub(crate) fn of(open: &OpenPlan, card: Card, wish: Option<Sums>) -> Sums {
        match (open.batch_invariant, wish) {
            (true, _) => Sums::ByPath,
            (false, Some(wish)) => wish,
            (false, None) if Sums::have_forms(open, card) => Sums::ByPath,
            (false, None) => Sums::Fast,
        }
    }

    /// Whether all layers have forms for sums by path that cost little more than the fastest ones: on compute capability
    /// 9.0, for heads and caches that attention by position is made for (`kernels/attention/decode_fixed_splits_sm90.cu`).
    fn have_forms(open: &OpenPlan, card: Card) -> bool {
        let by_path = Sums::ByPath.on(card);
        let mut layers = open.target.attention_layers();
        let eps = open.target.norm_eps;
        card.warpgroups && layers.all(|a| shape(a, open, eps).wants_f16_queries(by_path))
    }

    /// The form of the delta rule over trees.
    pub(super) fn of_states(self) -> Exactness {
        match self {
            Sums::ByPath => Exactness::Sequential,
            Sums::Fast => Exactness::Factors,
        }
    }

    /// The card as attention is launched on it.
    pub(super) fn on(self, card: Card) -> Card {
        Card {
            path_order: self == Sums::ByPath,
            ..card
        }
    }
}
