//! A flag that is refused, and what to do instead.

/// How many values follow a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Takes {
    Nothing,
    One,
    Many,
}

/// A flag that is refused.
pub(super) struct Refused {
    pub(super) flag: &'static str,
    pub(super) takes: Takes,
    /// Values that ask for the only behaviour there is; they are accepted silently.
    pub(super) neutral: &'static [&'static str],
    /// What to do instead.
    pub(super) instead: &'static str,
}

/// As the neutral values of a flag: whatever it says, the behaviour is the same.
pub(super) const ANY: [&str; 1] = ["*"];
/// Values of a switch that is off.
pub(super) const OFF: [&str; 5] = ["", "0", "false", "no", "off"];
pub(super) const fn one(
    flag: &'static str,
    neutral: &'static [&'static str],
    instead: &'static str,
) -> Refused {
    Refused {
        flag,
        takes: Takes::One,
        neutral,
        instead,
    }
}

pub(super) const fn many(flag: &'static str, instead: &'static str) -> Refused {
    Refused {
        flag,
        takes: Takes::Many,
        neutral: &[],
        instead,
    }
}

pub(super) const fn switch(
    flag: &'static str,
    neutral: &'static [&'static str],
    instead: &'static str,
) -> Refused {
    Refused {
        flag,
        takes: Takes::Nothing,
        neutral,
        instead,
    }
}
