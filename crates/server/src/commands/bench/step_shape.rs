//! Shapes of the verify steps to measure.

use anyhow::{Context, bail};
use contract::Tree;

/// Trees of one verify call: so many, each of so many nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepShape {
    pub(super) trees: usize,
    pub(super) nodes: usize,
}

/// Trees from a list such as `1,24,4x8`.
pub(super) fn forms(list: &str) -> anyhow::Result<Vec<StepShape>> {
    list.split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
        .map(form)
        .collect()
}

fn form(text: &str) -> anyhow::Result<StepShape> {
    let (trees, nodes) = text.split_once('x').unwrap_or(("1", text));
    let count = |text: &str| {
        text.parse::<usize>()
            .ok()
            .filter(|n| *n > 0)
            .with_context(|| format!("--verify {text}: use numbers such as 24, or 4x8"))
    };
    let form = StepShape {
        trees: count(trees)?,
        nodes: count(nodes)?,
    };
    if form.trees * form.nodes > Tree::MAX_NODES {
        bail!("--verify {text}: at most {} nodes in all", Tree::MAX_NODES);
    }
    Ok(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_read_and_bounded() {
        assert_eq!(
            form("24").unwrap(),
            StepShape {
                trees: 1,
                nodes: 24
            }
        );
        assert_eq!(form("4x8").unwrap(), StepShape { trees: 4, nodes: 8 });
        for wrong in ["0", "x", "4x", "65", "8x9", "many"] {
            assert!(form(wrong).is_err(), "{wrong}");
        }
    }
}
