//! Progress bar on a terminal, log lines elsewhere.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// All progress bars, so that log lines can be written between them.
static BARS: LazyLock<MultiProgress> =
    LazyLock::new(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));

/// The bar of bytes.
const BYTES: &str = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
/// Log interval without a terminal.
const QUIET: Duration = Duration::from_secs(5);

/// Progress, on standard error.
pub(crate) struct TaskProgress {
    what: String,
    /// Counts items, not bytes.
    things: bool,
    /// `None` without a terminal.
    bar: Option<ProgressBar>,
    last_line: Cell<Instant>,
    /// When the bytes began to come, and how many were there.
    start: (Instant, u64),
}

impl TaskProgress {
    /// Byte progress with a label.
    pub(crate) fn new(what: impl Into<String>) -> TaskProgress {
        TaskProgress::drawn(what.into(), BYTES, false, None)
    }

    /// Item progress with a label.
    pub(crate) fn counting(what: impl Into<String>) -> TaskProgress {
        TaskProgress::drawn(
            what.into(),
            "{msg} {wide_bar} {pos}/{len} {eta}",
            true,
            None,
        )
    }

    /// A bar that begins at so much of so much, if that is known.
    fn drawn(what: String, template: &str, things: bool, from: Option<(u64, u64)>) -> TaskProgress {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(template).expect("both templates are valid");
            // An unknown length is not drawn as a full bar.
            let bar = match from {
                Some((done, total)) => ProgressBar::new(total).with_position(done),
                None => ProgressBar::no_length(),
            };
            let bar = bar.with_style(style).with_message(what.clone());
            let bar = BARS.add(bar);
            bar.reset_eta();
            bar
        });
        TaskProgress {
            what,
            things,
            bar,
            last_line: Cell::new(Instant::now()),
            start: (Instant::now(), from.map_or(0, |(done, _)| done)),
        }
    }

    /// Byte progress that begins at `done_bytes`, which do not count for the rate.
    pub(crate) fn continuing(
        what: impl Into<String>,
        done_bytes: u64,
        total_bytes: u64,
    ) -> TaskProgress {
        let from = Some((done_bytes, total_bytes));
        TaskProgress::drawn(what.into(), BYTES, false, from)
    }

    /// Sets the progress.
    pub(crate) fn set(&self, done_bytes: u64, total_bytes: u64) {
        match &self.bar {
            Some(bar) => {
                bar.set_length(total_bytes);
                bar.set_position(done_bytes);
            }
            None if self.last_line.get().elapsed() >= QUIET => {
                self.last_line.set(Instant::now());
                let percent = percent(done_bytes, total_bytes);
                if self.things {
                    tracing::info!("{}: {percent} % of {total_bytes}", self.what);
                } else {
                    let (start, before) = self.start;
                    let came = done_bytes.saturating_sub(before);
                    let rest = total_bytes.saturating_sub(done_bytes);
                    let pace = pace_text(came, rest, start.elapsed());
                    let total = bytes_text(total_bytes);
                    tracing::info!("{}: {percent} % of {total}{pace}", self.what);
                }
            }
            None => {}
        }
    }
}

impl Drop for TaskProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            BARS.remove(bar);
        }
    }
}

/// The rate and the time left, with a comma before each; nothing without a rate.
fn pace_text(came: u64, rest: u64, elapsed: Duration) -> String {
    let rate = came as f64 / elapsed.as_secs_f64();
    if !rate.is_normal() {
        return String::new();
    }
    let left = (rest as f64 / rate) as u64;
    let left = match left {
        0..60 => format!("{left} s"),
        60..3600 => format!("{} min {} s", left / 60, left % 60),
        _ => format!("{} h {} min", left / 3600, left / 60 % 60),
    };
    format!(", {}/s, {left} left", bytes_text(rate as u64))
}

/// Integer percentage; 100 for an empty total.
pub(crate) fn percent(done: u64, total: u64) -> u64 {
    u64::try_from(u128::from(done) * 100 / u128::from(total.max(1)))
        .unwrap_or(100)
        .min(100)
}

/// Log lines that could not be written.
static LOST_LOG_LINES: AtomicU64 = AtomicU64::new(0);

/// Number of log lines that could not be written, as to a full disk or a closed pipe.
pub(crate) fn lost_log_lines() -> u64 {
    LOST_LOG_LINES.load(Ordering::Relaxed)
}

/// Standard error for log lines; bars are suspended during a write.
///
/// Writing never fails: a lost line is counted, and the caller goes on.
pub(crate) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if BARS.suspend(|| io::stderr().write_all(bytes)).is_err() {
            LOST_LOG_LINES.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A size in binary units.
pub(crate) fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.2} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_format_in_the_largest_unit() {
        assert_eq!(bytes_text(1023), "1023 B");
        assert_eq!(bytes_text(1536), "1.50 KiB");
        assert_eq!(bytes_text(5 << 40), "5.00 TiB");
    }

    #[test]
    fn pace_is_rate_and_time_left() {
        let pace = |came, rest, seconds| pace_text(came, rest, Duration::from_secs(seconds));
        assert_eq!(pace(10 << 20, 5 << 20, 10), ", 1.00 MiB/s, 5 s left");
        assert_eq!(
            pace(10 << 20, 90 << 20, 10),
            ", 1.00 MiB/s, 1 min 30 s left"
        );
        assert_eq!(
            pace(10 << 20, 4000 << 20, 10),
            ", 1.00 MiB/s, 1 h 6 min left"
        );
        assert_eq!(
            (pace(0, 9, 10), pace(9, 9, 0)),
            (String::new(), String::new())
        );
    }

    #[test]
    fn percentages_stay_between_0_and_100() {
        assert_eq!(percent(1, 3), 33);
        assert_eq!((percent(0, 0), percent(5, 4)), (0, 100));
        assert_eq!(percent(u64::MAX, u64::MAX), 100);
    }
}
