//! `hearth serve --script FILE`: a runner that says what a file says. It replaces the logits and nothing else:
//! tokenizer, chat template, scheduler, parsers and streams are the real ones of the model that is served.
//!
//! For trying clients whose prompts a small model cannot follow. The file has one JSON object a line; empty lines
//! and lines that begin with `#` are skipped:
//!
//! ```text
//! {"step_ms": 2}
//! {"when": "read_file", "last": "What is in notes.txt", "think": "I should look.",
//!  "say": "<tool_call>\n<function=read_file>\n<parameter=path>\nnotes.txt\n</parameter>\n</function>\n</tool_call>"}
//! {"last": ["<tool_response>", "MARKER"], "say": "It says MARKER."}
//! {"say": "Hello."}
//! ```
//!
//! (Shown broken; a line of the file is not.) The first line that fits the rendered prompt is said; none means a
//! warning and a fixed sentence.
//!
//! | key | meaning |
//! |---|---|
//! | `when` | texts that must all stand in the prompt, control tokens written out; one string or a list |
//! | `last` | the same, in the part of the prompt since the model last spoke |
//! | `unless` | texts of which none may stand in the prompt |
//! | `unless_last` | texts of which none may stand in the part since the model last spoke |
//! | `think` | reasoning, written between the model's thinking tags unless the prompt has closed them already |
//! | `say` | the reply, with calls in the model's own markup |
//! | `step_ms` | alone on a line: how long each pass takes, in milliseconds |
//!
//! Sampling, penalties, masks and forced tokens act on the replayed logits as on any others: where they force
//! something else, the reply goes on behind the text it has in common with it, or behind the next control token.

mod file;
mod reply;
mod runner;

pub use file::{Script, ScriptError};
pub use runner::{DEVICE, ScriptedRunner, WARNING};
