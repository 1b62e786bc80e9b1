//! Chunked prefill of one prompt.
//!
//! Chunks end at absolute multiples of one size, itself a multiple of the runner's alignment, or at
//! save points, which are multiples of the alignment. So a prompt gives the same bits however its
//! chunks are interleaved, and wherever it resumed.
//!
//! What is left before a save point is one chunk if it fits. Each chunk costs a device about as
//! much as several hundred tokens, so a short turn that resumed between two multiples should cost
//! one.

use std::collections::VecDeque;

use contract::{DeviceError, LogitsRequest, LogitsRow, Runner, SeqId, TokenId};

use crate::event::Logprobs;
use crate::prefix::SavePoint;
use crate::sample::{logprob_request, requested_logprob};

/// The chunk size: the largest multiple of `align` within `limit`, or `limit` if there is none.
pub(super) fn chunk_size(limit: usize, align: usize) -> usize {
    let align = align.max(1);
    match limit / align * align {
        0 => limit.max(1),
        size => size,
    }
}

/// The prefill of one prompt.
#[derive(Debug)]
pub(super) struct Prefill {
    /// The sequence being filled. The scheduler closes it.
    pub(super) seq: SeqId,
    /// Tokens prefilled so far.
    pub(super) done: usize,
    /// Number of alternatives in prompt logprobs, if they are reported.
    top_logprobs: Option<usize>,
    /// Logprobs of the tokens prefilled so far and of the next.
    logprobs: Vec<Option<Logprobs>>,
    /// Save points not reached yet, ascending. Chunks end there.
    save_points: VecDeque<SavePoint>,
}

impl Prefill {
    /// The prefill of a prompt into a fresh sequence.
    pub(super) fn new(seq: SeqId, top_logprobs: Option<usize>) -> Prefill {
        Prefill {
            seq,
            done: 0,
            top_logprobs,
            // The first token has no context, so it has no logprob.
            logprobs: vec![None],
            save_points: VecDeque::new(),
        }
    }

    /// The same for a sequence that holds the first `done` tokens; all `save_points` are later.
    pub(super) fn resumed(self, done: usize, save_points: Vec<SavePoint>) -> Prefill {
        Prefill {
            done,
            save_points: save_points.into(),
            ..self
        }
    }

    /// Removes and returns the save point that the prefill has just reached, if there is one.
    pub(super) fn take_reached(&mut self) -> Option<SavePoint> {
        let done = self.done;
        self.save_points.pop_front_if(|stop| stop.at == done)
    }

    /// Whether the next chunk is the last of a prompt of `len` tokens.
    pub(super) fn is_last_chunk(&self, len: usize, size: usize) -> bool {
        self.next_chunk_end(len, size) == len
    }

    /// End of the next chunk: the next save point or the prompt's end if within `size`, else the
    /// next absolute multiple of `size`.
    fn next_chunk_end(&self, len: usize, size: usize) -> usize {
        let stop = self
            .save_points
            .front()
            .map_or(len, |stop| stop.at)
            .min(len);
        if stop - self.done <= size {
            stop
        } else {
            (self.done / size + 1) * size
        }
    }

    /// Prefills one chunk. `last` is the logits request for the prompt's last token. Its row is
    /// returned once the prompt is prefilled, empty without a request.
    pub(super) fn chunk(
        &mut self,
        runner: &mut dyn Runner,
        prompt: &[TokenId],
        size: usize,
        last: Option<&LogitsRequest>,
    ) -> Result<Option<LogitsRow>, DeviceError> {
        let end = self.next_chunk_end(prompt.len(), size);
        let tokens = &prompt[self.done..end];
        let mut requests: Vec<(usize, LogitsRequest)> = Vec::new();
        let followers = prompt[self.done + 1..].iter().take(tokens.len());
        if let Some(n) = self.top_logprobs {
            requests.extend(
                followers
                    .clone()
                    .map(|next| logprob_request(*next, n))
                    .enumerate(),
            );
        }
        let ends = end == prompt.len();
        let asked = last.filter(|_| ends);
        requests.extend(asked.map(|ask| (tokens.len() - 1, ask.clone())));
        let mut rows = runner.prefill(self.seq, tokens, &requests)?;
        if rows.len() != requests.len() {
            return Err(DeviceError::InvalidCall {
                call: "prefill",
                detail: format!(
                    "{} rows came back for {} requests",
                    rows.len(),
                    requests.len()
                ),
            });
        }
        let row = match asked {
            Some(_) => rows.pop(),
            None => ends.then(LogitsRow::default),
        };
        if let Some(n) = self.top_logprobs {
            let top_logprobs = followers.zip(&rows);
            self.logprobs
                .extend(top_logprobs.map(|(next, row)| Some(requested_logprob(row, *next, n))));
        }
        self.done = end;
        Ok(row)
    }

    /// Logprobs of the whole prompt once it is prefilled, if they are reported.
    pub(super) fn take_logprobs(&mut self) -> Option<Vec<Option<Logprobs>>> {
        self.top_logprobs
            .map(|_| std::mem::take(&mut self.logprobs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remainder_before_a_save_point_is_one_chunk_when_it_fits() {
        let positions = |save_points: &[usize]| {
            save_points
                .iter()
                .map(|at| SavePoint {
                    at: *at,
                    system_prefix: false,
                })
                .collect()
        };
        for (done, save_points, len, expected) in [
            (0, &[][..], 5000, vec![2048, 4096, 5000]),
            (0, &[1984, 4096], 5000, vec![1984, 2048, 4096, 5000]),
            // Resumed between two multiples: across the next one, if all of it fits.
            (1984, &[3072], 3100, vec![3072, 3100]),
            (1984, &[4096], 4100, vec![2048, 4096, 4100]),
        ] {
            let mut prefill = Prefill::new(SeqId(0), None).resumed(done, positions(save_points));
            let mut ends = Vec::new();
            while prefill.done < len {
                prefill.done = prefill.next_chunk_end(len, 2048);
                prefill.take_reached();
                ends.push(prefill.done);
            }
            assert_eq!(ends, expected, "from {done}, save_points {save_points:?}");
        }
    }

    #[test]
    fn chunk_size_is_a_multiple_of_the_alignment() {
        for (limit, align, expected) in [
            (512, 64, 512),
            (500, 64, 448),
            (64, 64, 64),
            (63, 64, 63),
            (100, 1, 100),
            (7, 0, 7),
            (0, 64, 1),
        ] {
            assert_eq!(chunk_size(limit, align), expected, "{limit} by {align}");
        }
    }
}
