//! Models that are known by name: their memory is planned without their files.

use std::path::Path;

use hub::{HubError, ModelName, Pick};
use model::synth::SynthSpec;

use crate::open::model_path::{ModelPathError, name_of};

/// What repositories write before a model's name: its publisher.
const PUBLISHERS: [&str; 5] = ["qwen_", "google_", "meta-llama_", "huggingfacetb_", "meta-"];
/// What repositories write behind it, for other weights of the same shape.
const VARIANTS: [&str; 4] = ["-instruct", "-it", "-pt", "-base"];

/// A model whose published shape and weight types are known.
pub(crate) struct KnownModel {
    /// Shape and types, such as `qwen3.5-27b:q4_k_m-published`.
    pub(crate) what: String,
    /// The same for the loader. Weights are random numbers.
    pub(crate) spec: SynthSpec,
}

impl KnownModel {
    /// The model of a name whose file cannot be read now: the hub is not asked, or gives no answer.
    /// `None` if the error is another, or the name is not known.
    pub(crate) fn instead(path: &Path, error: &anyhow::Error) -> Option<KnownModel> {
        let is_offline = matches!(error.downcast_ref(), Some(ModelPathError::NotPulled { .. }));
        let is_unreachable = matches!(
            error.downcast_ref(),
            Some(
                HubError::Unreachable { .. }
                    | HubError::Proxy { .. }
                    | HubError::Certificate { .. }
                    | HubError::RateLimited { .. }
                    | HubError::Server { .. }
            )
        );
        if !is_offline && !is_unreachable {
            return None;
        }
        match name_of(path.to_str()?)? {
            ModelName::Hub(name) => KnownModel::of(name.repo.as_str(), &name.pick),
            ModelName::Url(_) => None,
        }
    }

    /// The model of a repository. Its name is the shape's, such as `Qwen3.5-27B-GGUF`, perhaps with
    /// the publisher's before it and the kind of training behind it.
    fn of(repo: &str, pick: &Pick) -> Option<KnownModel> {
        let (_, name) = repo.split_once('/')?;
        let name = name.to_ascii_lowercase();
        let name = name.strip_suffix("-gguf").unwrap_or(&name);
        let before = PUBLISHERS.iter().find_map(|part| name.strip_prefix(part));
        let name = before.unwrap_or(name);
        let behind = VARIANTS.iter().find_map(|part| name.strip_suffix(part));
        let shape = behind.unwrap_or(name);
        let quant = match pick {
            Pick::Default => "Q4_K_M".to_owned(),
            Pick::Quant(quant) => quant.clone(),
            Pick::File(file) => hub::quant_of(file)?,
        };
        let types = quant.to_ascii_lowercase();
        [
            format!("{shape}:{types}-published"),
            format!("{shape}:{types}"),
        ]
        .into_iter()
        .find_map(|what| {
            let spec = SynthSpec::parse(&what).ok()?;
            Some(KnownModel { what, spec })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(word: &str, expected: Option<&str>) {
        let error = ModelPathError::NotPulled {
            name: word.to_owned(),
        };
        let found = KnownModel::instead(Path::new(word), &error.into());
        assert_eq!(found.map(|known| known.what).as_deref(), expected, "{word}");
    }

    #[test]
    fn repositories_are_known_by_shape_and_quantisation() {
        let published = "qwen3.5-27b:q4_k_m-published";
        check("unsloth/Qwen3.5-27B-GGUF", Some(published));
        check("bartowski/Qwen_Qwen3.5-27B-GGUF:Q4_K_M", Some(published));
        check(
            "hf://unsloth/Qwen3.5-27B-GGUF/Qwen3.5-27B-Q4_K_M.gguf",
            Some(published),
        );
        check("a/Qwen3-0.6B-GGUF:BF16", Some("qwen3-0.6b:bf16-published"));
        let llama = "llama-3.1-8b:q4_k_m-published";
        check("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", Some(llama));
        check(
            "google_x/google_gemma-3-4b-it-GGUF:Q8_0",
            Some("gemma-3-4b:q8_0-published"),
        );
        check("unsloth/Qwen3.5-27B-GGUF:UD-Q4_K_XL", None);
        check("a/Llama-3-8B-GGUF", None);
        check("https://example.org/qwen3.5-27b.gguf", None);
    }

    #[test]
    fn other_errors_than_a_silent_hub_stay() {
        let error = HubError::QuantNotFound {
            repo: "a/b".to_owned(),
            quant: "Q9".to_owned(),
            available: "Q8_0".to_owned(),
        };
        let found = KnownModel::instead(Path::new("a/Qwen3.5-27B-GGUF"), &error.into());
        assert!(found.is_none());
    }
}
