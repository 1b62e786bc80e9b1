//! The launches of a decode step with what each takes, by machine code.

use std::collections::{BTreeMap, BTreeSet};

use super::counts::Counts;
use super::listing::{CodeLoop, KernelCode};
use crate::compile::EntryReport;
use crate::launch::gemm::work::{MatrixWork, copies_of_slice, matrices, phases, unit_of_kind};
use crate::launch::{CompileUnit, Launch};
use crate::pack::{A16_TILE, WeightKind};

/// Warps of a block that multiply.
const MATH_WARPS: usize = 8;
/// Bytes that the shared memory of a multiprocessor moves in a clock.
const SHARED_BYTES_PER_CLOCK: usize = 128;
/// Rows of the delta rule's tiles.
const TILE_ROWS: usize = 8;

/// Machine code of a compiled unit.
#[derive(Debug, Clone)]
pub struct UnitCode {
    /// Its kernels.
    pub kernels: Vec<KernelCode>,
    /// What the assembler says of them.
    pub reports: Vec<EntryReport>,
}

/// Why machine code cannot be counted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CostError {
    /// A kernel of the plan is not in the listing.
    #[error("{entry} is not in the listing of {unit}; list the units that `Sheet::units` names")]
    NoKernel {
        /// The kernel.
        entry: &'static str,
        /// Where it was sought.
        unit: String,
    },
    /// The main loop of products looks other than expected.
    #[error("{unit} has {found}, so its loops cannot be counted; adapt cuda::cost to the kernel")]
    Loops {
        /// The unit.
        unit: String,
        /// What was found.
        found: String,
    },
}

/// Products by one kind of weights in a launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Products {
    /// The kind.
    pub kind: WeightKind,
    /// Work units of a launch.
    pub units: usize,
    /// Bytes of weights that they read.
    pub weight_bytes: usize,
    /// Instructions of one of the eight warps per work unit.
    pub per_unit: Counts,
}

/// Launches that are alike.
#[derive(Debug, Clone, PartialEq)]
pub struct LaunchCost {
    /// The kernel.
    pub entry: &'static str,
    /// Its source.
    pub file: &'static str,
    /// How many launches there are in a step.
    pub count: usize,
    /// Blocks of one.
    pub blocks: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Registers of a thread.
    pub registers: usize,
    /// Bytes spilled by a thread.
    pub spill_bytes: usize,
    /// Shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Products in main loops.
    pub products: Vec<Products>,
    /// Instructions of a warp outside main loops.
    pub path: f64,
}

/// The launches of a decode step.
#[derive(Debug, Clone, PartialEq)]
pub struct Sheet {
    /// Rows of the step.
    pub rows: usize,
    /// Launches of the step, alike ones together, in the order of their first.
    pub launches: Vec<LaunchCost>,
}

impl Sheet {
    /// The units to compile and list for the launches of a step: products with one kind of weights
    /// each, so that each has one main loop.
    pub fn units(launches: &[Launch]) -> Vec<CompileUnit> {
        let units: BTreeSet<CompileUnit> = launches.iter().flat_map(units_of).collect();
        units.into_iter().collect()
    }

    /// The costs of the launches of a step of `rows` rows, by the code of [`Sheet::units`].
    ///
    /// # Errors
    /// [`CostError`] if a kernel is not in the code, or its loops are not those it is known for.
    pub fn new(
        rows: usize,
        launches: &[Launch],
        code: &BTreeMap<CompileUnit, UnitCode>,
    ) -> Result<Sheet, CostError> {
        let mut sheet = Sheet {
            rows,
            launches: Vec::new(),
        };
        for launch in launches {
            let cost = cost_of(rows, launch, code)?;
            let is_alike = |other: &&mut LaunchCost| {
                let count = other.count;
                **other
                    == LaunchCost {
                        count,
                        ..cost.clone()
                    }
            };
            match sheet.launches.iter_mut().find(is_alike) {
                Some(alike) => alike.count += 1,
                None => sheet.launches.push(cost),
            }
        }
        Ok(sheet)
    }

    /// Launches of the step.
    pub fn n_launches(&self) -> usize {
        self.launches.iter().map(|launch| launch.count).sum()
    }
}

/// The kernel `entry` in the code of `unit`.
///
/// # Errors
/// [`CostError::NoKernel`] if it is not there.
pub(super) fn kernel_of<'a>(
    code: &'a BTreeMap<CompileUnit, UnitCode>,
    unit: &CompileUnit,
    entry: &'static str,
) -> Result<&'a KernelCode, CostError> {
    let kernels = code.get(unit).map(|code| code.kernels.as_slice());
    let mut kernels = kernels.unwrap_or_default().iter();
    let kernel = kernels.find(|kernel| kernel.entry == entry);
    kernel.ok_or_else(|| CostError::NoKernel {
        entry,
        unit: unit.to_string(),
    })
}

/// The one of `loops` with the most tensor instructions.
///
/// # Errors
/// [`CostError::Loops`] if there is none.
pub(super) fn main_loop(
    unit: &CompileUnit,
    loops: impl IntoIterator<Item = CodeLoop>,
) -> Result<CodeLoop, CostError> {
    let main = loops.into_iter().max_by_key(|main| main.once.tensor());
    main.ok_or_else(|| CostError::Loops {
        unit: unit.to_string(),
        found: "no loop of products".to_owned(),
    })
}

fn units_of(launch: &Launch) -> Vec<CompileUnit> {
    let of_kind = |work: &MatrixWork| unit_of_kind(launch, work.kind);
    let units: Vec<CompileUnit> = matrices(launch).iter().map(of_kind).collect();
    if units.is_empty() {
        vec![launch.unit.clone()]
    } else {
        units
    }
}

