//! Which block does what of a phase of several rows. Every task waits for all of the phase before.

use super::assignment::Assignment;
use super::exchange::At;
use super::operation::{Body, Gemv, Matrix, Operation, Packed, low};
use super::task::{GEMV_PARTS_WORD, NORM_WORD, Task, TaskKind, TaskTile, TilePart, flag};
use crate::launch::gemm::words::pair;
use crate::pack::M16_ROWS;

/// Rows of an f32 matrix in a task.
const F32_ROWS: usize = 2;

/// Groups of four warps, each a block of the separate kernel, that a task of such blocks has.
fn blocks_of_four_warps(kind: TaskKind, warps: usize) -> usize {
    match kind {
        TaskKind::Append | TaskKind::GatedNorm => warps / 4,
        _ => 1,
    }
}

/// A tile of a matrix, or of gate and up, and its parts behind `sums` others.
fn tile_of(packed: &Packed, tile: usize, sums: usize, gemv: &Gemv) -> (TaskTile, Vec<TilePart>) {
    let first = &packed.matrices[0];
    let first_row = tile * M16_ROWS;
    let mut parts: Vec<TilePart> = Vec::new();
    let (mut factors, mut ends) = ([0; 2], [0; 2]);
    for (i, matrix) in packed.matrices.iter().enumerate() {
        let begin = sums + parts.len();
        let of_matrix = matrix.parts(packed.ranges, tile).into_iter();
        parts.extend(of_matrix.map(|part| TilePart {
            sum: begin + part.sum,
            ..part
        }));
        (factors[i], ends[i]) = (matrix.factors(tile), parts.len());
    }
    // The values of a gated unit are rows of `gemm/a16_layout.cuh`, of as many step rows as x.
    let begin = if gemv.flags & flag::SWIGLU != 0 {
        tile / 4 * gemv.chunk_stride + tile % 4 * 256
    } else {
        4 * first_row
    };
    let tile = TaskTile {
        factors,
        residual: u64::from(first.adds),
        copy: first.out + begin as u64,
        out: first.stride,
        first_sum: sums,
        n_first: ends[0],
        n_sums: parts.len(),
        rows: M16_ROWS.min(first.rows - first_row),
    };
    (tile, parts)
}

/// Writes the norm of a task's input behind its other words.
fn add_norm(task: &mut Task, gemv: &Gemv) {
    if let Some(norm) = gemv.norm {
        task.words.resize(NORM_WORD, 0);
        let words = [norm.x, norm.weight, norm.header, norm.eps];
        task.words.extend(words);
    }
}

impl Assignment {
    /// Adds a phase of several rows.
    pub(super) fn push_rows(&mut self, operation: &Operation) {
        self.begin_phase();
        let tasks = match operation {
            Operation::Gemv(gemv) => self.f32_rows(gemv) + self.packed_rows(gemv),
            Operation::Body(body) => self.body_rows(body),
        };
        self.end_phase(tasks);
    }

    /// A task that multiplies, with the norm of its input.
    fn product_task(
        &self,
        kind: TaskKind,
        place: (usize, usize),
        (gemv, words): (&Gemv, &[u64]),
    ) -> Task {
        let mut task = self.row_task(kind, place, words);
        task.flags = gemv.flags;
        if let Some(norm) = gemv.norm {
            task.flags |= flag::NORM | norm.flags;
            if !gemv.f32.is_empty() {
                task.flags |= flag::F32_INPUT;
            }
        }
        task
    }

    /// A task that waits for all of the phase before, at words of the plan.
    fn row_task(&self, kind: TaskKind, place: (usize, usize), words: &[u64]) -> Task {
        let words: Vec<At> = words.iter().map(|word| At::Plan(*word)).collect();
        Task {
            wait: self.before,
            raise: Some(self.phase),
            ..self.task(kind, place, &words)
        }
    }

    fn f32_rows(&mut self, gemv: &Gemv) -> usize {
        let mut tasks = 0;
        for matrix in &gemv.f32 {
            let slice_and_stride = pair(low(matrix.slice_and_eps), matrix.stride);
            let words = [matrix.x, matrix.weights, matrix.out, slice_and_stride];
            let groups = matrix.rows.div_ceil(F32_ROWS);
            let taken = self.share(groups);
            let mut group = 0;
            for (block, taken) in taken.into_iter().enumerate() {
                for _ in 0..taken {
                    let first = group * F32_ROWS;
                    let range = (first, F32_ROWS.min(matrix.rows - first));
                    let mut task = self.product_task(TaskKind::GemvF32, range, (gemv, &words));
                    add_norm(&mut task, gemv);
                    self.add(block, task);
                    self.loaded[block] += 4 * F32_ROWS * gemv.columns;
                    group += 1;
                }
            }
            tasks += group;
        }
        tasks
    }

    fn packed_rows(&mut self, gemv: &Gemv) -> usize {
        let tiles: Vec<(&Packed, usize)> = gemv
            .packed
            .iter()
            .flat_map(|packed| (0..packed.matrices[0].tiles()).map(move |tile| (packed, tile)))
            .collect();
        let Some((first, _)) = tiles.first() else {
            return 0;
        };
        let words = [first.x, 0, pair(gemv.chunk_stride, 0), 0];
        let (mut at, mut tasks) = (0, 0);
        for (block, taken) in self.share(tiles.len()).into_iter().enumerate() {
            let end = at + taken;
            while at < end {
                let (mut of_task, mut parts) = (Vec::new(), Vec::new());
                while at < end {
                    let (packed, tile) = tiles[at];
                    let (tile, more) = tile_of(packed, tile, parts.len(), gemv);
                    if !of_task.is_empty() && parts.len() + more.len() > self.shape.sums {
                        break;
                    }
                    let bytes = packed.matrices.iter().map(Matrix::tile_bytes);
                    self.loaded[block] += bytes.sum::<usize>();
                    of_task.push(tile);
                    parts.extend(more);
                    at += 1;
                }
                let mut task = self.product_task(TaskKind::Gemv, (0, 0), (gemv, &words));
                debug_assert_eq!(task.words.len(), GEMV_PARTS_WORD);
                task.tiles = of_task;
                self.add_parts(block, &mut task, parts);
                add_norm(&mut task, gemv);
                self.add(block, task);
                tasks += 1;
            }
        }
        tasks
    }

    fn body_rows(&mut self, body: &Body) -> usize {
        let step = blocks_of_four_warps(body.kind, self.shape.warps);
        let mut places: Vec<(usize, usize)> = Vec::new();
        if body.tasks == 0 {
            places.extend((0..self.blocks.len()).map(|block| (block, 0)));
        }
        for row in 0..body.rows {
            places.extend((0..body.tasks).step_by(step).map(|first| (first, row)));
        }
        let taken = if body.tasks == 0 {
            vec![1; self.blocks.len()]
        } else {
            self.share(places.len())
        };
        let n = places.len();
        let mut places = places.into_iter();
        for (block, taken) in taken.into_iter().enumerate() {
            for place in places.by_ref().take(taken) {
                let task = self.row_task(body.kind, place, &body.words);
                self.loaded[block] += body.bytes;
                self.add_with_workspace(block, task, body.workspace);
            }
        }
        n
    }
}
