//! `strftime_now`: a date in UTC, for templates that tell the model what day it is.

use std::fmt::Write;

const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A moment taken apart, proleptic Gregorian, UTC.
struct Moment {
    year: i64,
    /// 1..=12
    month: i64,
    /// 1..=31
    day: i64,
    /// 1..=366
    day_of_year: i64,
    /// 0 is Monday.
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

impl Moment {
    fn new(unix: i64) -> Moment {
        let days = unix.div_euclid(86_400);
        let seconds = unix.rem_euclid(86_400);
        // Years begin in March here, so that the leap day is the last of its year; 400 of them
        // have 146,097 days.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_march_year =
            day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_march_year + 2) / 153;
        let day = day_of_march_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let month_index = usize::try_from(month - 1).expect("months are 1 to 12");
        Moment {
            year,
            month,
            day,
            day_of_year: before[month_index] + day + i64::from(leap && month > 2),
            weekday: usize::try_from((days + 3).rem_euclid(7)).expect("weekdays are 0 to 6"),
            hour: seconds / 3_600,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    fn month_name(&self) -> &'static str {
        MONTHS[usize::try_from(self.month - 1).expect("months are 1 to 12")]
    }
}

/// The moment `now_unix` (seconds since 1970-01-01 UTC) in C's `strftime` notation; a dash after the
/// percent sign drops padding; unknown letters stay as they are.
pub(super) fn strftime(now_unix: i64, format: &str) -> String {
    // Beyond these bounds the arithmetic above would overflow; the years are 5 digits long by then.
    let moment = Moment::new(now_unix.clamp(-(1 << 40), 1 << 40));
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        match letters.next() {
            None => out.push('%'),
            Some('-') => match letters.next() {
                None => out.push_str("%-"),
                Some(code) => write_field(&moment, code, false, &mut out),
            },
            Some(code) => write_field(&moment, code, true, &mut out),
        }
    }
    out
}

fn write_field(moment: &Moment, code: char, padded: bool, out: &mut String) {
    let twelve = match moment.hour % 12 {
        0 => 12,
        hour => hour,
    };
    let (number, width) = match code {
        'd' => (moment.day, 2),
        'm' => (moment.month, 2),
        'y' => (moment.year.rem_euclid(100), 2),
        'H' => (moment.hour, 2),
        'I' => (twelve, 2),
        'M' => (moment.minute, 2),
        'S' => (moment.second, 2),
        'j' => (moment.day_of_year, 3),
        'Y' => (moment.year, 1),
        _ => {
            match code {
                'A' => out.push_str(DAYS[moment.weekday]),
                'a' => out.push_str(&DAYS[moment.weekday][..3]),
                'B' => out.push_str(moment.month_name()),
                'b' | 'h' => out.push_str(&moment.month_name()[..3]),
                'p' => out.push_str(if moment.hour < 12 { "AM" } else { "PM" }),
                'e' => write!(out, "{:2}", moment.day).expect("writing to a string cannot fail"),
                'F' => {
                    write!(out, "{}-{:02}-{:02}", moment.year, moment.month, moment.day)
                        .expect("writing to a string cannot fail");
                }
                'T' => {
                    write!(
                        out,
                        "{:02}:{:02}:{:02}",
                        moment.hour, moment.minute, moment.second
                    )
                    .expect("writing to a string cannot fail");
                }
                'Z' => out.push_str("UTC"),
                'z' => out.push_str("+0000"),
                '%' => out.push('%'),
                'n' => out.push('\n'),
                't' => out.push('\t'),
                other => {
                    out.push('%');
                    out.push(other);
                }
            }
            return;
        }
    };
    let width = if padded { width } else { 1 };
    write!(out, "{number:0width$}").expect("writing to a string cannot fail");
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
