//! Reads a prompt chunk by chunk.
//!
//! Chunks end at absolute multiples of one size, itself a multiple of the runner's alignment, or where a state is to
//! be saved, at another multiple of the alignment, so a prompt gives the same bits however its reading is interleaved,
//! and wherever it was resumed. What is left before such a place is one chunk if it fits: each chunk costs a device
//! about as much as several hundred tokens, and a short turn that was resumed between two multiples should cost one.

use std::collections::VecDeque;

use contract::{DeviceError, LogitsRequest, LogitsRow, Runner, SeqId, TokenId};

use crate::event::Logprobs;
use crate::prefix::SavePoint;
use crate::sample::{logprob_request, requested_logprob};

/// The size all chunks are cut by: the largest multiple of `align` within `limit`, or `limit` where there
/// is none.
pub(super) fn chunk_size(limit: usize, align: usize) -> usize {
    let align = align.max(1);
    match limit / align * align {
        0 => limit.max(1),
        size => size,
    }
}

/// The reading of one prompt.
#[derive(Debug)]
pub(super) struct Prefill {
    /// The sequence it is read into; closed by whoever takes the prefill out of the scheduler.
    pub(super) seq: SeqId,
    /// Tokens read so far.
    pub(super) done: usize,
    /// How many best tokens are to be told with each prompt token's logprob, if any are.
    told: Option<usize>,
    /// Logprobs of the tokens read so far and the one after.
    logprobs: Vec<Option<Logprobs>>,
    /// Where the state is to be saved: chunks end there too. Places behind which nothing was read yet, rising.
    save_points: VecDeque<SavePoint>,
}

impl Prefill {
    /// The reading of a prompt into a fresh sequence.
    pub(super) fn new(seq: SeqId, told: Option<usize>) -> Prefill {
        Prefill {
            seq,
            done: 0,
            told,
            // Nothing stands before the first token, so nothing says how likely it was.
            logprobs: vec![None],
            save_points: VecDeque::new(),
        }
    }

    /// The same for a sequence that holds the first `done` tokens, to be saved at `save_points`, all of them later.
    pub(super) fn resumed(self, done: usize, save_points: Vec<SavePoint>) -> Prefill {
        Prefill {
            done,
            save_points: save_points.into(),
            ..self
        }
    }

    /// The place to save that has just been reached, if one has.
    pub(super) fn reached(&mut self) -> Option<SavePoint> {
        let done = self.done;
        self.save_points.pop_front_if(|stop| stop.at == done)
    }

    /// Whether the next chunk is the last of a prompt of `len` tokens.
    pub(super) fn ends_next(&self, len: usize, size: usize) -> bool {
        self.next_end(len, size) == len
    }

    /// Where the next chunk ends: where a state is to be saved or with the prompt, if that is within `size`, or else at
    /// the next absolute multiple of `size`.
    fn next_end(&self, len: usize, size: usize) -> usize {
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

    /// Reads one chunk. `last` is what to ask at the last token of the prompt, if anything; the row comes
    /// back once the prompt is read, empty where nothing was asked.
    pub(super) fn chunk(
        &mut self,
        runner: &mut dyn Runner,
        prompt: &[TokenId],
        size: usize,
        last: Option<&LogitsRequest>,
    ) -> Result<Option<LogitsRow>, DeviceError> {
        let end = self.next_end(prompt.len(), size);
        let tokens = &prompt[self.done..end];
        let mut requests: Vec<(usize, LogitsRequest)> = Vec::new();
        let followers = prompt[self.done + 1..].iter().take(tokens.len());
        if let Some(n) = self.told {
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
        if let Some(n) = self.told {
            let told = followers.zip(&rows);
            self.logprobs
                .extend(told.map(|(next, row)| Some(requested_logprob(row, *next, n))));
        }
        self.done = end;
        Ok(row)
    }

    /// Logprobs of the whole prompt once it is read, if they are to be told.
    pub(super) fn take_logprobs(&mut self) -> Option<Vec<Option<Logprobs>>> {
        self.told.map(|_| std::mem::take(&mut self.logprobs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remainder_before_a_save_point_is_one_chunk_when_it_fits() {
        let places = |save_points: &[usize]| {
            save_points
                .iter()
                .map(|at| SavePoint {
                    at: *at,
                    head: false,
                })
                .collect()
        };
        for (done, save_points, len, expected) in [
            (0, &[][..], 5000, vec![2048, 4096, 5000]),
            (0, &[1984, 4096], 5000, vec![1984, 2048, 4096, 5000]),
            // Resumed between two multiples: across the next one, where all of it fits.
            (1984, &[3072], 3100, vec![3072, 3100]),
            (1984, &[4096], 4100, vec![2048, 4096, 4100]),
        ] {
            let mut prefill = Prefill::new(SeqId(0), None).resumed(done, places(save_points));
            let mut ends = Vec::new();
            while prefill.done < len {
                prefill.done = prefill.next_end(len, 2048);
                prefill.reached();
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
