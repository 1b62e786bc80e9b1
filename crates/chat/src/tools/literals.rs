//! Numbers and booleans as Python reads them, written as JSON.

/// What `int(text)` gives, with all its digits.
pub(super) fn integer(text: &str) -> Option<String> {
    let (sign, digits) = split_sign(text.trim());
    let digits = plain_digits(digits)?;
    let digits = without_leading_zeros(&digits);
    Some(match digits {
        "0" => digits.to_owned(),
        digits => format!("{sign}{digits}"),
    })
}

/// What `float(text)` gives, if it is finite; integers keep all their digits.
pub(super) fn number(text: &str) -> Option<String> {
    if let Some(integer) = integer(text) {
        return Some(integer);
    }
    let (sign, rest) = split_sign(text.trim());
    let (mantissa, exponent) = match rest.split_once(['e', 'E']) {
        None => (rest, String::new()),
        Some((mantissa, exponent)) => {
            let (sign, digits) = split_sign(exponent);
            (mantissa, format!("e{sign}{}", plain_digits(digits)?))
        }
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let part = |digits: &str| match digits {
        "" => Some(String::new()),
        digits => plain_digits(digits),
    };
    let (whole, fraction) = (part(whole)?, part(fraction)?);
    let mut number = format!("{sign}{}", without_leading_zeros(&whole));
    if mantissa.contains('.') {
        number.push('.');
        number.push_str(if fraction.is_empty() { "0" } else { &fraction });
    }
    number.push_str(&exponent);
    let is_finite = number.parse::<f64>().is_ok_and(f64::is_finite);
    is_finite.then_some(number)
}

/// A spelled boolean, in any case.
pub(super) fn boolean(text: &str) -> Option<&'static str> {
    let text = text.trim();
    if text.eq_ignore_ascii_case("true") || text == "1" {
        Some("true")
    } else if text.eq_ignore_ascii_case("false") || text == "0" {
        Some("false")
    } else {
        None
    }
}

fn split_sign(text: &str) -> (&'static str, &str) {
    match text.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    }
}

/// Digits without the underscores that may separate them.
fn plain_digits(text: &str) -> Option<String> {
    let is_group =
        |group: &str| !group.is_empty() && group.bytes().all(|digit| digit.is_ascii_digit());
    text.split('_').all(is_group).then(|| text.replace('_', ""))
}

fn without_leading_zeros(digits: &str) -> &str {
    match digits.trim_start_matches('0') {
        "" => "0",
        rest => rest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_as_python_reads_them() {
        for (text, expected) in [
            ("5", Some("5")),
            (" -5\n", Some("-5")),
            ("+5", Some("5")),
            ("007", Some("7")),
            ("-0", Some("0")),
            ("1_000", Some("1000")),
            (
                "123456789012345678901234567890",
                Some("123456789012345678901234567890"),
            ),
            ("", None),
            ("-", None),
            ("_1", None),
            ("1__0", None),
            ("1.0", None),
            ("1e3", None),
            ("0x10", None),
            ("five", None),
        ] {
            assert_eq!(integer(text).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn numbers_are_read_as_python_reads_them() {
        for (text, expected) in [
            ("5", Some("5")),
            ("1e3", Some("1e3")),
            ("1E+3", Some("1e3")),
            ("1e-07", Some("1e-07")),
            ("-2.50", Some("-2.50")),
            (".5", Some("0.5")),
            ("5.", Some("5.0")),
            ("+1_0.2_5", Some("10.25")),
            ("007.5", Some("7.5")),
            ("0.1234567890123456789012", Some("0.1234567890123456789012")),
            ("1e999", None),
            (".", None),
            ("e5", None),
            ("inf", None),
            ("nan", None),
            ("1,5", None),
        ] {
            let got = number(text);
            assert_eq!(got.as_deref(), expected, "{text:?}");
            if let Some(got) = got {
                let json = serde_json::from_str::<serde_json::Value>(&got);
                assert!(json.is_ok_and(|json| json.is_number()), "{got}");
            }
        }
    }

    #[test]
    fn booleans_are_read_in_any_case() {
        for (text, expected) in [
            ("True", Some("true")),
            (" FALSE ", Some("false")),
            ("1", Some("true")),
            ("0", Some("false")),
            ("yes", None),
            ("", None),
        ] {
            assert_eq!(boolean(text), expected, "{text:?}");
        }
    }
}
