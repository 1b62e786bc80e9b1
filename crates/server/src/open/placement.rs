//! Several devices from flags: which run the layers, which the draft, and what each may take.

use anyhow::{Context, bail};
use contract::{
    Backend, LayerSplit, ModelSpec, PlacedPart, Placement, SplitBackend, SplitDevice, SplitMode,
};
use serde_json::{Value, json};

use crate::cli::{DeviceArgs, SplitModeArg};
use crate::open::headroom::UsableMemory;
use crate::progress::bytes_text;

/// Several devices of one model.
#[derive(Debug, Clone)]
pub struct PlacementChoice {
    /// Names of the devices of the layers, bottom to top.
    targets: Vec<String>,
    split: LayerSplit,
    mode: SplitMode,
    /// Name of the draft's device, if it is not that of the LM head.
    draft: Option<String>,
    /// The flags on memory.
    args: DeviceArgs,
}

impl PlacementChoice {
    /// The devices of the flags; `None` if one device runs everything.
    ///
    /// # Errors
    /// Flags that contradict each other, by name.
    pub fn of(args: &DeviceArgs, draft: Option<&str>) -> anyhow::Result<Option<PlacementChoice>> {
        let targets = match &args.target_devices[..] {
            [] => std::slice::from_ref(&args.device),
            listed => listed,
        };
        if targets.iter().any(String::is_empty) {
            bail!("--target-devices: a name is empty; list devices such as cuda:0,cuda:1");
        }
        if args.target_devices.is_empty() && !args.target_layer_split.is_empty() {
            bail!("--target-layer-split: name the devices with --target-devices, or remove it");
        }
        let mode = match args.split_mode {
            Some(SplitModeArg::Tensor) => SplitMode::Tensor,
            Some(SplitModeArg::None) if targets.len() > 1 => {
                bail!("--split-mode none: one device runs all; name it with --device")
            }
            _ => SplitMode::Layer,
        };
        let wants_several = !matches!(args.split_mode, None | Some(SplitModeArg::None));
        if wants_several && targets.len() < 2 {
            bail!("--split-mode: name the devices with --target-devices, such as cuda:0,cuda:1");
        }
        if mode == SplitMode::Tensor && !args.target_layer_split.is_empty() {
            bail!(
                "--target-layer-split: each device has half of every layer with --split-mode \
                 tensor; remove one of the two"
            );
        }
        let with_head = targets.last();
        let draft = draft.filter(|name| *name != "auto" && Some(*name) != with_head.map(|n| &**n));
        let mut all = targets.iter().map(String::as_str).chain(draft);
        if args.peer_access
            && let Some(name) = all.find(|name| !name.starts_with("cuda"))
            && (targets.len() > 1 || draft.is_some())
        {
            bail!(
                "--peer-access: {name} has no peer access; remove it, and rows go through host memory"
            );
        }
        if targets.len() == 1 && draft.is_none() && args.target_devices.is_empty() {
            return Ok(None);
        }
        let split = match &args.target_layer_split[..] {
            [] => LayerSplit::ByMemory,
            weights => LayerSplit::Weights(weights.to_vec()),
        };
        Ok(Some(PlacementChoice {
            targets: targets.to_vec(),
            split,
            mode,
            draft: draft.map(str::to_owned),
            args: args.clone(),
        }))
    }

    /// Name of the first device.
    pub fn first(&self) -> Option<&str> {
        self.targets.first().map(String::as_str)
    }

    /// The devices as one; `open` gives the device of a name.
    ///
    /// # Errors
    /// A device that cannot be used, or a wrong size in the flags on memory.
    pub fn backend(
        &self,
        open: &dyn Fn(&str) -> anyhow::Result<Box<dyn Backend>>,
    ) -> anyhow::Result<SplitBackend> {
        let mut names: Vec<&str> = self.targets.iter().map(String::as_str).collect();
        let draft_device = self.draft.as_deref().map(|draft| {
            let known = names.iter().position(|name| *name == draft);
            known.unwrap_or_else(|| {
                names.push(draft);
                names.len() - 1
            })
        });
        let mut devices = Vec::with_capacity(names.len());
        for name in &names {
            let backend = open(name)
                .with_context(|| format!("--target-devices and --draft-device: {name}"))?;
            let info = backend.probe()?;
            let usable = UsableMemory::of(&self.args, &info)?.bytes;
            devices.push(SplitDevice {
                id: info.id,
                backend,
                usable_bytes: usable,
            });
        }
        // Parts on one device share its memory.
        let ids: Vec<String> = devices.iter().map(|device| device.id.clone()).collect();
        for device in &mut devices {
            let sharing = ids.iter().filter(|id| **id == device.id).count();
            device.usable_bytes /= sharing.max(1) as u64;
        }
        let targets = (self.targets.len(), self.split.clone());
        Ok(SplitBackend::new(devices, targets, draft_device).with_split_mode(self.mode))
    }
}

