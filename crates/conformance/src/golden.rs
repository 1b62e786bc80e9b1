//! Golden values of the tiny models under `fixtures/models`.
//!
//! An independent implementation computed them in f32 on the same dequantized weights;
//! `fixtures/README.md` describes it. Each check returns how close a device came, or the worst
//! value.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::quant::dequantize_row;
use contract::{
    CommitItem, DeviceError, KvFormats, Limits, LoadConfig, LogitsRequest, NodeIdx, QuantType,
    Runner, SeqId, TokenId, Tree, VerifyItem,
};
use gguf::{FileBytes, GgufError, GgufFile, GgufWriter};
use model::ModelError;

use crate::compare::{Agreement, Difference, Tolerance, compare};

/// One tiny model and its manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct Golden {
    /// The stem of its files.
    pub stem: String,
    /// The tokens of its text.
    pub ids: Vec<TokenId>,
    /// Positions of the stored logits, ascending.
    pub logit_positions: Vec<usize>,
    /// Positions of the stored residual stream, ascending.
    pub hidden_positions: Vec<usize>,
    /// The reference implementation's greedy continuation of `ids`.
    pub greedy_ids: Vec<TokenId>,
    /// Difference of the best two logits at each greedy token.
    pub greedy_margins: Vec<f32>,
    /// Layers with a delta state.
    pub recurrent_layers: Vec<usize>,
    /// By logit position, how far the last chosen expert leads the first other one in any layer, in
    /// log-probabilities; empty for dense models.
    pub router_gaps: Vec<f32>,
}

/// Values with their dimensions, slowest first.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Values in that order.
    pub values: Vec<f32>,
}

/// The arrays of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoldenArray {
    /// `[n_logit_positions, vocab]`.
    Logits,
    /// `[n_layers + 1, n_hidden_positions, hidden]`; entry 0 is the embedding.
    Hidden,
    /// Delta state of layer 0 after `ids`, `[n_v_heads, k_dim, v_dim]`.
    Delta,
    /// Convolution window of layer 0 after `ids`, `[conv_taps - 1, channels]`.
    Conv,
}

impl GoldenArray {
    fn ending(self) -> &'static str {
        match self {
            GoldenArray::Logits => "logits.npy",
            GoldenArray::Hidden => "hidden.npy",
            GoldenArray::Delta => "delta.npy",
            GoldenArray::Conv => "conv.npy",
        }
    }
}

/// An error of a check, or a failed check.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// A fixture could not be read.
    #[error("{file}: {source}")]
    Io {
        /// The file's name.
        file: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A fixture does not have the format of its README.
    #[error("{file}: {detail}")]
    Malformed {
        /// The file's name.
        file: String,
        /// The expected content.
        detail: String,
    },
    /// The model could not be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device refused a call.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device differs too much from the reference implementation.
    #[error("{stem}, {what}: {difference}")]
    Differs {
        /// The model.
        stem: String,
        /// The compared array.
        what: String,
        /// The difference.
        difference: Difference,
    },
    /// The device's greedy token differs although the reference implementation's margin is large.
    #[error("{stem}: step {step} gives {found} instead of {expected}, which leads by {margin}")]
    Greedy {
        /// The model.
        stem: String,
        /// The step.
        step: usize,
        /// The device's token.
        found: TokenId,
        /// The reference implementation's token.
        expected: TokenId,
        /// The reference implementation's margin.
        margin: f32,
    },
}

impl Golden {
    /// Every model of the fixtures, sorted by name.
    pub fn all() -> Result<Vec<Golden>, GoldenError> {
        let folder = path("");
        let io = |source| GoldenError::Io {
            file: "fixtures/models".to_owned(),
            source,
        };
        let mut stems = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(io)? {
            let name = entry.map_err(io)?.file_name();
            let stem = name.to_str().and_then(|name| name.strip_suffix(".json"));
            stems.extend(stem.map(str::to_owned));
        }
        stems.sort_unstable();
        stems.iter().map(|stem| Golden::open(stem)).collect()
    }

