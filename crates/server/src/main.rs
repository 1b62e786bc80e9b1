//! The `hearth` executable: everything is in the library, so that tests can reach it.

use std::process::ExitCode;

use server::bundled::Bundled;

/// See `models/README.md` for where it comes from.
const EMBER: Bundled = Bundled {
    name: "ember",
    gguf: include_bytes!("../../../models/ember/ember.gguf"),
    draft: include_bytes!("../../../models/ember/ember-draft.gguf"),
};

fn main() -> ExitCode {
    server::commands::main(EMBER)
}
