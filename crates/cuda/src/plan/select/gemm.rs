//! GEMMs of decode steps and of prefill chunks.

use super::Selected;
use crate::gpu_props::GpuProps;
use crate::launch::gemm::fused_layer::FusedLayerForm;
use crate::launch::gemm::prefill::{PrefillGemm, PrefillGemmKernel};
use crate::options::OneLaunch;
use crate::step::ROWS;

/// How the GEMMs of a model's layers run in a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecodeGemm {
    /// `gemm/gemv.cu`: norm, gemv and SwiGLU in one launch.
    Gemv,
    /// `gemm/decode_gemm_small_batch.cu`: a launch per input.
    SmallBatch,
    /// `gemm/fused_layer_sm90.cu` or `gemm/fused_layer.cu`: all GEMMs from a mixer to the next in
    /// one persistent launch.
    FusedLayer(FusedLayerForm),
}

impl DecodeGemm {
    /// The source file.
    pub(crate) fn file(self) -> &'static str {
        match self {
            DecodeGemm::Gemv => "gemm/gemv.cu",
            DecodeGemm::SmallBatch => "gemm/decode_gemm_small_batch.cu",
            DecodeGemm::FusedLayer(form) => form.file(),
        }
    }
}

/// Which kernels the matrices of a model fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GemmFits {
    /// All layers fit the gemv with its norm, and it is faster: the model is small.
    pub(crate) gemv: bool,
    /// The fused layer of this GPU, if it may be used and all layers fit it.
    pub(crate) fused_layer: Option<FusedLayerForm>,
}

/// The GEMMs of a decode step of up to `rows` rows. Fused layers round differently from separate
/// launches, and steps of all sizes must round alike: a model has fused layers at every number of
/// rows or at none.
pub(crate) fn decode_gemm(rows: usize, fits: GemmFits) -> Selected<DecodeGemm> {
    match (fits.gemv, fits.fused_layer) {
        (true, _) if rows == 1 => {
            Selected::new(DecodeGemm::Gemv, "small model, one row: fewer launches")
        }
        (true, _) => Selected::new(
            DecodeGemm::SmallBatch,
            "small model: the bits of its gemv at every number of rows",
        ),
        (false, Some(form @ FusedLayerForm::Sm90)) => Selected::new(
            DecodeGemm::FusedLayer(form),
            "wgmma GPU, all layers fit: no launch gaps between GEMMs",
        ),
        (false, Some(form @ FusedLayerForm::Mma)) => Selected::new(
            DecodeGemm::FusedLayer(form),
            "no wgmma, all layers fit: no launch gaps between GEMMs",
        ),
        (false, None) => Selected::new(
            DecodeGemm::SmallBatch,
            "separate launches requested, or no fused layer of these matrices",
        ),
    }
}

/// Whether steps of few rows of `gpu` run as one persistent launch where the plan has one; by
/// default only those of models whose steps of one row are made of [`DecodeGemm::Gemv`].
pub(crate) fn uses_one_launch(requested: OneLaunch, gpu: GpuProps) -> Selected<bool> {
    match requested {
        OneLaunch::On | OneLaunch::Clocks => {
            Selected::new(true, "requested: one launch for the layers and the LM head")
        }
        OneLaunch::Off => Selected::new(false, "requested: separate launches"),
        OneLaunch::Auto if gpu.launches_overlap => Selected::new(
            false,
            "launches overlap: separate ones are measured to be faster",
        ),
        OneLaunch::Auto => Selected::new(
            true,
            "launches do not overlap, small model, few rows: none between layers",
        ),
    }
}

/// How a prefill chunk is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefillPath {
    /// With the GEMMs and the attention of a decode step.
    DecodeKernels,
    /// With dequantized weights and the prefill kernels.
    PrefillKernels,
}

/// The path of a chunk of up to `rows` rows.
pub(crate) fn prefill_path(
    rows: usize,
    batch_invariant: bool,
    fits_gemv: bool,
) -> Selected<PrefillPath> {
    if rows > ROWS {
        let reason = "many rows: each matrix is dequantized once for all of them";
        return Selected::new(PrefillPath::PrefillKernels, reason);
    }
    if batch_invariant {
        let reason = "batch-invariant: every chunk rounds alike, wherever a prompt is cut";
        return Selected::new(PrefillPath::PrefillKernels, reason);
    }
    if fits_gemv {
        let reason = "small model: dequantization costs little";
        return Selected::new(PrefillPath::PrefillKernels, reason);
    }
    let reason = "few rows: dequantizing the weights would take most of the time";
    Selected::new(PrefillPath::DecodeKernels, reason)
}

/// The kernel of prefill GEMMs.
pub fn prefill_gemm(gpu: GpuProps) -> Selected<PrefillGemm> {
    let (kernel, reason) = if gpu.has_wgmma {
        (PrefillGemmKernel::Sm90, "wgmma fed by TMA")
    } else {
        (PrefillGemmKernel::Mma, "no wgmma: warp-level mma")
    };
    let gemm = PrefillGemm {
        kernel,
        sm_count: gpu.sm_count,
    };
    Selected::new(gemm, reason)
}
