//! The real executable: what each command does, says and refuses.

mod client;
mod errors;
mod files;
mod help;
mod process;
mod running;
mod serving;
