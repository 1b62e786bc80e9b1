//! Compute capabilities.

use std::fmt;

/// A compute capability: the compile target of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// Tens and units: 90 is compute capability 9.0.
    pub number: u32,
}

impl Arch {
    /// Parses `sm_86`, `86` or `sm_90a`. The number implies the trailing letter.
    pub fn parse(text: &str) -> Option<Arch> {
        let digits = text.strip_prefix("sm_").unwrap_or(text);
        let digits = digits.strip_suffix('a').unwrap_or(digits);
        let number = digits.parse().ok().filter(|n| (50..=200).contains(n))?;
        Some(Arch { number })
    }

    /// Whether a file under `kernels/` compiles for this target. The suffix `_sm90` restricts a
    /// file to 9.0.
    pub fn runs(self, file: &str) -> bool {
        let stem = file.strip_suffix(".cu").unwrap_or(file);
        match stem.rsplit_once("_sm") {
            Some((_, number)) if number.bytes().all(|b| b.is_ascii_digit()) => {
                number == self.number.to_string()
            }
            _ => true,
        }
    }

    /// Whether the target has programmatic dependent launch (`griddepcontrol`).
    pub fn has_pdl(self) -> bool {
        self.number >= 90
    }
}

impl fmt::Display for Arch {
    /// The full target name. From 9.0 on, the letter stands for architecture-specific
    /// instructions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = if self.number >= 90 { "a" } else { "" };
        write!(f, "sm_{}{exact}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arch_names_round_trip() {
        for (typed, meant) in [
            ("sm_90", "sm_90a"),
            ("90a", "sm_90a"),
            ("86", "sm_86"),
            ("sm_120a", "sm_120a"),
            ("sm_110", "sm_110a"),
            ("121", "sm_121a"),
        ] {
            assert_eq!(
                Arch::parse(typed).map(|a| a.to_string()).as_deref(),
                Some(meant)
            );
        }
        for wrong in ["", "sm_", "hopper", "900"] {
            assert_eq!(Arch::parse(wrong), None, "{wrong}");
        }
    }
}
