//! The text after a panic: what a bug report needs.

use std::io::Write;
use std::panic;

use crate::commands::doctor::machine::{program_and_system, text};

/// From now on a panic is followed by a request for a report and by the head of one.
pub(super) fn describe_panics() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        before(info);
        // A closed standard error leaves nowhere to report to.
        let _ = write!(std::io::stderr(), "{}", request());
    }));
}

/// No driver is asked: it may be what failed.
fn request() -> String {
    format!(
        "\nThis is a bug in hearth. Please report it with the lines above, the output of `hearth doctor`, and:\n{}",
        text(&program_and_system())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_for_a_report_has_version_and_system() {
        let text = request();
        for part in [
            crate::version::VERSION,
            "hearth doctor",
            "\nsystem ",
            "\ncpu ",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
