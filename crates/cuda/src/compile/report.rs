//! Resource usage of each entry as ptxas reports it.

/// Resource usage of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EntryReport {
    /// The `extern "C"` name.
    pub entry: String,
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes, spills included.
    pub stack_bytes: u32,
    /// Spill stores plus spill loads, in bytes.
    pub spill_bytes: u32,
    /// Static shared memory in bytes.
    pub shared_bytes: u32,
}

/// Parses the log of `--ptxas-options=-v`.
pub fn entry_reports(log: &str) -> Vec<EntryReport> {
    let mut reports: Vec<EntryReport> = Vec::new();
    // Device functions that were not inlined report properties of their own. They belong to no
    // entry.
    let mut is_entry = false;
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let entry = rest.split('\'').next().unwrap_or("").to_owned();
            reports.push(EntryReport {
                entry,
                ..EntryReport::default()
            });
            continue;
        }
        let Some(report) = reports.last_mut() else {
            continue;
        };
        if let Some(name) = line.split("Function properties for ").nth(1) {
            is_entry = name.trim() == report.entry;
        } else if line.contains("bytes stack frame") && is_entry {
            report.stack_bytes = before(line, " bytes stack frame");
            report.spill_bytes =
                before(line, " bytes spill stores") + before(line, " bytes spill loads");
        } else if line.contains("Used ") && line.contains(" registers") {
            report.registers = before(line, " registers");
            report.shared_bytes = before(line, " bytes smem");
        }
    }
    reports
}

/// The number before `words`, or 0.
fn before(line: &str, words: &str) -> u32 {
    line.split(words)
        .next()
        .filter(|head| head.len() < line.len())
        .and_then(|head| head.rsplit(|c: char| !c.is_ascii_digit()).next())
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptxas_log_yields_registers_spills_and_shared_memory() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'scale' for 'sm_90a'\n\
            ptxas info    : Function properties for scale\n\
            ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 10 registers, used 1 barriers, 4096 bytes smem, \
            380 bytes cmem[0]\n\
            ptxas info    : Function properties for helper\n\
            ptxas         .     64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Compiling entry function 'other' for 'sm_90a'\n\
            ptxas info    : Function properties for other\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 0 barriers\n";
        let reports = entry_reports(log);
        let scale = EntryReport {
            entry: "scale".to_owned(),
            registers: 10,
            stack_bytes: 16,
            spill_bytes: 20,
            shared_bytes: 4096,
        };
        assert_eq!(reports[0], scale);
        assert_eq!((reports[1].registers, reports[1].shared_bytes), (255, 0));
        assert_eq!(reports.len(), 2);
    }
}
