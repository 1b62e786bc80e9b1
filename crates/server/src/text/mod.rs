//! Text: from a request to tokens, and from tokens to the parts of a reply.

pub mod completion_logprobs;
pub mod constraints;
pub mod logprobs;
pub mod model_context;
pub mod prepare;
pub mod prompt_logprobs;
pub mod repetition;
pub mod reply;
pub mod sampling_params;
pub mod token_rules;
