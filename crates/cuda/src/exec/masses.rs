//! Rows that a request asks for whole, answered by the part that decides ([`MassQuery`]).
//!
//! The GPU sums the masses with the bits of [`contract::mass`]. Where it cannot settle a row, the
//! whole row is the answer.

use contract::{DeviceError, LogitsRequest, LogitsRow, LogitsSelection, MassPart, MassQuery};

use super::{Engine, Reduced, top};
use crate::launch::logits::{self, TopLogits};
use crate::plan::PlanKey;
use crate::step;

impl Engine {
    /// Queues the masses of a step's rows whose requests have a query; false if none has one.
    pub(super) fn queue_masses(
        &mut self,
        rows: usize,
        edited: bool,
        requests: &[&LogitsRequest],
    ) -> Result<bool, DeviceError> {
        let made = Reduced {
            edited,
            masses: true,
        };
        let items = requests.iter().enumerate();
        let items: Vec<(usize, MassQuery)> = items
            .filter_map(|(row, ask)| Some((row, made.query(ask)?)))
            .collect();
        if items.is_empty() {
            return Ok(false);
        }
        let queries = logits::queries(&items);
        self.headers.up.masses.as_mut_slice()[..queries.len()].copy_from_slice(&queries);
        let (gpu, to) = (&self.gpu, self.plans.addresses.mass_queries);
        // SAFETY: written again only by the next step, after this one's wait.
        unsafe { gpu.copy_to_device(gpu.stream(), to, &self.headers.up.masses, 0..queries.len()) }?;
        self.queue(PlanKey::Masses {
            rows: step::bucket(rows),
            edited,
        })?;
        let from = self.plans.addresses.masses;
        let bytes = logits::mass_bytes(requests.len());
        let (gpu, to) = (&self.gpu, &mut self.headers.masses);
        // SAFETY: read only after the step's wait.
        unsafe { gpu.copy_to_host(gpu.stream(), to, 0..bytes, from) }?;
        Ok(true)
    }

    /// The part of row `row` that answers its query; `None` if the whole row has to.
    pub(super) fn mass_part(
        &self,
        row: usize,
        query: MassQuery,
        best: &TopLogits,
    ) -> Option<LogitsRow> {
        let found = logits::read_mass(self.headers.masses.as_slice(), row);
        if found.total <= 0.0 {
            return None;
        }
        let part = match query.part {
            MassPart::AtShare(_) => {
                let (id, logit, raw) = found.token?;
                let token = TopLogits {
                    ids: vec![id],
                    logits: vec![logit],
                    raw: vec![raw],
                    ..*best
                };
                top(token, 1)
            }
            MassPart::Best(cut) => {
                let vocab = self.plans.reduce.vocab;
                let heavy = cut.covered_by(&best.logits, query.divisor, found.total, vocab)?;
                top(best.clone(), heavy)
            }
        };
        Some(LogitsRow {
            mass: found.total,
            ..part
        })
    }
}

impl Reduced {
    /// The query of a request whose row the GPU has in the form that was asked for.
    pub(super) fn query(self, ask: &LogitsRequest) -> Option<MassQuery> {
        let is_made = self.masses && (self.edited || ask.processors.is_none());
        let query = ask.mass.filter(|_| ask.selection == LogitsSelection::Full);
        query.filter(|_| is_made)
    }
}
