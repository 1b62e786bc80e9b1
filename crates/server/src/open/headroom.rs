//! GPU memory that a model leaves free, for the display and for what the driver takes later.

use anyhow::Context;
use contract::DeviceInfo;

use crate::cli::DeviceArgs;
use crate::open::bytes_of;
use crate::progress::bytes_text;

/// The least default headroom.
const LEAST: u64 = 512 << 20;
/// The default headroom as a percentage of the free memory, where that is more than [`LEAST`].
const PERCENT: u64 = 3;

/// The memory of a device that a model may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UsableMemory {
    /// What a model may take.
    pub bytes: u64,
    /// What stays free; 0 on the CPU.
    pub headroom: u64,
    /// What a scorer of prompts takes.
    pub scorer: u64,
}

impl UsableMemory {
    /// The usable memory of a device; only a GPU has a headroom.
    ///
    /// # Errors
    /// If `--vram-headroom` is not a size.
    pub(crate) fn of(args: &DeviceArgs, device: &DeviceInfo) -> anyhow::Result<UsableMemory> {
        let free = device.free_bytes;
        // Of several devices, each has its headroom already.
        if device.is_cpu() || device.id.contains(',') {
            return Ok(UsableMemory {
                bytes: free,
                headroom: 0,
                scorer: 0,
            });
        }
        let headroom = match args.vram_headroom.as_deref().map(str::trim) {
            Some("0") => 0,
            Some(text) => bytes_of(text).with_context(|| {
                format!("--vram-headroom {text}: use a size such as 1G, or 0 for none")
            })?,
            // A limit is what may be used, whatever else is free.
            None if args.vram_limit.is_some() => 0,
            None => LEAST.max(free / 100 * PERCENT),
        };
        Ok(UsableMemory {
            bytes: free.saturating_sub(headroom),
            headroom,
            scorer: 0,
        })
    }

    /// What is left beside a scorer of so many bytes.
    pub(crate) fn beside(self, scorer: u64) -> UsableMemory {
        UsableMemory {
            bytes: self.bytes.saturating_sub(scorer),
            scorer,
            ..self
        }
    }

    /// What stays free, for the end of a line on the device.
    pub(crate) fn left_text(self) -> String {
        match self.headroom {
            0 => String::new(),
            bytes => format!(", {} of it left free", bytes_text(bytes)),
        }
    }

    /// The usable memory in words, after "and".
    pub(crate) fn text(self) -> String {
        let mut text = format!("{} are free", bytes_text(self.bytes));
        if self.headroom > 0 {
            text += &format!(
                " beside the {} that --vram-headroom leaves",
                bytes_text(self.headroom)
            );
        }
        if self.scorer > 0 {
            text += &format!(" and the {} of the scorer", bytes_text(self.scorer));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::open::{MemoryRequest, fit, tiny};
    use clap::Parser;
    use contract::{Backend, DeviceError, LoadConfig, LoadProgress, MemoryPlan, Runner};

    const GIB: u64 = 1 << 30;

    fn args(words: &[&str]) -> DeviceArgs {
        let words = ["hearth", "serve"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Serve(args) => args.device,
            other => panic!("{other:?}"),
        }
    }

    /// A GPU that reports its free memory and takes 16 GiB and a MiB per token of the pool.
    struct FakeGpu {
        id: &'static str,
        free_bytes: u64,
    }

    impl Backend for FakeGpu {
        fn probe(&self) -> Result<DeviceInfo, DeviceError> {
            Ok(DeviceInfo {
                id: self.id.to_owned(),
                name: "fake".to_owned(),
                features: Vec::new(),
                class: None,
                total_bytes: 24 * GIB,
                free_bytes: self.free_bytes,
            })
        }

        fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
            let tokens = config
                .limits
                .context
                .max(config.limits.pool_tokens.unwrap_or(0));
            Ok(MemoryPlan {
                weights_bytes: 16 * GIB,
                kv_bytes: (tokens as u64) << 20,
                ..MemoryPlan::default()
            })
        }

        fn open(
            &self,
            _: LoadConfig,
            _: &mut dyn FnMut(LoadProgress),
        ) -> Result<Box<dyn Runner>, DeviceError> {
            unreachable!("only planned for")
        }
    }

    /// The bytes that a model leaves by default of `free_bytes`.
    fn left(id: &'static str, free_bytes: u64, words: &[&str]) -> u64 {
        let gpu = FakeGpu { id, free_bytes };
        let request = MemoryRequest {
            sequences: 2,
            context: None,
            tree_nodes: 16,
        };
        let fitted = fit(&gpu, &tiny(), &args(words), request).unwrap();
        free_bytes - fitted.memory.total_bytes()
    }

    #[test]
    fn default_plan_leaves_the_larger_of_512_mib_and_three_percent() {
        // The pool grows by 256 tokens of a MiB each.
        let near = |left: u64, headroom: u64| {
            assert!(
                (headroom..headroom + GIB / 4).contains(&left),
                "{left} of {headroom}"
            );
        };
        near(left("cuda:0", 24 * GIB, &[]), 24 * GIB / 100 * 3);
        near(left("cuda:0", 18 * GIB, &[]), 18 * GIB / 100 * 3);
        near(
            left("cuda:0", 24 * GIB, &["--vram-headroom", "2G"]),
            2 * GIB,
        );
        near(left("cuda:0", 24 * GIB, &["--vram-headroom", "0"]), 0);
        near(left("cuda:0", 24 * GIB, &["--vram-limit", "24G"]), 0);
        let both = ["--vram-limit", "24G", "--vram-headroom", "1G"];
        near(left("cuda:0", 24 * GIB, &both), GIB);
    }

    #[test]
    fn small_gpus_leave_512_mib_and_the_cpu_nothing() {
        let device = |id, free_bytes| FakeGpu { id, free_bytes }.probe().unwrap();
        let of = |id, free_bytes| UsableMemory::of(&args(&[]), &device(id, free_bytes)).unwrap();
        assert_eq!(of("cuda:0", 8 * GIB).headroom, 512 << 20);
        assert_eq!(of("cuda:0", 8 * GIB).bytes, 8 * GIB - (512 << 20));
        assert_eq!(of("cuda:0", 80 * GIB).headroom, 80 * GIB / 100 * 3);
        assert_eq!(of("cuda:0", 100).bytes, 0);
        assert_eq!(of("cpu", 8 * GIB).bytes, 8 * GIB);
    }

    #[test]
    fn wrong_headroom_is_named() {
        let gpu = FakeGpu {
            id: "cuda:0",
            free_bytes: 24 * GIB,
        };
        let error = UsableMemory::of(&args(&["--vram-headroom", "much"]), &gpu.probe().unwrap());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("--vram-headroom much"), "{error}");
    }

    #[test]
    fn context_that_only_fits_without_headroom_is_refused_with_the_flag() {
        let gpu = FakeGpu {
            id: "cuda:0",
            free_bytes: 24 * GIB,
        };
        let request = MemoryRequest {
            sequences: 1,
            context: None,
            tree_nodes: 16,
        };
        let words = ["--max-ctx", "8000", "--kv-type", "q8_0"];
        let error = fit(&gpu, &tiny(), &args(&words), request).err().unwrap();
        assert!(error.to_string().contains("--vram-headroom"), "{error}");
        let words = [&words[..], &["--vram-headroom", "0"]].concat();
        assert!(fit(&gpu, &tiny(), &args(&words), request).is_ok());
    }
}
