//! The block kinds of a model, each over all rows of a pass.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod delta_chunked;
pub(crate) mod dense;
pub(crate) mod draft;
mod experts;
pub(crate) mod ffn;
pub(crate) mod head;
pub(crate) mod softmax;
