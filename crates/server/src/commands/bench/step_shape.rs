//! Shapes of the verify steps to measure.

use anyhow::{Context, bail};
use contract::Tree;

/// The trees of a verify step: their number, and the nodes of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepShape {
    pub(super) trees: usize,
    pub(super) nodes: usize,
}

/// Parses a list such as `1,24,4x8`.
///
/// # Errors
/// If an item is not a positive number or a pair, or has more nodes than a step can have.
pub(super) fn parse_shapes(list: &str) -> anyhow::Result<Vec<StepShape>> {
    list.split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
        .map(parse_shape)
        .collect()
}

fn parse_shape(text: &str) -> anyhow::Result<StepShape> {
    let (trees, nodes) = text.split_once('x').unwrap_or(("1", text));
    let count = |text: &str| {
        text.parse::<usize>()
            .ok()
            .filter(|n| *n > 0)
            .with_context(|| format!("--verify {text}: use numbers such as 24, or 4x8"))
    };
    let shape = StepShape {
        trees: count(trees)?,
        nodes: count(nodes)?,
    };
    if shape.trees * shape.nodes > Tree::MAX_NODES {
        bail!(
            "--verify {text}: use at most {} nodes in all",
            Tree::MAX_NODES
        );
    }
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_shapes_parse_and_are_bounded() {
        assert_eq!(
            parse_shape("24").unwrap(),
            StepShape {
                trees: 1,
                nodes: 24
            }
        );
        assert_eq!(
            parse_shape("4x8").unwrap(),
            StepShape { trees: 4, nodes: 8 }
        );
        for wrong in ["0", "x", "4x", "65", "8x9", "many"] {
            assert!(parse_shape(wrong).is_err(), "{wrong}");
        }
    }
}
