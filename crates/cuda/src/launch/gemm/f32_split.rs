//! Split K of f32 matrices: how few row groups still give every multiprocessor a job.

use super::words::pair;
use crate::gpu_props::GpuProps;

/// The input that f32 matrices share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct F32GemmInput {
    /// f32 `[rows][cols]`.
    pub(super) x: u64,
    /// Values of a row.
    pub(super) cols: usize,
    /// Scratch for the partial sums of split K; 0 for a kernel that does not split K.
    pub(super) partials: u64,
}

/// Limits of the jobs of one f32 kernel.
pub(super) struct F32Split {
    /// Values of K that a slice is a multiple of.
    pub(super) k_step: usize,
    /// Maximum number of jobs, for which the scratch of partial sums has capacity.
    pub(super) max_jobs: usize,
}

impl F32Split {
    /// Values of K per job, for `groups` row groups of `cols` values.
    ///
    /// All of K where the groups alone occupy the GPU.
    pub(super) fn k_slice(&self, gpu: GpuProps, groups: usize, cols: usize) -> usize {
        let steps = cols.div_ceil(self.k_step).max(1);
        let jobs_per_group = gpu.sm_count.min(self.max_jobs) / groups.max(1);
        steps.div_ceil(jobs_per_group.clamp(1, steps)) * self.k_step
    }

    /// The end of the kernels' `F32Params`: input, counts and slices, for `n_matrices` matrices of
    /// `groups` row groups together.
    pub(super) fn input_words(
        &self,
        gpu: GpuProps,
        n_matrices: usize,
        groups: usize,
        input: F32GemmInput,
    ) -> [u64; 5] {
        let F32GemmInput { x, cols, partials } = input;
        let slice = self.k_slice(gpu, groups, cols);
        [
            x,
            partials,
            pair(n_matrices, cols),
            pair(groups, cols.div_ceil(slice)),
            pair(slice, 0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_groups_split_k_and_many_do_not() {
        let split = F32Split {
            k_step: 256,
            max_jobs: 120,
        };
        let gpu = GpuProps {
            sm_count: 132,
            shared_bytes: 227 << 10,
            has_wgmma: true,
            launches_overlap: true,
        };
        assert_eq!(split.k_slice(gpu, 6, 5120), 256, "20 jobs per group");
        assert_eq!(split.k_slice(gpu, 30, 5120), 5 * 256, "4 jobs per group");
        assert_eq!(split.k_slice(gpu, 120, 5120), 5120, "one job per group");
    }
}
