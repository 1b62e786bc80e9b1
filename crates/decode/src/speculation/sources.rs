//! The sources of drafted tokens, and sets of them.

use contract::{RunnerInfo, Tree};

/// A source of drafted tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DraftSource {
    /// The draft model, which fills a block of positions in one pass.
    Block,
    /// The model's own multi-token-prediction head, one depth per pass.
    Mtp,
    /// Earlier places of the same text.
    Suffix,
}

impl DraftSource {
    /// All sources, in the order of [`DraftSource::index`].
    pub const ALL: [DraftSource; 3] = [DraftSource::Block, DraftSource::Mtp, DraftSource::Suffix];

    /// Index in arrays with an entry per source.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Its public name.
    pub const fn name(self) -> &'static str {
        match self {
            DraftSource::Block => "block",
            DraftSource::Mtp => "mtp",
            DraftSource::Suffix => "suffix",
        }
    }

    /// Maximum number of drafted tokens of a path; 0 if the runner lacks the source.
    pub fn depth(self, info: &RunnerInfo) -> usize {
        match self {
            DraftSource::Block => info.draft_depth.unwrap_or(0),
            DraftSource::Mtp => info.mtp.map_or(0, |mtp| mtp.max_depth),
            DraftSource::Suffix => Tree::MAX_NODES - 1,
        }
    }
}

/// A set of sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SourceSet(u8);

impl SourceSet {
    /// No source.
    pub const NONE: SourceSet = SourceSet(0);
    /// All sources.
    pub const ALL: SourceSet = SourceSet(7);
    /// Number of different sets.
    pub(crate) const COUNT: usize = 8;

    /// The set of these sources.
    pub fn of(sources: &[DraftSource]) -> SourceSet {
        sources
            .iter()
            .fold(SourceSet::NONE, |set, source| set.with(*source))
    }

    /// This set and one more source.
    #[must_use]
    pub const fn with(self, source: DraftSource) -> SourceSet {
        SourceSet(self.0 | 1 << source.index())
    }

    /// This set without a source.
    #[must_use]
    pub const fn without(self, source: DraftSource) -> SourceSet {
        SourceSet(self.0 & !(1 << source.index()))
    }

    /// Whether a source is in it.
    pub const fn contains(self, source: DraftSource) -> bool {
        self.0 & 1 << source.index() != 0
    }

    /// Whether it has no source.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Its sources.
    pub fn iter(self) -> impl Iterator<Item = DraftSource> + Clone {
        let all = DraftSource::ALL.into_iter();
        all.filter(move |source| self.contains(*source))
    }

    /// Those that a runner has.
    #[must_use]
    pub fn available(self, info: &RunnerInfo) -> SourceSet {
        self.iter()
            .filter(|source| source.depth(info) > 0)
            .fold(SourceSet::NONE, SourceSet::with)
    }

    /// The non-empty sets of its sources that cost a pass.
    pub(crate) fn plans(self) -> impl Iterator<Item = SourceSet> {
        let costly = self.without(DraftSource::Suffix);
        (1..SourceSet::COUNT as u8)
            .map(SourceSet)
            .filter(move |set| set.0 & !costly.0 == 0)
    }

    /// Index in arrays with an entry per set.
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_their_sources_and_list_their_plans() {
        use DraftSource::{Block, Mtp, Suffix};
        let set = SourceSet::of(&[Mtp, Suffix]);
        assert!(set.contains(Mtp) && !set.contains(Block) && !set.is_empty());
        assert_eq!(set.iter().collect::<Vec<_>>(), [Mtp, Suffix]);
        assert_eq!(set.with(Block), SourceSet::ALL);
        assert_eq!(set.plans().collect::<Vec<_>>(), [SourceSet::of(&[Mtp])]);
        assert_eq!(SourceSet::ALL.plans().count(), 3);
        assert_eq!(SourceSet::of(&[Suffix]).plans().count(), 0);
    }
}
