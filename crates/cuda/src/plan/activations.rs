//! Activations in the forms that products read them in.

use crate::launch::gemm::small_batch::GemmInputs;
use crate::launch::norm::ActivationBuffers;
use crate::memory::BumpAllocator;
use crate::pack::{ActivationFormat, WeightKind};

/// The forms of one activation that its consumers read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ActivationFormats {
    f32: bool,
    f16: bool,
}

impl ActivationFormats {
    /// Every format.
    pub(super) const ALL: ActivationFormats = ActivationFormats {
        f32: true,
        f16: true,
    };

    /// What these kinds of matrices read.
    pub(super) fn of(kinds: impl IntoIterator<Item = WeightKind>) -> ActivationFormats {
        let mut forms = ActivationFormats::default();
        for kind in kinds {
            match kind.input() {
                ActivationFormat::F32 => forms.f32 = true,
                ActivationFormat::F16 => forms.f16 = true,
            }
        }
        forms
    }

    /// The same and f32.
    pub(super) fn with_f32(self) -> ActivationFormats {
        ActivationFormats { f32: true, ..self }
    }

    /// The formats of both.
    pub(super) fn and(self, other: ActivationFormats) -> ActivationFormats {
        ActivationFormats {
            f32: self.f32 || other.f32,
            f16: self.f16 || other.f16,
        }
    }

    /// Those of some buffers that have one of these formats.
    pub(super) fn of_buffers(self, all: ActivationBuffers) -> ActivationBuffers {
        ActivationBuffers {
            f32: if self.f32 { all.f32 } else { 0 },
            f16: if self.f16 { all.f16 } else { 0 },
        }
    }

    /// Buffers for `rows` rows of `width` values in each form.
    pub(super) fn allocate(
        self,
        arena: &mut BumpAllocator,
        rows: usize,
        width: usize,
    ) -> ActivationBuffers {
        let mut take = |wanted: bool, input: ActivationFormat| {
            if wanted {
                arena.take(input.bytes(rows, width))
            } else {
                0
            }
        };
        ActivationBuffers {
            f32: take(self.f32, ActivationFormat::F32),
            f16: take(self.f16, ActivationFormat::F16),
        }
    }
}

/// The same buffers as products take them.
pub(super) fn inputs(out: &ActivationBuffers) -> GemmInputs {
    GemmInputs {
        f16: out.f16,
        f32: out.f32,
    }
}
