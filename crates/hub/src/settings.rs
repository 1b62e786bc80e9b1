//! Settings of the hub, from the variables that other programs of the hub read too.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::HubError;

/// The hub itself.
const ENDPOINT: &str = "https://huggingface.co";
/// Variables of a proxy, in the order in which `ureq` reads them.
const PROXY_VARIABLES: [&str; 6] = [
    "ALL_PROXY",
    "all_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "HTTP_PROXY",
    "http_proxy",
];

/// Where the hub is, where its cache is, and how to ask.
#[derive(Debug, Clone)]
pub struct HubSettings {
    /// The hub's address, without a slash at its end (`HF_ENDPOINT`).
    pub endpoint: String,
    /// The cache (`HF_HUB_CACHE`, or `hub` in `HF_HOME`).
    pub cache: PathBuf,
    /// The folder of files from other servers, as the hub's cache has no place for them.
    pub downloads: PathBuf,
    /// The access token, sent to the endpoint only (`HF_TOKEN`, or the token file).
    pub token: Option<String>,
    /// No request leaves the machine (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Use the proxy of the environment.
    pub proxy: bool,
    /// Sizes and times of downloads.
    pub tuning: Tuning,
}

/// Free bytes of the file system of a folder.
pub type FreeSpace = fn(&Path) -> io::Result<u64>;

/// Sizes and times of downloads.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// Connections of one file.
    pub connections: usize,
    /// Bytes of a range request.
    pub segment_bytes: u64,
    /// Bytes between two records of what is there, and two looks at the free space.
    pub record_bytes: u64,
    /// Attempts without a new byte before a download gives up.
    pub attempts: u32,
    /// The wait after the first failed attempt; it doubles with each.
    pub backoff: Duration,
    /// The longest wait, also where the server asks for more.
    pub max_wait: Duration,
    /// The longest silence of a server.
    pub read_timeout: Duration,
    /// How the free space is measured.
    pub free_space: FreeSpace,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            connections: 4,
            segment_bytes: 64 << 20,
            record_bytes: 16 << 20,
            attempts: 8,
            backoff: Duration::from_millis(500),
            max_wait: Duration::from_secs(120),
            read_timeout: Duration::from_secs(30),
            free_space,
        }
    }
}

/// Bytes that a user without special rights can still write.
fn free_space(folder: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

impl HubSettings {
    /// Settings of a user, from environment variables that `variable` looks up.
    ///
    /// # Errors
    /// [`HubError::NoHome`] if neither `HOME` nor a cache folder is set,
    /// [`HubError::ProxySetting`] for a proxy variable that is no address.
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<HubSettings, HubError> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let home = set("HOME").map(PathBuf::from);
        let path = |name: &str| {
            let value = PathBuf::from(set(name)?);
            match (value.strip_prefix("~"), &home) {
                (Ok(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(value),
            }
        };
        let user_cache = path("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")));
        let hub_home = path("HF_HOME").or_else(|| Some(user_cache.as_ref()?.join("huggingface")));
        let cache = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| Some(hub_home.as_ref()?.join("hub")))
            .ok_or(HubError::NoHome)?;
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(hub_home.as_ref()?.join("token")));
        let token = text("HF_TOKEN")
            .or_else(|| text("HUGGING_FACE_HUB_TOKEN"))
            .or_else(|| fs::read_to_string(token_file?).ok())
            .map(|token| token.trim().to_owned())
            .filter(|token| !token.is_empty());
        let is_on = |name: &str| {
            let value = text(name).unwrap_or_default().to_ascii_uppercase();
            ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
        };
        for name in PROXY_VARIABLES {
            if let Some(value) = text(name)
                && let Err(error) = ureq::Proxy::new(&value)
            {
                return Err(HubError::ProxySetting {
                    variable: name,
                    detail: error.to_string(),
                });
            }
        }
        let downloads = user_cache.map(|dir| dir.join("hearth").join("models"));
        Ok(HubSettings {
            endpoint: text("HF_ENDPOINT")
                .map(|endpoint| endpoint.trim_end_matches('/').to_owned())
                .unwrap_or_else(|| ENDPOINT.to_owned()),
            downloads: downloads.unwrap_or_else(|| cache.join("hearth-models")),
            cache,
            token,
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
            proxy: true,
            tuning: Tuning::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<HubSettings, HubError> {
        HubSettings::from_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    fn cache(variables: &[(&str, &str)]) -> String {
        settings(variables).unwrap().cache.display().to_string()
    }

    #[test]
    fn cache_folder_follows_the_variables_of_the_hub() {
        let home = ("HOME", "/users/a");
        assert_eq!(cache(&[home]), "/users/a/.cache/huggingface/hub");
        let xdg = ("XDG_CACHE_HOME", "/c");
        assert_eq!(cache(&[home, xdg]), "/c/huggingface/hub");
        let hub = ("HF_HOME", "~/hf");
        assert_eq!(cache(&[home, xdg, hub]), "/users/a/hf/hub");
        let exact = ("HF_HUB_CACHE", "/exact");
        assert_eq!(cache(&[home, xdg, hub, exact]), "/exact");
        assert!(matches!(settings(&[]), Err(HubError::NoHome)));
    }

    #[test]
    fn token_comes_from_the_variable_or_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).unwrap().token, None);
        fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let by_file = settings(&[("HF_HOME", home)]).unwrap().token;
        assert_eq!(by_file.as_deref(), Some("hf_file"));
        let by_variable = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_x")]).unwrap();
        assert_eq!(by_variable.token.as_deref(), Some("hf_x"));
    }

    #[test]
    fn endpoint_offline_mode_and_proxies_are_read() {
        let home = ("HOME", "/h");
        let all = settings(&[
            home,
            ("HF_ENDPOINT", "https://mirror.example/"),
            ("HF_HUB_OFFLINE", "yes"),
        ])
        .unwrap();
        assert_eq!(all.endpoint, "https://mirror.example");
        assert!(all.offline);
        assert!(!settings(&[home, ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
        let wrong = settings(&[home, ("HTTPS_PROXY", "ftp://proxy")]);
        assert!(
            matches!(
                wrong,
                Err(HubError::ProxySetting {
                    variable: "HTTPS_PROXY",
                    ..
                })
            ),
            "{wrong:?}"
        );
        settings(&[home, ("HTTPS_PROXY", "http://user:pass@proxy:3128")]).unwrap();
    }
}