    /// One model by the stem of its files.
    pub fn open(stem: &str) -> Result<Golden, GoldenError> {
        let file = format!("{stem}.json");
        let text = String::from_utf8_lossy(&read(&file)?).into_owned();
        let list = |field| {
            numbers(&text, field).ok_or_else(|| GoldenError::Malformed {
                file: file.clone(),
                detail: format!("no list of numbers named {field}"),
            })
        };
        let places = |field| -> Result<Vec<usize>, GoldenError> {
            Ok(list(field)?.into_iter().map(|n| n as usize).collect())
        };
        let tokens = |field| -> Result<Vec<TokenId>, GoldenError> {
            Ok(list(field)?
                .into_iter()
                .map(|n| TokenId(n as u32))
                .collect())
        };
        Ok(Golden {
            stem: stem.to_owned(),
            ids: tokens("ids")?,
            logit_positions: places("logit_positions")?,
            hidden_positions: places("hidden_positions")?,
            greedy_ids: tokens("greedy_ids")?,
            greedy_margins: list("greedy_margins")?
                .into_iter()
                .map(|n| n as f32)
                .collect(),
            recurrent_layers: places("recurrent_layers")?,
            router_gaps: numbers(&text, "router_gaps")
                .unwrap_or_default()
                .into_iter()
                .map(|n| n as f32)
                .collect(),
        })
    }

    /// A configuration that loads the model.
    pub fn load_config(&self, kv: KvFormats, limits: Limits) -> Result<LoadConfig, GoldenError> {
        let loaded = model::load(&path(&format!("{}.gguf", self.stem)))?;
        Ok(Golden::load_config_of(loaded, kv, limits))
    }

    /// The same with weights dequantised to f32, so that devices round no activations.
    pub fn load_config_of_floats(
        &self,
        kv: KvFormats,
        limits: Limits,
    ) -> Result<LoadConfig, GoldenError> {
        let file = format!("{}.gguf", self.stem);
        Ok(Golden::load_config_of(
            load_as_floats(&path(&file))?,
            kv,
            limits,
        ))
    }

    fn load_config_of(loaded: model::LoadedModel, kv: KvFormats, limits: Limits) -> LoadConfig {
        LoadConfig {
            target: Arc::clone(&loaded.spec),
            weights: loaded.weights,
            draft: None,
            batch_invariant: false,
            kv,
            limits,
        }
    }

    /// An array of the model.
    pub fn array(&self, kept: GoldenArray) -> Result<Array, GoldenError> {
        let file = format!("{}.{}", self.stem, kept.ending());
        let bytes = read(&file)?;
        npy(&bytes).map_err(|detail| GoldenError::Malformed { file, detail })
    }

    /// Prefills the tokens in one call and compares the logits of all stored positions.
    pub fn check_logits(
        &self,
        runner: &mut dyn Runner,
        tolerance: Tolerance,
    ) -> Result<Agreement, GoldenError> {
        self.check_logits_beyond(0.0, runner, tolerance)
    }

    /// [`Golden::check_logits`] without the rows whose router prefers its experts by less than
    /// `least_gap`: rounded activations may choose others there.
    pub fn check_logits_beyond(
        &self,
        least_gap: f32,
        runner: &mut dyn Runner,
        tolerance: Tolerance,
    ) -> Result<Agreement, GoldenError> {
        let expected = self.array(GoldenArray::Logits)?;
        let width = expected.shape.last().copied().unwrap_or(0);
        let is_kept = |row: &usize| {
            self.router_gaps
                .get(*row)
                .is_none_or(|gap| *gap >= least_gap)
        };
        let rows: Vec<usize> = (0..self.logit_positions.len()).filter(is_kept).collect();
        let requests: Vec<(usize, LogitsRequest)> = rows
            .iter()
            .map(|row| (self.logit_positions[*row], LogitsRequest::full()))
            .collect();
        let seq = runner.open(self.ids.len())?;
        let found = runner.prefill(seq, &self.ids, &requests)?;
        runner.close(seq);
        let found: Vec<f32> = found.into_iter().flat_map(|row| row.raw).collect();
        let expected: Vec<f32> = rows
            .iter()
            .flat_map(|row| &expected.values[row * width..(row + 1) * width])
            .copied()
            .collect();
        self.check("logits", &found, &expected, tolerance)
    }

    /// Compares the residual stream after each layer, `[n_layers][n_ids, hidden]`, at all stored
    /// positions.
    pub fn check_hidden(
        &self,
        layers: &[Vec<f32>],
        tolerance: Tolerance,
    ) -> Result<(), GoldenError> {
        let expected = self.array(GoldenArray::Hidden)?;
        let n = self.hidden_positions.len();
        let hidden = expected.shape.last().copied().unwrap_or(0);
        let size = n * hidden;
        for (i, layer) in layers.iter().enumerate() {
            let mut found = Vec::with_capacity(size);
            for at in &self.hidden_positions {
                found.extend_from_slice(layer.get(at * hidden..(at + 1) * hidden).unwrap_or(&[]));
            }
            // Entry 0 is the embedding.
            let expected = expected.values.get((i + 1) * size..(i + 2) * size);
            let what = format!("residual stream after layer {i}");
            self.check(&what, &found, expected.unwrap_or(&[]), tolerance)?;
        }
        Ok(())
    }

