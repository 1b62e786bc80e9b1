//! Where the layers are cut.

use std::ops::Range;

use super::{PlacementDevice, PlacementError};

/// Steps of the search for the lowest peak share of memory: to one part in a million.
const SEARCH_STEPS: usize = 20;

/// Ranges in proportion to `weights`, rounded to whole layers.
pub(super) fn by_weights(
    weights: &[f64],
    devices: &[PlacementDevice],
    n_layers: usize,
) -> Result<Vec<Range<usize>>, PlacementError> {
    if weights.len() != devices.len() {
        return Err(PlacementError::Weights {
            weights: weights.len(),
            devices: devices.len(),
        });
    }
    let total: f64 = weights.iter().sum();
    let mut ranges = Vec::with_capacity(devices.len());
    let (mut below, mut start) = (0.0, 0);
    for (weight, device) in weights.iter().zip(devices) {
        below += weight;
        let end = (n_layers as f64 * below / total).round();
        // A weight that is negative, zero or no number has no layer.
        let end = if end.is_finite() { end as usize } else { start };
        if !weight.is_finite() || *weight <= 0.0 || end <= start {
            return Err(PlacementError::NoLayer {
                device: device.id.clone(),
                weight: *weight,
                layers: n_layers,
            });
        }
        ranges.push(start..end.min(n_layers));
        start = end;
    }
    Ok(ranges)
}

/// Ranges with the lowest peak share of memory in use. `bytes` gives the memory of a device with
/// these layers and must grow with them.
pub(super) fn by_memory(
    devices: &[PlacementDevice],
    n_layers: usize,
    bytes: impl Fn(usize, Range<usize>) -> u64,
) -> Vec<Range<usize>> {
    let share = |device: usize, layers: Range<usize>| {
        bytes(device, layers) as f64 / devices[device].usable_bytes.max(1) as f64
    };
    // Fills each device up to a share, bottom to top; the last one takes what is left.
    let fill = |limit: f64| -> (Vec<Range<usize>>, f64) {
        let (mut ranges, mut start, mut peak) = (Vec::new(), 0, 0.0_f64);
        for device in 0..devices.len() {
            let behind = devices.len() - device - 1;
            let mut end = if behind == 0 { n_layers } else { start + 1 };
            while behind > 0 && end + behind < n_layers && share(device, start..end + 1) <= limit {
                end += 1;
            }
            peak = peak.max(share(device, start..end));
            ranges.push(start..end);
            start = end;
        }
        (ranges, peak)
    };
    // A limit of zero leaves one layer to each device but the last: a peak that is enough.
    let (mut best, mut high) = fill(0.0);
    let mut low = 0.0;
    for _ in 0..SEARCH_STEPS {
        let middle = f64::midpoint(low, high);
        let (ranges, peak) = fill(middle);
        if peak > middle {
            low = middle;
        }
        if peak < high {
            (best, high) = (ranges, peak);
        }
    }
    best
}
