//! Responses in memory, the least recently used ones out first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use chat::responses::stored::item_ids;

use super::KeptResponse;

pub(super) struct ResponseMemory {
    budget: u64,
    bytes: u64,
    /// Grows with each use.
    clock: u64,
    entries: HashMap<String, Entry>,
    /// Ids by their last use.
    by_use: BTreeMap<u64, String>,
    /// The response that holds an item, by the item's id.
    holders: HashMap<String, String>,
}

struct Entry {
    response: Arc<KeptResponse>,
    used: u64,
    items: Vec<String>,
}

impl ResponseMemory {
    pub(super) fn new(budget: u64) -> ResponseMemory {
        ResponseMemory {
            budget,
            bytes: 0,
            clock: 0,
            entries: HashMap::new(),
            by_use: BTreeMap::new(),
            holders: HashMap::new(),
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.budget > 0
    }

    /// Adds a response, unless it alone is over the budget, and drops others until all fit.
    pub(super) fn insert(&mut self, response: Arc<KeptResponse>) {
        let bytes = response.bytes();
        self.remove(&response.id);
        if bytes > self.budget {
            return;
        }
        let mut items = item_ids(&response.output);
        items.extend(item_ids(&response.input));
        for item in &items {
            self.holders.insert(item.clone(), response.id.clone());
        }
        self.clock += 1;
        let (id, used) = (response.id.clone(), self.clock);
        self.by_use.insert(used, id.clone());
        let entry = Entry {
            response,
            used,
            items,
        };
        self.entries.insert(id, entry);
        self.bytes += bytes;
        while self.bytes > self.budget
            && let Some((_, oldest)) = self.by_use.first_key_value()
        {
            let oldest = oldest.clone();
            self.remove(&oldest);
        }
    }

    pub(super) fn get(&mut self, id: &str) -> Option<Arc<KeptResponse>> {
        let entry = self.entries.get_mut(id)?;
        self.clock += 1;
        self.by_use.remove(&entry.used);
        entry.used = self.clock;
        self.by_use.insert(entry.used, id.to_owned());
        Some(Arc::clone(&entry.response))
    }

    /// The response with an item of this id.
    pub(super) fn holder_of(&mut self, item: &str) -> Option<Arc<KeptResponse>> {
        let id = self.holders.get(item)?.clone();
        self.get(&id)
    }

    pub(super) fn remove(&mut self, id: &str) -> bool {
        let Some(entry) = self.entries.remove(id) else {
            return false;
        };
        self.by_use.remove(&entry.used);
        self.bytes -= entry.response.bytes();
        for item in entry.items {
            // A later response may hold an item of the same id.
            if self.holders.get(&item).is_some_and(|holder| holder == id) {
                self.holders.remove(&item);
            }
        }
        true
    }
}
