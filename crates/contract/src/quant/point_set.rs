//! Sets of code points, and which points are near a vector of levels that is none.

/// A set of points of `D` levels each, every level below `levels`.
///
/// Distances are between the levels themselves, which stand for the values 1, 3, 5 and so on.
pub(super) struct PointSet<const D: usize> {
    points: &'static [[u8; D]],
    levels: usize,
    /// For each vector of levels, lowest coordinate first: `index` if it is a point, otherwise
    /// `-1 - begin` of its list in `near`.
    places: Vec<i32>,
    /// Lists of points, each after its length.
    near: Vec<u16>,
}

impl<const D: usize> PointSet<D> {
    /// Prepares the lists: the points at the `distances` smallest distances, nearest first, equal
    /// ones in the order of the set.
    pub(super) fn new(points: &'static [[u8; D]], levels: usize, distances: usize) -> PointSet<D> {
        let mut set = PointSet {
            points,
            levels,
            places: vec![-1; levels.pow(D as u32)],
            near: Vec::new(),
        };
        for (index, point) in points.iter().enumerate() {
            let place = set.place(point);
            set.places[place] = index as i32;
        }
        let mut by_distance: Vec<Vec<u16>> = vec![Vec::new(); D * levels * levels];
        for place in 0..set.places.len() {
            if set.places[place] >= 0 {
                continue;
            }
            let mut rest = place;
            let wanted: [u8; D] = std::array::from_fn(|_| {
                let level = (rest % levels) as u8;
                rest /= levels;
                level
            });
            by_distance.iter_mut().for_each(Vec::clear);
            for (index, point) in points.iter().enumerate() {
                let pairs = point.iter().zip(&wanted);
                let squares = pairs.map(|(a, b)| usize::from(a.abs_diff(*b)).pow(2));
                by_distance[squares.sum::<usize>()].push(index as u16);
            }
            let begin = set.near.len();
            set.near.push(0);
            let used = by_distance.iter().filter(|list| !list.is_empty());
            set.near.extend(used.take(distances).flatten());
            set.near[begin] = (set.near.len() - begin - 1) as u16;
            set.places[place] = -1 - begin as i32;
        }
        set
    }

    fn place(&self, levels: &[u8; D]) -> usize {
        let digits = levels.iter().rev();
        digits.fold(0, |place, &level| place * self.levels + usize::from(level))
    }

    /// The point of these levels, or the points to choose from.
    pub(super) fn find(&self, levels: &[u8; D]) -> Result<u16, &[u16]> {
        let place = self.places[self.place(levels)];
        match usize::try_from(place) {
            Ok(index) => Ok(index as u16),
            Err(_) => {
                let begin = (-1 - place) as usize;
                Err(&self.near[begin + 1..][..usize::from(self.near[begin])])
            }
        }
    }

    /// The levels of a point.
    pub(super) fn levels(&self, index: u16) -> &'static [u8; D] {
        &self.points[usize::from(index)]
    }
}
