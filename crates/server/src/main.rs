//! The `hearth` executable; all code is in the library for tests.

use std::process::ExitCode;

use mimalloc::MiMalloc;
use server::open::bundled::Bundled;

/// Sequences allocate and free buffers of many sizes. glibc's per-thread arenas fragment and grow;
/// mimalloc returns free pages to the system.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Provenance: `models/README.md`.
const EMBER: Bundled = Bundled {
    name: "ember",
    gguf: include_bytes!("../../../models/ember/ember.gguf"),
    draft: include_bytes!("../../../models/ember/ember-draft.gguf"),
};

fn main() -> ExitCode {
    server::commands::main(EMBER)
}
