//! Rows that a chunk of a pipeline stage receives and hands over.

use super::PrefillBuilder;
use crate::launch::draft::{CaptureTarget, capture_hidden_states};

impl PrefillBuilder<'_> {
    /// As `input_rows` of decode steps, in all stages but the first.
    pub(super) fn received_rows(&mut self) {
        let (context, rows) = (self.context, self.rows);
        let (Some(draft), Some(features)) = (&context.state.draft, self.features) else {
            return;
        };
        let (hidden, source) = (context.spec.hidden, self.source());
        for (x, column) in context.received_columns(rows) {
            let to = CaptureTarget {
                out: features,
                stride: draft.width,
                offset: column * hidden,
                to_feature_pool: false,
            };
            self.push(capture_hidden_states(hidden, rows, source, x, to));
        }
    }

    /// As `hand_over_layer` of decode steps.
    pub(super) fn hand_over_layer(&mut self, i: usize) {
        let context = self.context;
        if let Some(to) = context.capture_handed_over(self.rows, i) {
            let (hidden, x) = (context.spec.hidden, context.addresses.residual);
            self.push(capture_hidden_states(
                hidden,
                self.rows,
                self.source(),
                x,
                to,
            ));
        }
    }
}
