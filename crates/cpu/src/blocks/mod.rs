//! The block kinds of a model, each over all rows of a pass.

pub(crate) mod attention;
pub(crate) mod branches;
pub(crate) mod chunk;
pub(crate) mod delta;
pub(crate) mod draft;
pub(crate) mod ffn;
pub(crate) mod head;
mod softmax;
