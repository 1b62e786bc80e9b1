//! `strftime_now`: the date in UTC, for templates that print it.

use jiff::Timestamp;
use jiff::fmt::strtime::BrokenDownTime;
use jiff::tz::TimeZone;

/// Directives that are formatted; a dash before one drops its padding.
const DIRECTIVES: &str = "aAbBdeFhHIjmMnpStTyYzZ%";

/// Formats `now_unix` (seconds since 1970-01-01 UTC) in C's `strftime` notation.
///
/// Other directives stay as they are. Times outside the years -9999 to 9999 are clamped.
pub(super) fn strftime(now_unix: i64, format: &str) -> String {
    let seconds = now_unix.clamp(Timestamp::MIN.as_second(), Timestamp::MAX.as_second());
    let now = Timestamp::from_second(seconds).expect("the seconds are in range");
    let now = BrokenDownTime::from(&now.to_zoned(TimeZone::UTC));
    let mut out = String::new();
    let mut rest = format;
    while let Some(start) = rest.find('%') {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let code = rest[1..].trim_start_matches('-').chars().next();
        let code = code.filter(|code| DIRECTIVES.contains(*code));
        let formatted = code.and_then(|code| {
            let (plain, unpadded) = (format!("%{code}"), format!("%-{code}"));
            let directive = [plain, unpadded]
                .into_iter()
                .find(|one| rest.starts_with(one))?;
            let text = now.to_string(&directive).ok()?;
            Some((directive.len(), text))
        });
        match formatted {
            Some((length, text)) => {
                out.push_str(&text);
                rest = &rest[length..];
            }
            None => {
                out.push('%');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times_are_formatted() {
        for (unix, format, text) in [
            (0, "%Y-%m-%d %H:%M:%S %A", "1970-01-01 00:00:00 Thursday"),
            (951_782_400, "%d %b %Y, day %j", "29 Feb 2000, day 060"),
            (1_709_251_199, "%F %T %a", "2024-02-29 23:59:59 Thu"),
            (
                1_735_689_599,
                "%j %-d %B %y %I%p",
                "366 31 December 24 11PM",
            ),
            (-1, "%F %T", "1969-12-31 23:59:59"),
            (4_107_542_400, "%F", "2100-03-01"),
            (0, "100%% %q %", "100% %q %"),
        ] {
            assert_eq!(strftime(unix, format), text, "{unix} {format}");
        }
    }

    #[test]
    fn extreme_times_do_not_overflow() {
        for unix in [i64::MIN, i64::MAX] {
            assert!(!strftime(unix, "%F %T %j %A").is_empty());
        }
    }
}
