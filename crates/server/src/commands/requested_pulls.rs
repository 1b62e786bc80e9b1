//! Models that clients have pulled: who may, and which came.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use hub::{HubError, ModelName, PullEvent};

use crate::commands::hosting::ModelEntry;
use crate::config;
use crate::error::ApiError;
use crate::settings::model_pulls::{ModelPulls, PulledFile};

/// The names that clients have pulled since the start. A clone is another reference to them.
#[derive(Clone, Default)]
pub(super) struct RequestedPulls(Arc<Mutex<Vec<String>>>);

impl RequestedPulls {
    /// Whether clients of a server at this address may have models pulled.
    pub(super) fn policy(&self, address: SocketAddr, has_keys: bool) -> ModelPulls {
        if config::hub::of_user().is_ok_and(|hub| hub.is_offline()) {
            return ModelPulls::Refused("downloads are switched off; start it without --offline");
        }
        if !address.ip().is_loopback() && !has_keys {
            return ModelPulls::Refused(
                "anyone can reach it, so it pulls no models; start it with --api-key",
            );
        }
        let pulled = self.clone();
        ModelPulls::by(Arc::new(move |name, report| pulled.pull(name, report)))
    }

    /// The models that have come, for a server with several.
    pub(super) fn entries(&self) -> Vec<ModelEntry> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = names.iter().map(|name| ModelEntry {
            name: name.clone(),
            path: Some(PathBuf::from(name)),
            is_main: false,
        });
        entries.collect()
    }

    fn pull(&self, name: &str, report: &(dyn Fn(PulledFile) + Sync)) -> Result<(), ApiError> {
        let hub = config::hub::of_user().map_err(api_error)?;
        let parsed = hub.parse(name).map_err(api_error)?;
        // A client must not make the server send requests to addresses of its choice.
        if matches!(parsed, ModelName::Url(_)) {
            let message = format!("model: {name}: only models of the hub are pulled by requests");
            return Err(ApiError::invalid_param("model", message));
        }
        let digest = Mutex::new(None);
        hub.pull(&parsed, &|event| {
            if let Some(file) = progress(&digest, &event) {
                report(file);
            }
        })
        .map_err(api_error)?;
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
        Ok(())
    }
}

/// The progress that an event shows, if it is of a file. `digest` is that of the current file.
fn progress(digest: &Mutex<Option<String>>, event: &PullEvent<'_>) -> Option<PulledFile> {
    let mut digest = digest.lock().unwrap_or_else(PoisonError::into_inner);
    let (file, total_bytes, done_bytes, is_checking) = match *event {
        PullEvent::Start {
            file,
            size_bytes,
            have_bytes,
            hash,
        } => {
            *digest = hash.map(|hash| {
                let function = if hash.len() == 64 { "sha256" } else { "sha1" };
                format!("{function}:{hash}")
            });
            (file, size_bytes, have_bytes, false)
        }
        PullEvent::Progress {
            file,
            size_bytes,
            done_bytes,
        } => (file, size_bytes, done_bytes, false),
        PullEvent::Checking {
            file,
            size_bytes,
            done_bytes,
        } => (file, size_bytes, done_bytes, true),
        PullEvent::Waiting { .. } | PullEvent::Retrying { .. } | PullEvent::Done { .. } => {
            return None;
        }
    };
    Some(PulledFile {
        name: file.to_owned(),
        digest: digest.clone(),
        total_bytes,
        done_bytes,
        is_checking,
    })
}

fn api_error(error: HubError) -> ApiError {
    let message = error.to_string();
    match error {
        HubError::NotAName { .. } => ApiError::invalid_param("model", format!("model: {message}")),
        HubError::RepoNotFound { .. }
        | HubError::RevisionNotFound { .. }
        | HubError::FileNotFound { .. }
        | HubError::QuantNotFound { .. }
        | HubError::NoModel { .. }
        | HubError::MissingPart { .. } => ApiError::NotFound { message },
        HubError::Gated { .. } | HubError::Offline { .. } => ApiError::Forbidden { message },
        _ => ApiError::unavailable(message),
    }
}
