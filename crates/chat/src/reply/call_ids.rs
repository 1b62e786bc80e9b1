//! Ids of tool calls.

/// Generates ids that look random and depend on the seed alone.
#[derive(Debug, Clone)]
pub(super) struct CallIds {
    state: u64,
}

impl CallIds {
    pub(super) fn new(seed: u64) -> CallIds {
        CallIds { state: seed }
    }

    /// `call_` and 24 hexadecimal digits.
    pub(super) fn next(&mut self) -> String {
        let (high, low) = (self.draw(), self.draw());
        format!("call_{high:016x}{:08x}", low >> 32)
    }

    /// One step of the splitmix64 generator.
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_ids_are_unique_and_well_formed() {
        let mut ids = CallIds::new(1);
        let (one, two) = (ids.next(), ids.next());
        assert_ne!(one, two);
        assert_ne!(one, CallIds::new(2).next());
        let digits = one.strip_prefix("call_").unwrap();
        assert_eq!(digits.len(), 24);
        assert!(digits.chars().all(|digit| digit.is_ascii_hexdigit()));
    }
}
