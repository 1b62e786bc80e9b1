//! Whether the bits of a token's logits may depend on what else shares its decode step.

/// In which order the kernels of a decode step sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numerics {
    /// In an order that follows from a row's ancestors alone: a tree node has the bits of its token
    /// decoded alone.
    BatchInvariant,
    /// In whichever order is fastest for the trees that share the step.
    Fastest,
}
