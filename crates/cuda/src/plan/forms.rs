//! Activations in the forms that products read them in.

use crate::launch::matmul::Inputs;
use crate::launch::norm::Out;
use crate::memory::Carver;
use crate::pack::{Input, Kind};

/// The forms of one activation that its consumers read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Forms {
    f32: bool,
    f16: bool,
}

impl Forms {
    /// What these kinds of matrices read.
    pub(super) fn of(kinds: impl IntoIterator<Item = Kind>) -> Forms {
        let mut forms = Forms::default();
        for kind in kinds {
            match kind.input() {
                Input::F32 => forms.f32 = true,
                Input::F16 => forms.f16 = true,
            }
        }
        forms
    }

    /// Buffers for `rows` rows of `width` values in each form.
    pub(super) fn carve(self, carver: &mut Carver, rows: usize, width: usize) -> Out {
        let mut take = |wanted: bool, input: Input| match wanted {
            true => carver.take(input.bytes(rows, width)),
            false => 0,
        };
        Out {
            f32: take(self.f32, Input::F32),
            f16: take(self.f16, Input::F16),
        }
    }
}

/// The same buffers as products take them.
pub(super) fn inputs(out: &Out) -> Inputs {
    Inputs {
        f16: out.f16,
        f32: out.f32,
    }
}
