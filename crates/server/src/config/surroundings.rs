//! Variables of other programs that change how serving works.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use std::env;

/// The variables, as they are set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The GPUs that programs of this user may see (`CUDA_VISIBLE_DEVICES`).
    pub visible_gpus: Option<String>,
    /// The name of a variable that sends plain HTTP through a proxy.
    pub proxy: Option<&'static str>,
    /// The hosts that need no proxy (`no_proxy`).
    pub no_proxy: String,
}

/// The variables of this process.
pub fn of_process() -> Surroundings {
    let set = |name: &&'static str| env::var_os(name).is_some_and(|value| !value.is_empty());
    Surroundings {
        visible_gpus: env::var("CUDA_VISIBLE_DEVICES").ok(),
        proxy: ["http_proxy", "all_proxy", "ALL_PROXY"]
            .into_iter()
            .find(set),
        no_proxy: ["no_proxy", "NO_PROXY"]
            .into_iter()
            .find_map(|name| env::var(name).ok())
            .unwrap_or_default(),
    }
}

impl Surroundings {
    /// The variable that sends requests to this machine through a proxy, if one does.
    pub fn proxy_of_loopback(&self) -> Option<&'static str> {
        let is_loopback = |host: &str| matches!(host.trim(), "*" | "127.0.0.1" | "127.0.0.0/8");
        self.proxy
            .filter(|_| !self.no_proxy.split(',').any(is_loopback))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_without_an_exception_for_loopback_is_found() {
        for (proxy, no_proxy, found) in [
            (None, "", None),
            (Some("http_proxy"), "", Some("http_proxy")),
            (Some("http_proxy"), "example.org", Some("http_proxy")),
            (Some("http_proxy"), "example.org, 127.0.0.1", None),
            (Some("http_proxy"), "*", None),
        ] {
            let surroundings = Surroundings {
                proxy,
                no_proxy: no_proxy.to_owned(),
                ..Surroundings::default()
            };
            assert_eq!(surroundings.proxy_of_loopback(), found, "{no_proxy}");
        }
    }
}