/// Which device runs what, a line per device.
pub(crate) fn lines(placement: &Placement, spec: &ModelSpec) -> Vec<String> {
    let line = |part: &PlacedPart| {
        format!(
            "{}: {}{}; {} of {} (weights {}, cache {}, states {}, draft {}, scratch {}, driver {})",
            part.device,
            part.part.text(),
            layers_text(part, spec),
            bytes_text(part.memory.total_bytes()),
            bytes_text(part.usable_bytes),
            bytes_text(part.memory.weights_bytes),
            bytes_text(part.memory.kv_bytes),
            bytes_text(part.memory.state_bytes),
            bytes_text(part.memory.draft_bytes),
            bytes_text(part.memory.scratch_bytes),
            bytes_text(part.memory.driver_bytes),
        )
    };
    let mut lines: Vec<String> = placement.parts.iter().map(line).collect();
    let with_layers = placement
        .parts
        .iter()
        .filter(|part| !part.part.layers.is_empty());
    let boundaries = with_layers.count().saturating_sub(1);
    let mut parts = placement.parts.iter();
    if parts.any(|part| part.part.shard.is_some()) {
        lines.push(format!(
            "each row of {} is summed over the devices {} times",
            bytes_text(Placement::handed_over_bytes(spec) as u64),
            2 * spec.layers.len()
        ));
        let mut parts = placement.parts.iter();
        if parts.any(|part| part.device.starts_with("cuda")) {
            lines.extend(shard_notes(spec).map(str::to_owned));
        }
    } else if boundaries > 0 {
        lines.push(format!(
            "each row of {} crosses {boundaries} of the boundaries between devices",
            bytes_text(Placement::handed_over_bytes(spec) as u64)
        ));
    }
    lines
}

/// What a tensor split over GPUs needs, and what it does not bring.
fn shard_notes(spec: &ModelSpec) -> impl Iterator<Item = &'static str> {
    let has_experts = spec
        .layers
        .iter()
        .any(|layer| layer.ffn.experts().is_some());
    let of_experts = "steps of one row of a mixture of experts are slower so than on one GPU \
                      (35B on two H200: 1.73 and 1.56 ms), those of 8 rows and prompts faster";
    let access = "before weights are read, the driver is asked whether the GPUs reach each other's \
                  memory (peer access); where they do not, a tensor split is refused rather than \
                  run through host memory: use --split-mode layer";
    std::iter::once(access).chain(has_experts.then_some(of_experts))
}

/// What the layers of a part are made of.
fn layers_text(part: &PlacedPart, spec: &ModelSpec) -> String {
    let layers = spec
        .layers
        .get(part.part.layers.clone())
        .unwrap_or_default();
    let (mut attention, mut experts) = (0, 0);
    for layer in layers {
        attention += usize::from(matches!(layer.mixer, contract::Mixer::Attention(_)));
        experts += layer.ffn.experts().map_or(0, |experts| experts.n_experts);
    }
    let mut text = match layers.len() {
        0 => return String::new(),
        n => format!(
            " ({attention} of attention, {} of the delta rule",
            n - attention
        ),
    };
    if experts > 0 {
        text.push_str(&format!(", {experts} experts"));
    }
    text.push(')');
    text
}

