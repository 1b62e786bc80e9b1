//! `hearth serve --script FILE`: a runner that replays replies from a file. Only the logits are
//! replaced: tokenizer, template, scheduler, parsers and streams are those of the served model.
//!
//! For testing clients whose prompts a small model cannot follow. The file has one JSON object per
//! line; empty lines and lines starting with `#` are skipped:
//!
//! ```text
//! {"step_ms": 2}
//! {"when": "read_file", "last": "What is in notes.txt", "think": "I should look.",
//!  "say": "<tool_call>\n<function=read_file>\n<parameter=path>\nnotes.txt\n</parameter>\n</function>\n</tool_call>"}
//! {"last": ["<tool_response>", "MARKER"], "say": "It says MARKER."}
//! {"say": "Hello."}
//! ```
//!
//! (Wrapped here; a line of the file is not.) The first line that matches the rendered prompt is
//! the reply. Without a match the reply is a fixed sentence, with a warning.
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
//! Sampling, penalties, masks and forced tokens apply to the replayed logits. After a forced
//! deviation the reply continues behind the common text or the next control token.

mod file;
mod reply;
mod runner;

pub use file::{Script, ScriptError};
pub use runner::{DEVICE, ScriptedRunner, WARNING};
