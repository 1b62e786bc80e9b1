//! The header of a call, as `kernels/score/call.cuh` has it.

use contract::ScoreSettings;

/// What varies between prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ScoreCall {
    tokens: usize,
    settings: ScoreSettings,
}

impl ScoreCall {
    /// Bytes of a header.
    pub(crate) const BYTES: usize = 40;

    /// A call that [`contract::scorer::check_score_call`] let through.
    pub(super) fn new(tokens: usize, settings: &ScoreSettings) -> ScoreCall {
        ScoreCall {
            tokens,
            settings: *settings,
        }
    }

    /// The bytes that the kernels read. Counts beyond 2^31 act like the largest: none is compared
    /// with more than the blocks or tokens of a prompt.
    pub(super) fn bytes(&self) -> [u8; ScoreCall::BYTES] {
        let ScoreSettings {
            tail_tokens,
            rotated_tail,
            sparsity,
            smoothing,
            chunk,
            ..
        } = self.settings;
        // The kernels add a count to a block's or token's index.
        let int = |n: usize| {
            i32::try_from(n)
                .unwrap_or(i32::MAX)
                .min(1 << 30)
                .to_le_bytes()
        };
        let words = [
            int(self.tokens),
            int(tail_tokens),
            i32::from(rotated_tail).to_le_bytes(),
            int(sparsity.sink_blocks),
            int(sparsity.window_blocks),
            int(sparsity.dense_last_blocks),
            // Minus infinity for 0, which keeps every block.
            sparsity.alpha.ln().to_le_bytes(),
            int(smoothing / 2),
            int(chunk),
            [0; 4],
        ];
        let mut bytes = [0; ScoreCall::BYTES];
        bytes.copy_from_slice(words.as_flattened());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_kernels_struct() {
        let settings = ScoreSettings {
            rotated_tail: true,
            chunk: usize::MAX,
            ..ScoreSettings::default()
        };
        let bytes = ScoreCall::new(1000, &settings).bytes();
        let words: Vec<i32> = bytes
            .chunks_exact(4)
            .map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let log_alpha = 0.12_f32.ln().to_bits().cast_signed();
        assert_eq!(words, [1000, 8, 1, 2, 4, 2, log_alpha, 6, 1 << 30, 0]);
        let mut dense = settings;
        dense.sparsity.alpha = 0.0;
        let bytes = ScoreCall::new(1, &dense).bytes();
        assert_eq!(bytes[24..28], f32::NEG_INFINITY.to_le_bytes());
    }
}
