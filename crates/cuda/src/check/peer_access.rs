//! Whether two GPUs of a split reach each other's memory.

use contract::{DeviceError, SplitMode};

/// Two GPUs whose stages are neighbours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neighbours<'a> {
    /// The name of the GPU of the upper stage, for messages.
    pub(crate) name: &'a str,
    /// Its number, and that of the GPU of the stage below.
    pub(crate) ordinals: [u32; 2],
}

impl Neighbours<'_> {
    /// Refuses GPUs that lack the access that a split needs: shards write in each other's memory;
    /// of a split by layers the upper stage reads that of the lower, if `required`
    /// (`--peer-access`). `reaches` is the driver's answer for two numbers.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`], and those of `reaches`.
    pub(crate) fn require_access(
        self,
        mode: SplitMode,
        required: bool,
        reaches: impl Fn(u32, u32) -> Result<bool, DeviceError>,
    ) -> Result<(), DeviceError> {
        let [above, below] = self.ordinals;
        if mode == SplitMode::Layer {
            if !required || above == below || reaches(above, below)? {
                return Ok(());
            }
            return Err(self.unsupported(
                format!("--peer-access: reading the memory of cuda:{below}"),
                "remove --peer-access, and rows go through host memory",
            ));
        }
        if above == below {
            return Err(self.unsupported(
                "a tensor split whose shards are both on this GPU".to_owned(),
                "name two GPUs with --target-devices, or use --split-mode layer",
            ));
        }
        self.require_both_ways([reaches(above, below)?, reaches(below, above)?])
    }

    /// Refuses shards on GPUs of which not each reaches the other's memory: the upper that of the
    /// lower, and the other way round.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`].
    pub(crate) fn require_both_ways(self, reach: [bool; 2]) -> Result<(), DeviceError> {
        let [above, below] = self.ordinals;
        let lack = match reach {
            [true, true] => return Ok(()),
            [false, false] => "neither GPU reaches the other's memory".to_owned(),
            [false, true] => format!("cuda:{above} does not reach the memory of cuda:{below}"),
            [true, false] => format!("cuda:{below} does not reach the memory of cuda:{above}"),
        };
        Err(self.unsupported(
            format!("a tensor split with cuda:{below}: the driver says that {lack}; this"),
            "use --split-mode layer, whose rows go through host memory",
        ))
    }

    fn unsupported(self, what: String, instead: &str) -> DeviceError {
        DeviceError::Unsupported {
            what,
            device: self.name.to_owned(),
            instead: instead.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The refusal of GPU 1 above GPU `below`, where these pairs have access.
    fn refusal(below: u32, (mode, required): (SplitMode, bool), pairs: &[(u32, u32)]) -> String {
        let gpus = Neighbours {
            name: "cuda:1 (a GPU)",
            ordinals: [1, below],
        };
        let asked = gpus.require_access(mode, required, |a, b| Ok(pairs.contains(&(a, b))));
        asked.err().map_or(String::new(), |error| error.to_string())
    }

    #[test]
    fn tensor_split_needs_access_both_ways_and_names_what_lacks() {
        let tensor = (SplitMode::Tensor, false);
        assert_eq!(refusal(0, tensor, &[(0, 1), (1, 0)]), "");
        for (pairs, lack) in [
            (&[][..], "neither GPU"),
            (&[(0, 1)], "cuda:1 does not reach the memory of cuda:0"),
            (&[(1, 0)], "cuda:0 does not reach the memory of cuda:1"),
        ] {
            let text = refusal(0, tensor, pairs);
            for part in [lack, "with cuda:0", "cuda:1 (a GPU)", "--split-mode layer"] {
                assert!(text.contains(part), "{part} in {text}");
            }
        }
        assert!(refusal(1, tensor, &[(1, 1)]).contains("--target-devices"));
    }

    #[test]
    fn layer_split_needs_access_only_if_it_is_required() {
        assert_eq!(refusal(0, (SplitMode::Layer, false), &[]), "");
        assert_eq!(refusal(1, (SplitMode::Layer, true), &[]), "");
        assert_eq!(refusal(0, (SplitMode::Layer, true), &[(1, 0)]), "");
        let text = refusal(0, (SplitMode::Layer, true), &[(0, 1)]);
        assert!(
            text.contains("--peer-access") && text.contains("cuda:0"),
            "{text}"
        );
    }
}
