//! The `hearth` executable: everything is in the library, so that tests can reach it.

use std::process::ExitCode;

use mimalloc::MiMalloc;
use server::open::bundled::Bundled;

/// Sequences come and go with buffers of many sizes. The allocator of glibc keeps what they leave as holes of one
/// thread's arena and grows it for the next; this one gives whole pages back, so that memory follows what is open.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// See `models/README.md` for where it comes from.
const EMBER: Bundled = Bundled {
    name: "ember",
    gguf: include_bytes!("../../../models/ember/ember.gguf"),
    draft: include_bytes!("../../../models/ember/ember-draft.gguf"),
};

fn main() -> ExitCode {
    server::commands::main(EMBER)
}
