//! The systemd service, where one is installed.

use std::path::Path;
use std::process::Command;

use super::finding::{Finding, Severity};

/// Folders of units, in systemd's order of precedence.
const UNIT_FOLDERS: [&str; 3] = [
    "/etc/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

pub(super) fn findings() -> Vec<Finding> {
    let units = UNIT_FOLDERS
        .iter()
        .map(|folder| Path::new(folder).join("hearth.service"));
    let Some(unit) = units.into_iter().find(|unit| unit.is_file()) else {
        return Vec::new();
    };
    let properties = [
        "show",
        "hearth.service",
        "-p",
        "ActiveState,Result,NRestarts",
    ];
    let shown = Command::new("systemctl").args(properties).output();
    let shown = shown.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    vec![of_unit(&unit, &shown.unwrap_or_default())]
}

/// The state of a unit from what `systemctl show` prints; nothing where systemd does not run.
fn of_unit(unit: &Path, shown: &str) -> Finding {
    let value = |name: &str| {
        let mut lines = shown.lines().filter_map(|line| line.split_once('='));
        lines
            .find(|(key, _)| *key == name)
            .map_or("", |(_, value)| value)
    };
    let (state, result) = (value("ActiveState"), value("Result"));
    let restarts: u64 = value("NRestarts").parse().unwrap_or(0);
    let place = unit.display().to_string();
    let finding = |severity, what: String| Finding::new("service", severity, what).at(place);
    match state {
        "" => finding(
            Severity::Note,
            "installed; systemd does not run here".to_owned(),
        ),
        "failed" => finding(Severity::Warning, format!("failed: {result}")).action(
            "`journalctl -u hearth -n 50` shows why; `systemctl restart hearth` starts it again",
        ),
        "active" if restarts > 0 => finding(
            Severity::Warning,
            format!("active, after {restarts} restarts by itself"),
        )
        .action("`journalctl -u hearth` shows why it ended"),
        "active" => finding(Severity::Ok, "active".to_owned()),
        state => finding(Severity::Note, state.to_owned()).action(
            "`systemctl start hearth` starts it now, `systemctl enable hearth` with the machine",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_the_service_have_their_severity() {
        let of = |shown: &str| of_unit(Path::new("/u"), shown).severity;
        assert_eq!(
            of("ActiveState=active\nResult=success\nNRestarts=0\n"),
            Severity::Ok
        );
        assert_eq!(
            of("ActiveState=active\nResult=success\nNRestarts=3\n"),
            Severity::Warning
        );
        assert_eq!(of("ActiveState=inactive\n"), Severity::Note);
        assert_eq!(of(""), Severity::Note);
        let failed = of_unit(Path::new("/u"), "ActiveState=failed\nResult=exit-code\n");
        assert_eq!(failed.severity, Severity::Warning);
        assert!(failed.what.contains("exit-code") && failed.action.contains("journalctl"));
    }
}