/// Which device runs what, for programs.
pub(crate) fn json_of(placement: &Placement) -> Value {
    let part = |part: &PlacedPart| {
        json!({
            "device": part.device,
            "first_layer": part.part.layers.start,
            "layers": part.part.layers.len(),
            "head": part.part.head,
            "draft": part.part.draft,
            "shard": part.part.shard.map(|shard| shard.index + 1),
            "bytes": part.memory.total_bytes(),
            "weights_bytes": part.memory.weights_bytes,
            "cache_bytes": part.memory.kv_bytes,
            "state_bytes": part.memory.state_bytes,
            "draft_bytes": part.memory.draft_bytes,
            "usable_bytes": part.usable_bytes,
        })
    };
    placement.parts.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::open::{MemoryRequest, device, fit, tiny};
    use clap::Parser;
    use contract::{MemoryPlan, ModelPart, Shard};

    fn args(words: &[&str]) -> DeviceArgs {
        let words = ["hearth", "serve"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Serve(args) => args.device,
            other => panic!("{other:?}"),
        }
    }

    fn check_refused(words: &[&str], draft: Option<&str>, parts: &[&str]) {
        let choice = PlacementChoice::of(&args(words), draft);
        let error = choice.unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn contradictory_placements_are_refused_by_flag() {
        check_refused(
            &["--target-layer-split", "1,1"],
            None,
            &["--target-layer-split", "--target-devices"],
        );
        check_refused(&["--target-devices", "cpu,"], None, &["--target-devices"]);
        let peers = ["--target-devices", "cuda:0,cpu", "--peer-access"];
        check_refused(&peers, None, &["--peer-access", "cpu"]);
        let both = [
            "hearth",
            "serve",
            "--device",
            "cpu",
            "--target-devices",
            "cpu,cpu",
        ];
        assert!(Cli::try_parse_from(both).is_err());
    }

    #[test]
    fn shards_are_placed_and_printed_or_refused_by_flag() {
        for (words, part) in [
            (&["--split-mode", "tensor"][..], "--target-devices"),
            (
                &["--target-devices", "cpu,cpu", "--split-mode", "none"],
                "--device",
            ),
        ] {
            check_refused(words, None, &["--split-mode", part]);
        }
        let tensor = ["--target-devices", "cpu,cpu", "--split-mode", "tensor"];
        let cut = [&tensor[..], &["--target-layer-split", "1,1"]].concat();
        check_refused(&cut, None, &["--target-layer-split", "--split-mode tensor"]);
        let (loaded, args) = (tiny(), args(&tensor));
        let request = MemoryRequest {
            sequences: 1,
            context: None,
            tree_nodes: 16,
        };
        let refused = fit(device(&args).unwrap().as_ref(), &loaded, &args, request);
        let refused = refused.err().map(|error| format!("{error:#}"));
        let refused = refused.unwrap_or_default();
        for part in ["a tensor split of", "--split-mode layer"] {
            assert!(refused.contains(part), "{part} in {refused}");
        }
    }

    #[test]
    fn plan_of_a_tensor_split_says_that_peer_access_is_asked_for() {
        let loaded = tiny();
        let part = |index| PlacedPart {
            device: format!("cuda:{index}"),
            memory: MemoryPlan::default(),
            part: ModelPart {
                layers: 0..loaded.spec.layers.len(),
                head: index == 1,
                draft: false,
                shard: Some(Shard { index, count: 2 }),
            },
            usable_bytes: 1 << 30,
        };
        let placement = Placement {
            parts: vec![part(0), part(1)],
        };
        let lines = lines(&placement, &loaded.spec).join("\n");
        for part in ["shard 2 of 2", "peer access", "--split-mode layer"] {
            assert!(lines.contains(part), "{part} in {lines}");
        }
    }

    #[test]
    fn one_device_is_no_placement() {
        for draft in [None, Some("auto"), Some("cuda:1")] {
            let words = ["--device", "cuda:1", "--peer-access"];
            assert!(PlacementChoice::of(&args(&words), draft).unwrap().is_none());
        }
        let elsewhere = PlacementChoice::of(&args(&["--device", "cuda:1"]), Some("cpu"));
        assert!(elsewhere.unwrap().is_some());
    }

    #[test]
    fn two_devices_are_placed_and_printed() {
        let loaded = tiny();
        let args = args(&["--target-devices", "cpu,cpu", "--target-layer-split", "3,1"]);
        let backend = device(&args).unwrap();
        let request = MemoryRequest {
            sequences: 2,
            context: None,
            tree_nodes: 16,
        };
        let fitted = fit(backend.as_ref(), &loaded, &args, request).unwrap();
        let placement = fitted.placement.unwrap();
        let ranges = placement.parts.iter().map(|part| part.part.layers.clone());
        assert_eq!(ranges.collect::<Vec<_>>(), [0..3, 3..4]);
        let usable: u64 = placement.parts.iter().map(|part| part.usable_bytes).sum();
        assert_eq!(fitted.device.id, "cpu,cpu");
        assert!(usable <= fitted.device.free_bytes);
        let lines = lines(&placement, &loaded.spec).join("\n");
        for part in [
            "layers 0 to 2",
            "layer 3 and the LM head",
            "1 of the boundaries",
        ] {
            assert!(lines.contains(part), "{part} in {lines}");
        }
    }
}