    /// Compares a state of layer 0 after the tokens.
    pub fn check_state(
        &self,
        kept: GoldenArray,
        found: &[f32],
        tolerance: Tolerance,
    ) -> Result<Agreement, GoldenError> {
        let expected = self.array(kept)?;
        self.check(&format!("{kept:?}"), found, &expected.values, tolerance)
    }

    /// Decodes the reference implementation's greedy continuation and compares the best token of
    /// each step. Steps with a margin that `noise` in either logit could invert are skipped.
    /// Returns the number of compared steps.
    pub fn check_greedy(&self, runner: &mut dyn Runner, noise: f32) -> Result<usize, GoldenError> {
        let seq = runner.open(self.ids.len() + self.greedy_ids.len())?;
        let last = self.ids.len() - 1;
        let mut rows = runner.prefill(seq, &self.ids, &[(last, LogitsRequest::top_k(1))])?;
        let steps = self.greedy_ids.iter().zip(&self.greedy_margins);
        let mut compared = 0;
        for (step, (expected, margin)) in steps.enumerate() {
            let row = rows.first().and_then(|row| row.ids.first());
            let found = row.copied().unwrap_or_default();
            if *margin > 2.0 * noise {
                compared += 1;
                if found != *expected {
                    return Err(GoldenError::Greedy {
                        stem: self.stem.clone(),
                        step,
                        found,
                        expected: *expected,
                        margin: *margin,
                    });
                }
            }
            rows = decode_token(runner, seq, *expected)?;
        }
        runner.close(seq);
        Ok(compared)
    }

    fn check(
        &self,
        what: &str,
        found: &[f32],
        expected: &[f32],
        tolerance: Tolerance,
    ) -> Result<Agreement, GoldenError> {
        compare(found, expected, tolerance).map_err(|difference| GoldenError::Differs {
            stem: self.stem.clone(),
            what: what.to_owned(),
            difference,
        })
    }
}

/// Decodes one token and returns the best next token.
fn decode_token(
    runner: &mut dyn Runner,
    seq: SeqId,
    token: TokenId,
) -> Result<Vec<contract::LogitsRow>, DeviceError> {
    let tree = Tree::root(token);
    let requests = [LogitsRequest::top_k(1)];
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    let rows = runner.verify(&[item])?.pop().unwrap_or_default();
    let path = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &path }])?;
    Ok(rows)
}

/// Loads a model with weights dequantised to f32, so that devices round no activations.
///
/// # Errors
/// Errors of reading or loading.
pub fn load_as_floats(path: &Path) -> Result<model::LoadedModel, ModelError> {
    let bytes = FileBytes::shared(Arc::from(floats(path)?));
    model::load_bytes(&path.display().to_string(), bytes)
}

/// A GGUF file with all its tensors as f32.
fn floats(path: &Path) -> Result<Vec<u8>, GgufError> {
    let file = GgufFile::open(path)?;
    let mut writer = GgufWriter::new();
    for (key, value) in file.meta().iter() {
        writer.meta(key, value.clone())?;
    }
    let tensors = || file.tensors().iter().filter_map(|t| Some((t, t.weight()?)));
    for (tensor, _) in tensors() {
        writer.tensor(tensor.name(), QuantType::F32, tensor.dims())?;
    }
    let mut body = writer.start(Vec::new())?;
    for (tensor, weight) in tensors() {
        let mut values = vec![0.0; weight.values()];
        dequantize_row(weight.ty, file.data(tensor), &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        body.write(&bytes)?;
    }
    body.finish()
}

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/models")
        .join(file)
}

fn read(file: &str) -> Result<Vec<u8>, GoldenError> {
    std::fs::read(path(file)).map_err(|source| GoldenError::Io {
        file: file.to_owned(),
        source,
    })
}

/// The flat array of numbers under `field` in the text of a JSON object.
fn numbers(text: &str, field: &str) -> Option<Vec<f64>> {
    let (_, rest) = text.split_once(&format!("\"{field}\""))?;
    let rest = rest.trim_start().strip_prefix(':')?;
    let rest = rest.trim_start().strip_prefix('[')?;
    let (list, _) = rest.split_once(']')?;
    let entries = list.split(',').map(str::trim).filter(|n| !n.is_empty());
    entries.map(|n| n.parse().ok()).collect()
}

