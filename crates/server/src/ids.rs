//! Random identifiers for clients, which keep them across restarts.

use rand::RngExt;

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const LENGTH: usize = 28;

/// `prefix` and 28 random letters and digits, such as `chatcmpl-…`.
pub fn random(prefix: &str) -> String {
    let mut rng = rand::rng();
    let mut id = String::with_capacity(prefix.len() + LENGTH);
    id.push_str(prefix);
    for _ in 0..LENGTH {
        id.push(char::from(ALPHABET[rng.random_range(0..ALPHABET.len())]));
    }
    id
}

/// Seed of a request without one.
pub fn random_seed() -> u64 {
    rand::rng().random()
}

/// Seconds since 1970, for `created`.
pub fn unix_now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_carry_their_prefix_and_do_not_repeat() {
        let ids: std::collections::HashSet<String> = (0..1000).map(|_| random("cmpl-")).collect();
        assert_eq!(ids.len(), 1000);
        assert!(
            ids.iter()
                .all(|id| id.len() == 5 + LENGTH && id.starts_with("cmpl-"))
        );
    }
}
