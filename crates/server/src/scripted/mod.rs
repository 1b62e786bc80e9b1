//! `hearth serve --script FILE`: a runner that replays replies from a file. Only the logits are
//! replaced: tokenizer, template, scheduler, parsers and streams are those of the served model.
//!
//! For testing clients whose prompts a small model cannot follow. The file has one JSON object per
//! line; empty lines and lines starting with `#` are skipped:
//!
//! ```text
//! {"step_ms": 2}
//! {"when": "read_file", "last": "What is in notes.txt", "think": "I should look.",
//!  "say": "<tool_call>\n<function=read_file>\n<parameter=path>\nnotes.txt\n</parameter>\n
//!  </function>\n</tool_call>"}
//! {"last": ["<tool_response>", "MARKER"], "say": "It says MARKER."}
//! {"say": "Hello."}
//! ```
//!
//! (The second line is wrapped here; lines of the file are not.) The first line that matches the
//! rendered prompt is the reply. Without a match the reply is a fixed sentence, with a warning.
//!
//! | key | meaning |
//! |---|---|
//! | `when` | texts that the prompt must contain, control tokens as text; a string or a list |
//! | `last` | the same for the part of the prompt after the model's last reply |
//! | `unless` | texts that the prompt must not contain |
//! | `unless_last` | the same for the part after the model's last reply |
//! | `think` | reasoning, written in the model's tags unless the prompt has closed them |
//! | `say` | the reply, with calls in the model's own markup |
//! | `step_ms` | alone on a line: duration of each pass in milliseconds |
//!
//! Sampling, penalties, masks and forced tokens apply to the replayed logits. After a forced
//! deviation, the reply continues after the common text or the next control token.

mod file;
mod reply;
mod runner;

pub use file::{Script, ScriptError};
pub use runner::{DEVICE, ScriptedRunner, WARNING};
