//! How long an unused model stays loaded: seconds, a time such as `5m`, or never an end.

use std::time::Duration;

use serde_json::Value;

/// The longest time that counts, in seconds: ten years.
const MAX_SECONDS: f64 = 10.0 * 365.0 * 86_400.0;

/// A time from the command line or a setting; `None` is for ever.
///
/// # Errors
/// If the text is no time.
pub fn parse(text: &str) -> Result<Option<Duration>, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ if text == "never" => return Ok(None),
        _ => return Err(form(text)),
    };
    let number: f64 = digits.parse().map_err(|_| form(text))?;
    if number < 0.0 {
        return Ok(None);
    }
    let seconds = number * unit;
    if seconds <= MAX_SECONDS {
        Ok(Some(Duration::from_secs_f64(seconds)))
    } else {
        Err(form(text))
    }
}

/// The field `keep_alive` of a request: a number of seconds or a text.
///
/// # Errors
/// If it is neither.
pub fn of_json(value: &Value) -> Result<Option<Duration>, String> {
    let time = match value {
        Value::Number(number) => parse(&number.to_string()),
        Value::String(text) => parse(text),
        other => Err(form(&other.to_string())),
    };
    time.map_err(|reason| format!("keep_alive: {reason}"))
}

fn form(text: &str) -> String {
    format!("{text} is no time; use seconds, a time such as 5m or 1h, or -1 for ever")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn times_are_seconds_or_have_a_unit_and_negative_ones_never_end() {
        for (text, seconds) in [
            ("0", 0),
            ("90", 90),
            ("5m", 300),
            ("1h", 3600),
            ("2d", 172_800),
        ] {
            assert_eq!(
                parse(text),
                Ok(Some(Duration::from_secs(seconds))),
                "{text}"
            );
        }
        assert_eq!(parse("500ms"), Ok(Some(Duration::from_millis(500))));
        for never in ["-1", "-1m", "never"] {
            assert_eq!(parse(never), Ok(None), "{never}");
        }
        for wrong in ["", "m", "5 minutes", "1e30", "NaN", "x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(of_json(&json!(1.5)), Ok(Some(Duration::from_millis(1500))));
        assert_eq!(of_json(&json!(-1)), Ok(None));
        assert!(of_json(&json!([5])).is_err());
    }
}