/// Reads NumPy's format 1.0 with `<f4` values in C order. Kept by hand: it is 30 lines for one
/// type, and the crates for it read files.
pub(crate) fn npy(bytes: &[u8]) -> Result<Array, String> {
    const HEAD: usize = 10;
    let head = bytes.get(..HEAD).ok_or("it ends in its head")?;
    if !head.starts_with(b"\x93NUMPY\x01\x00") {
        return Err("it is not NumPy's format 1.0".to_owned());
    }
    let length = usize::from(u16::from_le_bytes([head[8], head[9]]));
    let header = bytes.get(HEAD..HEAD + length);
    let header = header.ok_or("it ends in its header")?;
    let header = String::from_utf8_lossy(header);
    if !header.contains("'<f4'") || !header.contains("'fortran_order': False") {
        return Err(format!("not f32 in C order: {header}"));
    }
    let shape = header.split_once("'shape': (").map(|(_, rest)| rest);
    let shape = shape.and_then(|rest| rest.split_once(')'));
    let (shape, _) = shape.ok_or("its header has no shape")?;
    let entries = shape.split(',').map(str::trim).filter(|n| !n.is_empty());
    let shape: Vec<usize> = entries
        .map(|n| n.parse().map_err(|_| format!("{n} is no dimension")))
        .collect::<Result<_, String>>()?;
    let words = bytes[HEAD + length..].chunks_exact(4);
    let values: Vec<f32> = words
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let expected: usize = shape.iter().product();
    if values.len() != expected {
        return Err(format!(
            "{} values instead of {expected}, by its shape",
            values.len()
        ));
    }
    Ok(Array { shape, values })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeRunner, FakeSpec};
    use contract::KvFormat;

    #[test]
    fn fixtures_match_their_manifest() {
        let all = Golden::all().unwrap();
        assert!(all.len() >= 5, "{} fixtures", all.len());
        for golden in all {
            let config = golden
                .load_config(
                    KvFormats {
                        k: KvFormat::F16,
                        v: KvFormat::F16,
                    },
                    FakeSpec::default().limits,
                )
                .unwrap();
            let spec = config.target;
            let shape = |kept| golden.array(kept).unwrap().shape;
            assert_eq!(
                shape(GoldenArray::Logits),
                [golden.logit_positions.len(), spec.vocab]
            );
            let layers = spec.layers.len() + 1;
            assert_eq!(
                shape(GoldenArray::Hidden),
                [layers, golden.hidden_positions.len(), spec.hidden]
            );
            assert_eq!(golden.greedy_ids.len(), golden.greedy_margins.len());
            let has_experts = spec
                .layers
                .iter()
                .any(|layer| layer.ffn.experts().is_some());
            let gaps = if has_experts {
                golden.logit_positions.len()
            } else {
                0
            };
            assert_eq!(golden.router_gaps.len(), gaps, "{}", golden.stem);
            if golden.recurrent_layers.contains(&0) {
                let delta = spec.delta_layers().next().unwrap();
                let values = |kept| golden.array(kept).unwrap().values.len();
                assert_eq!(values(GoldenArray::Delta), delta.state_values());
                assert_eq!(values(GoldenArray::Conv), delta.window_values());
            }
        }
    }

    #[test]
    fn wrong_results_are_detected() {
        let golden = Golden::open("dense_f16").unwrap();
        let mut spec = FakeSpec::default();
        spec.language.vocab = golden.array(GoldenArray::Logits).unwrap().shape[1];
        let mut runner = FakeRunner::new(spec);
        let loose = Tolerance {
            absolute: 1.0,
            relative: 0.1,
        };
        assert!(matches!(
            golden.check_logits(&mut runner, loose),
            Err(GoldenError::Differs { .. })
        ));
        assert!(matches!(
            golden.check_greedy(&mut runner, 0.0),
            Err(GoldenError::Greedy { step: 0, .. })
        ));
        let zeros = vec![vec![0.0; golden.ids.len() * 4096]; 2];
        assert!(golden.check_hidden(&zeros, loose).is_err());
    }

    #[test]
    fn truncated_and_foreign_arrays_are_refused() {
        let bytes = read("dense_f16.logits.npy").unwrap();
        assert!(npy(&bytes).is_ok());
        for cut in [0, 5, 9, 60, bytes.len() - 4] {
            assert!(npy(&bytes[..cut]).is_err(), "{cut}");
        }
        let mut other = bytes;
        let at = other.windows(4).position(|w| w == b"'<f4").unwrap();
        other[at + 2] = b'i';
        assert!(npy(&other).is_err());
    }

    #[test]
    fn lists_are_found_by_their_name() {
        let text = r#"{"a": [1, 2.5 ,-3], "bc": [], "b": [7]}"#;
        assert_eq!(numbers(text, "a"), Some(vec![1.0, 2.5, -3.0]));
        assert_eq!(numbers(text, "b"), Some(vec![7.0]));
        assert_eq!(numbers(text, "bc"), Some(Vec::new()));
        assert_eq!(numbers(text, "d"), None);
    }
}