fn cost_of(
    rows: usize,
    launch: &Launch,
    code: &BTreeMap<CompileUnit, UnitCode>,
) -> Result<LaunchCost, CostError> {
    let volume = |sizes: [u32; 3]| sizes.iter().map(|&n| n as usize).product();
    let mut cost = LaunchCost {
        entry: launch.entry,
        file: launch.unit.file,
        count: 1,
        blocks: volume(launch.grid),
        threads: volume(launch.block),
        registers: 0,
        spill_bytes: 0,
        shared_bytes: launch.shared as usize,
        products: Vec::new(),
        path: 0.0,
    };
    for unit in units_of(launch) {
        let kernel = kernel_of(code, &unit, launch.entry)?;
        if let Some(report) = code[&unit]
            .reports
            .iter()
            .find(|report| report.entry == launch.entry)
        {
            cost.registers = cost.registers.max(report.registers as usize);
            cost.spill_bytes = cost.spill_bytes.max(report.spill_bytes as usize);
        }
        let trips = |depth| trips(launch.unit.file, rows, depth);
        let has_products = !matrices(launch).is_empty();
        let path = kernel.path(has_products, &trips) * phases(launch) as f64;
        cost.path = cost.path.max(path);
    }
    for work in matrices(launch) {
        let unit = unit_of_kind(launch, work.kind);
        let loops = code[&unit]
            .kernels
            .iter()
            .flat_map(KernelCode::product_loops);
        let main = main_loop(&unit, loops)?;
        let n8_tiles = unit.defines.iter().find(|(name, _)| *name == "N8_TILES");
        let n8_tiles = n8_tiles
            .and_then(|(_, tiles)| tiles.parse().ok())
            .unwrap_or(1);
        let is_fused = launch.entry == "fused_layer";
        let per_unit = per_unit(work.kind, n8_tiles, is_fused, &main);
        let per_unit = per_unit.map_err(|found| CostError::Loops {
            unit: unit.to_string(),
            found,
        })?;
        match cost.products.iter_mut().find(|own| own.kind == work.kind) {
            Some(own) => {
                own.units += work.units;
                own.weight_bytes += work.weight_bytes;
            }
            None => cost.products.push(Products {
                kind: work.kind,
                units: work.units,
                weight_bytes: work.weight_bytes,
                per_unit,
            }),
        }
    }
    Ok(cost)
}

/// Assumed times round of a loop without products, by its depth among such loops. The WY form of
/// the delta rule goes over tiles of 8 nodes, and within a tile over the nodes before, half of them
/// on average; other loops go round a fixed number of times, which the constant of a launch
/// includes.
fn trips(file: &str, rows: usize, depth: usize) -> f64 {
    let tiles = rows.div_ceil(TILE_ROWS) as f64;
    match (file, depth) {
        ("gated_delta/decode_wy_tree.cu", 1) => tiles,
        ("gated_delta/decode_wy_tree.cu", _) => (tiles / 2.0).max(1.0),
        _ => 1.0,
    }
}

/// Instructions of a warp per work unit of `n8_tiles` tiles of 8 rows: the main loop, its copies by
/// how many there are, and the shared memory that they write. In a fused layer a loop that copies
/// goes round once for each slice: it loads one when one is used.
fn per_unit(
    kind: WeightKind,
    n8_tiles: usize,
    is_fused: bool,
    main: &CodeLoop,
) -> Result<Counts, String> {
    let slices = kind.slices();
    let loops_of_slice = if is_fused { 1 } else { 3 };
    if !main.copies.is_empty() && main.copies.len() != loops_of_slice * slices {
        return Err(format!("{} loops that copy", main.copies.len()));
    }
    let mut counts = main.once;
    for (i, copy) in main.copies.iter().enumerate() {
        let rounds = if is_fused {
            1
        } else {
            copies_of_slice(kind, i / 3, n8_tiles)[i % 3] / 4
        };
        counts = counts.plus(copy, rounds);
    }
    // Copies take what they write, whatever the code's branches for the last few.
    let copied_by_code = counts.ldgsts * 4;
    let input = slices * slices * n8_tiles * A16_TILE;
    let bytes = kind.tile_bytes() * 16 + input;
    let written = bytes.div_ceil(SHARED_BYTES_PER_CLOCK * MATH_WARPS);
    counts.shared_clocks = counts.shared_clocks.saturating_sub(copied_by_code) + written;
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::listing::kernels;

    #[test]
    fn alike_launches_are_counted_together_by_the_code_of_their_unit() {
        let listing = include_str!("fixture.sass");
        let unit = CompileUnit::new("norm/rms_norm.cu").define("ROWS", 8);
        let launch = |grid: u32| Launch {
            entry: "other",
            unit: unit.clone(),
            grid: [grid, 1, 1],
            block: [64, 2, 1],
            shared: 512,
            args: crate::launch::Args::new(),
            cooperative: false,
            overlap: true,
        };
        let launches = [launch(4), launch(8), launch(4)];
        assert_eq!(Sheet::units(&launches), std::slice::from_ref(&unit));
        let code = UnitCode {
            kernels: kernels(listing),
            reports: vec![EntryReport {
                entry: "other".to_owned(),
                registers: 40,
                ..EntryReport::default()
            }],
        };
        let code = BTreeMap::from([(unit, code)]);
        let sheet = Sheet::new(8, &launches, &code).unwrap();
        assert_eq!((sheet.launches.len(), sheet.n_launches()), (2, 3));
        let first = &sheet.launches[0];
        assert_eq!((first.count, first.blocks, first.threads), (2, 4, 128));
        assert_eq!((first.registers, first.path), (40, 1.0));
        let missing = Sheet::new(8, &launches, &BTreeMap::new());
        assert!(matches!(missing, Err(CostError::NoKernel { .. })));
    }
}
